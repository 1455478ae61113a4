"""What a cut stage keeps for backward: the rank's own part and the strips, never a second copy.

A layer that reads beyond its tile runs on a slab, a copy of the tile with strips of its neighbours
around it. Autograd would keep the slab; here it keeps the tile, which the layer before has anyway,
and the strips, and puts them together again when backward asks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from gems.torch.offload.activations import PackedTensor, SavedTensors, unpacked
from gems.torch.spatial.group import Exchange
from gems.torch.tracing.op_meter import storage_of

Tensor = torch.Tensor


@dataclass
class Bare:
    """A slab that is a tile within a border of a constant: the tile alone."""

    tile: Tensor | PackedTensor
    version: int
    pads: list[int]
    fill: float

    @property
    def kept(self) -> Sequence[Tensor]:
        return (unpacked(self.tile),)

    def put(self, bundle: SavedTensors) -> Bare:
        """The same, with what can be put away."""
        return replace(self, tile=bundle.pack(unpacked(self.tile), self.version))

    def together(self) -> Tensor:
        tile = _unchanged(self.tile, self.version)
        return F.pad(tile, self.pads, value=self.fill)


@dataclass
class Parts:
    """A slab, taken apart."""

    tile: Tensor | PackedTensor
    version: int
    exchange: Exchange
    strips: Sequence[Tensor | PackedTensor]

    @property
    def kept(self) -> Sequence[Tensor]:
        return (unpacked(self.tile), *map(unpacked, self.strips))

    def put(self, bundle: SavedTensors) -> Parts:
        tile, strips = bundle.pack(unpacked(self.tile), self.version), map(unpacked, self.strips)
        return replace(self, tile=tile, strips=[bundle.pack(strip) for strip in strips])

    def together(self) -> Tensor:
        tile = _unchanged(self.tile, self.version)
        return self.exchange.slab(tile, list(map(unpacked, self.strips)))


def _unchanged(tile: Tensor | PackedTensor, version: int) -> Tensor:
    if isinstance(tile, PackedTensor):
        return tile.unpack()  # which looks for itself
    if tile._version != version:
        raise RuntimeError(
            f"a tensor needed for a gradient, of shape {tuple(tile.shape)}, has been modified by "
            "an inplace operation; use one that is not in place"
        )
    return tile


class Slabs:
    """The slabs of one forward, for as long as the layers that read them run."""

    def __init__(self, weights: Set[int] = frozenset(), bundle: SavedTensors | None = None) -> None:
        self.weights = weights  # storages that are there anyway
        self.bundle = bundle  # if what is kept will be put away
        self.known: dict[int, tuple[tuple[int, ...], Parts | Bare]] = {}
        self.kept: dict[int, int] = {}  # storage -> bytes, of all that backward will need

    def note(self, slab: Tensor, x: Tensor, exchange: Exchange, strips: Sequence[Tensor]) -> None:
        parts = Parts(x.detach(), x._version, exchange, strips)
        self.known[slab.data_ptr()] = (tuple(slab.shape), parts)

    def note_framed(self, slab: Tensor, x: Tensor, pads: list[int], fill: float) -> None:
        parts = Bare(x.detach(), x._version, pads, fill)
        self.known[slab.data_ptr()] = (tuple(slab.shape), parts)

    def forget(self) -> None:
        """The layer has run: its slab's memory may become somebody else's."""
        self.known.clear()

    def pack(self, x: Tensor) -> Any:
        shape, parts = self.known.get(x.data_ptr(), ((), None))
        if parts is not None and tuple(x.shape) == shape and x.is_contiguous():
            for part in parts.kept:
                self._count(part)
            return parts if self.bundle is None else parts.put(self.bundle)
        self._count(x)
        return x if self.bundle is None else self.bundle.pack(x, x._version)

    def _count(self, x: Tensor) -> None:
        if storage_of(x) not in self.weights:
            self.kept[storage_of(x)] = x.untyped_storage().nbytes()

    @contextmanager
    def watching(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(self.pack, _unpack):
            yield

    @property
    def bytes(self) -> int:
        return sum(self.kept.values())


def _unpack(kept: Any) -> Tensor:
    return kept.together() if isinstance(kept, (Parts, Bare)) else unpacked(kept)
