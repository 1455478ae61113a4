"""The protocol of a transport: ranks, messages, sums. Links are FIFO; nothing has a tag."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

Link = tuple[int, int, int]  # source, target, channel


class Handle(Protocol):
    """Something under way."""

    def wait(self) -> None:
        """Block until it is done, or raise PeerError if it never will be."""
        ...


class Transport(Protocol):
    """Moves flat buffers between ranks. A buffer under way belongs to the transport until `wait`.

    Messages from one rank to another arrive in the order in which they were sent, and must be
    asked for in that order, on each channel by itself: a link is (source, target, channel). Sums
    over the same ranks must be issued in the same order by all.
    """

    rank: int
    world: int

    def prepare(self, groups: Sequence[tuple[int, ...]], links: Sequence[Link]) -> None:
        """Set up what will be used; all ranks call it with the same arguments."""
        ...

    def send(self, buffer: Any, target: int, channel: int = 0) -> Handle: ...

    def receive(self, buffer: Any, source: int, channel: int = 0) -> Handle: ...

    def add_up(self, buffer: Any, ranks: tuple[int, ...]) -> Handle:
        """Sum `buffer` over `ranks`, in place, the same bits on all of them."""
        ...

    def broadcast(self, buffer: Any, source: int) -> None: ...

    def gather(self, thing: Any) -> list[Any]:
        """What every rank gave, on every rank. For small things."""
        ...

    def fail(self, error: BaseException) -> None:
        """Let the other ranks know that this one cannot go on."""
        ...

    def close(self) -> None: ...


class Done:
    """A handle of something that is already done."""

    def wait(self) -> None:
        return None
