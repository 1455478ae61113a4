"""The protocol of a transport: ranks, messages, sums. Links are FIFO; nothing has a tag."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

Link = tuple[int, int]  # source, target
Exchanges = Mapping[tuple[int, ...], Sequence[Link]]  # ranks -> those of them that are neighbours
Parts = Sequence[tuple[Any, int]]  # buffers, each with the rank that it goes to or comes from
SAME = "All ranks must be given the same model, sample and plan"  # of errors
SUMS, EXCHANGES = 0, 1  # channels of a group's collectives
STORED = 4  # channel of messages between stores, which threads of their own send and receive


class Work(Protocol):
    """An operation that has begun."""

    def wait(self) -> None:
        """Block until it is done, or raise PeerError if it never will be."""
        ...


class Transport(Protocol):
    """Moves flat buffers between ranks. A buffer belongs to the transport until `wait`.

    Messages from one rank to another arrive in the order in which they were sent, and must be
    asked for in that order, on each channel by itself. Operations of a group of ranks must be
    issued in the same order by all of them, on each channel by itself: sums and gathers of weights
    and gradients are on one, and all that the ranks of a spatial group do inside of a stage is on
    the other.
    """

    rank: int
    world: int

    def prepare(
        self,
        groups: Sequence[tuple[int, ...]],
        links: Sequence[Link],
        exchanges: Exchanges | None = None,
    ) -> None:
        """Set up what will be used, beside what was set up before; all ranks call it with the same
        arguments. Ranks of groups are in ascending order."""
        ...

    def isend(self, buffer: Any, target: int, channel: int = SUMS) -> Work:
        """On the channel `STORED` buffers are in host memory, and another thread may call it."""
        ...

    def irecv(self, buffer: Any, source: int, channel: int = SUMS) -> Work: ...

    def exchange(self, sends: Parts, receives: Parts, ranks: tuple[int, ...]) -> Work:
        """Send and receive between some of `ranks`, at most one buffer per pair and direction, as
        one operation on the channel of exchanges. A rank that has nothing to do may leave it out.
        """
        ...

    def all_reduce(self, buffer: Any, ranks: tuple[int, ...]) -> Work:
        """Sum `buffer` over `ranks`, in place, the same bits on all of them."""
        ...

    def reduce_scatter(self, buffer: Any, ranks: tuple[int, ...]) -> Work:
        """Sum `buffer`, whose length is a multiple of the ranks', so that each of them has its own
        part of the sum, in its place; the other parts are nobody's business after that."""
        ...

    def all_gather(self, buffer: Any, ranks: tuple[int, ...], channel: int = SUMS) -> Work:
        """Fill `buffer`, whose length is a multiple of the ranks', with each one's own part."""
        ...

    def broadcast(self, buffer: Any, source: int) -> None: ...

    def all_gather_numbers(self, row: Sequence[int]) -> list[list[int]]:
        """What every rank gave, on every rank: equally many whole numbers below 2**40."""
        ...

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


class AllOf:
    """A handle of several operations."""

    def __init__(self, handles: Iterable[Work]) -> None:
        self.handles = list(handles)

    def wait(self) -> None:
        for handle in self.handles:
            handle.wait()
