"""Random numbers that do not depend on the plan: keyed by seed, step, micro-batch and call."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_lock = threading.Lock()  # ranks that are threads share torch's generator


def key(*parts: object) -> int:
    """A 63-bit number that is different for different parts, everywhere the same."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class Draws:
    """The random numbers of one rank; `at(step, micro_batch)` says where training is."""

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

    def _generator(self) -> torch.Generator:
        if self.device.type == "cuda":
            return torch.cuda.default_generators[self.device.index or 0]
        return torch.default_generator
