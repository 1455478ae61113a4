"""Random numbers that do not depend on the plan: keyed by seed, step, micro-batch and call.

Dropout is keyed by the cell as well, so that a rank that has a box of a tensor draws what a rank
with the whole tensor draws there.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from gems.geometry.box import Box

Tensor = torch.Tensor
# Odd 64-bit numbers without a pattern, as signed ones: multiplication wraps around.
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
MIXING = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)))

_lock = threading.Lock()  # ranks that are threads share torch's generator


def key(*parts: object) -> int:
    """A 63-bit number that is different for different parts, everywhere the same."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class Draws:
    """The random numbers of one rank; `at(step, micro_batch)` sets where training is."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed = seed
        self.where: tuple[int, int] = (0, 0)
        self.device = device

    def at(self, step: int, micro_batch: int) -> None:
        self.where = (step, micro_batch)

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Around one recorded call that draws; the caller's own stream goes on untouched."""
        generator = self._generator()
        with _lock:
            state = generator.get_state()
            generator.manual_seed(key(self.seed, *self.where, name))
            try:
                yield
            finally:
                generator.set_state(state)

    def dropped(self, x: Tensor, p: float, name: str, shape: Sequence[int], box: Box) -> Tensor:
        """Dropout on a box of a tensor of this shape: the mask depends on each position."""
        kept = self._uniform(name, shape, box) >= p
        noise = kept.to(x.dtype).mul_(1 / (1 - p) if p < 1 else 0.0)
        return x * noise

    def _uniform(self, name: str, shape: Sequence[int], box: Box) -> Tensor:
        """A number in 0..1 for every cell, from its place in the whole tensor: a mixed-up count."""
        place = torch.zeros((), dtype=torch.int64, device=self.device)
        for start, stop, length in zip(box.start, box.stop, shape, strict=True):
            along = torch.arange(start, stop, device=self.device)
            place = (place * length).unsqueeze(-1) + along
        z = place.mul_(GOLDEN).add_(key(self.seed, *self.where, name))
        for shift, factor in MIXING:
            z ^= (z >> shift) & ((1 << (64 - shift)) - 1)
            z *= factor
        z ^= (z >> 31) & ((1 << 33) - 1)
        return (z & ((1 << 24) - 1)).to(torch.float32).mul_(2.0**-24)

    def _generator(self) -> torch.Generator:
        if self.device.type == "cuda":
            return torch.cuda.default_generators[self.device.index or 0]
        return torch.default_generator
