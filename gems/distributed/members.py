"""The ranks that hold the tiles of one stage, and what they have sent each other inside it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from gems.geometry.layout import coordinate
from gems.transport.protocol import Transport


@dataclass
class Traffic:
    """What this rank has sent inside stages since the counters were last cleared: messages and
    bytes to each other member. One operation of the transport may be several messages: an exchange
    has one per neighbour, an all-gather one per member."""

    messages: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class Members:
    """The ranks of one stage, row-major over the grid; this rank is member number `me`."""

    grid: tuple[int, ...]
    ranks: tuple[int, ...]
    me: int
    transport: Transport
    traffic: Traffic = field(default_factory=Traffic)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @cached_property
    def coordinate(self) -> tuple[int, ...]:
        """This rank's row, column, ... of the grid."""
        return coordinate(self.grid, self.me)

    @cached_property
    def sorted(self) -> tuple[int, ...]:
        """The ranks as the transport knows the group."""
        return tuple(sorted(self.ranks))
