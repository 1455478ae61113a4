"""Random numbers that do not depend on the plan: keyed by seed, step, micro-batch and call.

Dropout is keyed by the cell as well, so that a rank that has a box of a tensor draws what a rank
with the whole tensor draws there.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from gems.distributed.key import key
from gems.geometry.box import Box

Tensor = torch.Tensor
# Odd 64-bit numbers without a pattern, as signed ones: multiplication wraps around.
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
MIXING = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)))

REMEMBERED = 64  # boxes whose places are kept; each takes a small part of a tensor's memory
LOW = (1 << 24) - 1  # the bits of a hash that are looked at

_lock = threading.Lock()  # ranks that are threads share torch's generator


@dataclass(frozen=True)
class Drawn:
    """What one call drew: for dropout the cells of its box that stay, in host memory; for others
    the key of the generator."""

    step: int
    micro_batch: int
    name: str
    key: int = 0
    shape: tuple[int, ...] = ()
    box: Box | None = None
    kept: Tensor | None = None


class Draws:
    """The random numbers of one rank; `at(step, micro_batch)` sets where training is."""

    noted: list[Drawn] | None = None  # a list, if somebody wants to see what was drawn

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed = seed
        self.where: tuple[int, int] = (0, 0)
        self.device = device
        self.places: dict[tuple[tuple[int, ...], Box], tuple[Tensor, Tensor]] = {}

    def at(self, step: int, micro_batch: int) -> None:
        self.where = (step, micro_batch)

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Around one recorded call that draws; the caller's own stream goes on untouched."""
        generator = self._generator()
        with _lock:
            state = generator.get_state()
            seed = key(self.seed, *self.where, name)
            generator.manual_seed(seed)
            if self.noted is not None:
                self.noted.append(Drawn(*self.where, name, seed))
            try:
                yield
            finally:
                generator.set_state(state)

    def dropped(self, x: Tensor, p: float, name: str, shape: Sequence[int], box: Box) -> Tensor:
        """Dropout on a box of a tensor of this shape: the mask depends on each position."""
        kept = self._kept(name, shape, box, p)
        scale = _rounded(1 / (1 - p) if p < 1 else 0.0, x.dtype)
        if x.device.type == "cpu" or not x.is_floating_point():  # saved as by torch's own dropout
            return x * kept.to(x.dtype).mul_(scale)
        return _Dropped.apply(x, kept, scale)  # type: ignore[no-any-return]

    def _kept(self, name: str, shape: Sequence[int], box: Box, p: float) -> Tensor:
        outer, inner = self._places(tuple(shape), box)
        kept = _kept(outer + key(self.seed, *self.where, name), inner, p)
        if self.noted is not None:
            self.noted.append(Drawn(*self.where, name, 0, tuple(shape), box, kept.cpu()))
        return kept

    def _places(self, shape: tuple[int, ...], box: Box) -> tuple[Tensor, Tensor]:
        """Numbers of the cells of a box in the whole tensor, times `GOLDEN`: the sum of what all
        but the last dim and what the last one adds. They are the same in every step."""
        if (shape, box) not in self.places:
            if len(self.places) == REMEMBERED:
                self.places.pop(next(iter(self.places)))
            parts, step = [torch.zeros((), dtype=torch.int64, device=self.device)] * 2, GOLDEN
            for start, stop, length in zip(
                *map(reversed, (box.start, box.stop, shape)), strict=True
            ):
                parts.append(torch.arange(start, stop, device=self.device) * _signed(step))
                step *= length
            outer, inner = parts[0], parts[2 if shape else 1]
            for along in reversed(parts[3:]):
                outer = outer.unsqueeze(-1) + along
            self.places[shape, box] = outer.unsqueeze(-1) if shape else outer, inner
        return self.places[shape, box]

    def _generator(self) -> torch.Generator:
        if self.device.type == "cuda":
            return torch.cuda.default_generators[self.device.index or 0]
        return torch.default_generator


class _Dropped(torch.autograd.Function):
    """x * kept * scale on a GPU, in one kernel each way, of which a byte per cell is saved, as by
    torch's own dropout there. (Autograd's formula would save the input, too.)"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(kept)
        ctx.scale = scale
        ctx.set_materialize_grads(False)
        return torch.ops.aten.native_dropout_backward(x, kept, scale)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:  # type: ignore[override]
        (g,), (kept,) = gradients, ctx.saved_tensors
        return None if g is None else _Dropped.apply(g, kept, ctx.scale), None, None


def _kept(outer: Tensor, inner: Tensor, p: float) -> Tensor:
    """Which cells stay: those whose hash, a number of 24 bits, is at least `p` of the largest.

    In place, and without what does not change the bits that are looked at: 13 kernels.
    """
    z = outer + inner
    for shift, factor in MIXING:
        high = z >> shift
        high &= (1 << (64 - shift)) - 1
        z ^= high
        z *= factor
    z ^= z >> 31
    z &= LOW
    return z >= math.ceil(_rounded(p, torch.float32) * (LOW + 1))


@cache
def _rounded(number: float, dtype: torch.dtype) -> Any:
    return torch.tensor(number, dtype=dtype).item()


def _signed(number: int) -> int:
    """The same 64 bits as a signed number."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)
