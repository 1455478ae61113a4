"""The protocol of a transport: ranks, messages, sums. Links are FIFO; nothing has a tag."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

Link = tuple[int, int, int]  # source, target, channel


class Work(Protocol):
    """An operation that has begun."""

    def wait(self) -> None:
        """Block until it is done, or raise PeerError if it never will be."""
        ...


class Transport(Protocol):
    """Moves flat buffers between ranks. A buffer belongs to the transport until `wait`.

    Messages from one rank to another arrive in the order in which they were sent, and must be
    asked for in that order, on each channel by itself: a link is (source, target, channel). Sums
    over the same ranks must be issued in the same order by all.
    """

    rank: int
    world: int

    def prepare(self, groups: Sequence[tuple[int, ...]], links: Sequence[Link]) -> None:
        """Set up what will be used; all ranks call it with the same arguments."""
        ...

    def isend(self, buffer: Any, target: int, channel: int = 0) -> Work: ...

    def irecv(self, buffer: Any, source: int, channel: int = 0) -> Work: ...

    def all_reduce(self, buffer: Any, ranks: tuple[int, ...]) -> Work:
        """Sum `buffer` over `ranks`, in place, the same bits on all of them."""
        ...

    def reduce_scatter(self, buffer: Any, ranks: tuple[int, ...]) -> Work:
        """Sum `buffer`, whose length is a multiple of the ranks', so that each of them has its own
        part of the sum, in its place; the other parts are nobody's business after that."""
        ...

    def all_gather(self, buffer: Any, ranks: tuple[int, ...]) -> Work:
        """Fill `buffer`, whose length is a multiple of the ranks', with each one's own part."""
        ...

    def broadcast(self, buffer: Any, source: int) -> None: ...

    def all_gather_object(self, thing: Any) -> list[Any]:
        """What every rank gave, on every rank. For small things."""
        ...

    def fail(self, error: BaseException) -> None:
        """Let the other ranks know that this one cannot go on."""
        ...

    def close(self) -> None: ...


def own_part(buffer: Any, rank: int, ranks: tuple[int, ...]) -> Any:
    """The part of a flat buffer that is a rank's own, among those that share it."""
    width = len(buffer) // len(ranks)
    at = ranks.index(rank) * width
    return buffer[at : at + width]


class Done:
    """A handle of something that is already done."""

    def wait(self) -> None:
        return None
