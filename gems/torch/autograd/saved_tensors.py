"""What a stage saves for backward: one chain of steps that pack a tensor, and unpack it in reverse.

    pack       tensor ──► shard      ──► tile, halos ──► offload     what is left is saved
    unpack     tensor ◄── all_gather ◄── assemble    ◄── prefetch

A step packs a tensor itself, or packs parts of it by the steps after it; a stage has the steps that
its plan asks for. The chain is on what autograd saves, by its hooks, and on what GEMS saves itself:
inputs of a recomputed or streamed stage, and of layers whose weight gradients are deferred.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

Tensor = torch.Tensor


class PackedTensor:
    """A saved tensor, which must not change if it has a `version`: autograd itself checks that only
    for tensors that no hook packs."""

    def __init__(self, x: Tensor, version: int | None) -> None:
        self.tensor: Tensor | None = x.detach()
        self.version, self.shape, self.changed = version, tuple(x.shape), False

    @property
    def nbytes(self) -> int:
        return 0 if self.tensor is None else self.tensor.nbytes

    def check_version(self) -> None:
        if self.tensor is not None and self.version is not None:
            self.changed = self.tensor._version != self.version

    def unpack(self) -> Tensor:
        self.check_version()
        if self.changed:
            raise RuntimeError(
                f"a tensor needed for a gradient, of shape {self.shape}, has been modified by an "
                "inplace operation; use one that is not in place"
            )
        assert self.tensor is not None, "not prefetched"
        return self.tensor


@dataclass(frozen=True)
class PackedParts:
    """A tensor that is assembled of parts, each of them packed."""

    parts: Sequence[Saved]
    assemble: Callable[..., Tensor]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def unpack(self) -> Tensor:
        return self.assemble(*map(unpacked, self.parts))


Saved = Tensor | PackedTensor | PackedParts
Pack = Callable[[Tensor, int | None], Saved]


class Step(Protocol):
    def pack(self, x: Tensor, version: int | None, rest: Pack) -> Saved:
        """What to save of a tensor; `rest` packs by the steps after this one."""
        ...


def unpacked(x: Saved) -> Tensor:
    return x if isinstance(x, Tensor) else x.unpack()


class SavedTensors:
    """A chain of steps. Without any, autograd saves as it always does."""

    def __init__(self, *steps: Step | None) -> None:
        self.steps = tuple(step for step in steps if step is not None)

    def pack(self, x: Tensor, version: int | None, first: int = 0) -> Saved:
        if first == len(self.steps):
            return x if version is None else PackedTensor(x, version)
        return self.steps[first].pack(x, version, lambda y, v: self.pack(y, v, first + 1))

    def hooks(self) -> AbstractContextManager[Any]:
        """Pack what autograd saves inside."""
        if not self.steps:
            return nullcontext()
        pack = lambda x: self.pack(x, x._version)  # noqa: E731
        return torch.autograd.graph.saved_tensors_hooks(pack, unpacked)
