"""The recordings of a model that may be used again: as many as are kept, with their guards."""

from __future__ import annotations

import logging
import zlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

from gems.torch.tracing.guards import Guards

log = logging.getLogger(__name__)
BOUND = 32  # the least recently used one goes
T = TypeVar("T")


@dataclass
class Entry(Generic[T]):
    made: T
    guards: Guards
    holds_in: int = -1  # the step in which the guards were found to hold


class Recordings(Generic[T]):
    """What was made of recordings, by signature of the inputs and mode of the model.

    One signature may have several: a model may change between two ways of working.
    """

    def __init__(self, bound: int = BOUND) -> None:
        self.bound, self.step, self.digest = bound, 0, 0
        self.entries: OrderedDict[tuple[object, int], Entry[T]] = OrderedDict()
        self.number = 0

    def begin(self) -> None:
        """Python ran since: guards must be checked again."""
        self.step += 1

    def find(self, signature: object) -> T | None:
        """The newest recording of this signature whose guards hold."""
        why = None
        for key in [key for key in reversed(self.entries) if key[0] == signature]:
            entry = self.entries[key]
            if entry.holds_in != self.step and (failed := entry.guards.failed()) is not None:
                why = why or failed
                continue
            entry.holds_in = self.step
            self.entries.move_to_end(key)
            return entry.made
        if why is not None:
            log.info("recording the model again: %s", why)
        return None

    def add(self, signature: object, guards: Guards, made: T) -> None:
        self.entries[signature, self.number] = Entry(made, guards, self.step)
        self.number += 1
        self.digest = zlib.crc32(repr((self.digest, guards.digest())).encode())
        while len(self.entries) > self.bound:
            self.entries.popitem(last=False)

    def values(self) -> list[T]:
        return [entry.made for entry in self.entries.values()]

    def __len__(self) -> int:
        return len(self.entries)
