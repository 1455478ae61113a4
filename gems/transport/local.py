"""Ranks as threads of one process: for tests, and for one rank alone."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

from gems.errors import GemsError, PeerError
from gems.transport.core import Done, Handle, Link


class World:
    """What the threads share: mail boxes, sums under way, and the first failure."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.mail: dict[Link, deque[Any]] = defaultdict(deque)
        self.posted: dict[Link, int] = defaultdict(int)
        self.taken: dict[Link, int] = defaultdict(int)
        self.meetings: dict[Any, dict[int, Any]] = {}
        self.failed: tuple[int, BaseException] | None = None

    def rank(self, rank: int) -> Local:
        return Local(self, rank)

    def wait_for(self, condition: Callable[[], bool], rank: int) -> None:
        """With `changed` held: wait until it holds, or somebody failed."""
        self.changed.wait_for(lambda: condition() or self.failed is not None)
        if not condition():
            assert self.failed is not None
            culprit, error = self.failed
            raise PeerError(f"rank {rank} stops because rank {culprit} failed: {error}")


class _Arrival:
    """A posted receive. Receives of one link are served in the order in which they were posted."""

    def __init__(self, local: Local, buffer: Any, source: int, channel: int) -> None:
        self.local, self.buffer, self.link = local, buffer, (source, local.rank, channel)
        with local.shared.changed:
            self.turn = local.shared.posted[self.link]
            local.shared.posted[self.link] += 1
        self.done = False

    def wait(self) -> None:
        shared = self.local.shared
        with shared.changed:
            while not self.done:
                shared.wait_for(
                    lambda: len(shared.mail[self.link]) > self._ahead(), self.local.rank
                )
                self._take()

    def _ahead(self) -> int:
        """How many earlier messages of the link are still in the box."""
        return self.turn - self.local.shared.taken[self.link]

    def _take(self) -> None:
        box = self.local.shared.mail[self.link]
        message = box[self._ahead()]
        if message is None:
            raise AssertionError("a message was taken twice")
        if message.shape != self.buffer.shape or message.dtype != self.buffer.dtype:
            raise PeerError(
                f"link {self.link[0]} to {self.link[1]}: sent {tuple(message.shape)} "
                f"{message.dtype}, expected {tuple(self.buffer.shape)} {self.buffer.dtype}"
            )
        self.buffer.copy_(message)
        box[self._ahead()] = None
        while box and box[0] is None:
            box.popleft()
            self.local.shared.taken[self.link] += 1
        self.done = True


class _Meeting:
    """A sum that all members must reach; the last one in adds up, in the order of ranks."""

    def __init__(self, local: Local, buffer: Any, ranks: tuple[int, ...]) -> None:
        self.local, self.buffer, self.ranks = local, buffer, ranks
        shared = local.shared
        with shared.changed:
            self.key = (ranks, local.meetings[ranks])
            local.meetings[ranks] += 1
            parts = shared.meetings.setdefault(self.key, {})
            parts[local.rank] = buffer.clone()
            shared.changed.notify_all()

    def wait(self) -> None:
        shared = self.local.shared
        with shared.changed:
            parts = shared.meetings[self.key]
            shared.wait_for(lambda: all(r in parts for r in self.ranks), self.local.rank)
            total = parts[self.ranks[0]].clone()
            for rank in self.ranks[1:]:
                total.add_(parts[rank])
            self.buffer.copy_(total)


class Local:
    """One thread's end of the world."""

    def __init__(self, shared: World, rank: int) -> None:
        self.shared, self.rank, self.world = shared, rank, shared.size
        self.meetings: dict[tuple[int, ...], int] = defaultdict(int)
        self.gathered = 0

    def prepare(self, groups: Sequence[tuple[int, ...]], links: Sequence[Link]) -> None:
        return None

    def send(self, buffer: Any, target: int, channel: int = 0) -> Handle:
        with self.shared.changed:
            self.shared.mail[self.rank, target, channel].append(buffer.clone())
            self.shared.changed.notify_all()
        return Done()

    def receive(self, buffer: Any, source: int, channel: int = 0) -> Handle:
        return _Arrival(self, buffer, source, channel)

    def add_up(self, buffer: Any, ranks: tuple[int, ...]) -> Handle:
        return _Meeting(self, buffer, ranks) if len(ranks) > 1 else Done()

    def broadcast(self, buffer: Any, source: int) -> None:
        things = self.gather(buffer.clone() if self.rank == source else None)
        buffer.copy_(things[source])

    def gather(self, thing: Any) -> list[Any]:
        key, self.gathered = ("gather", self.gathered), self.gathered + 1
        with self.shared.changed:
            parts = self.shared.meetings.setdefault(key, {})
            parts[self.rank] = thing
            self.shared.changed.notify_all()
            self.shared.wait_for(lambda: len(parts) == self.world, self.rank)
            return [parts[rank] for rank in range(self.world)]

    def fail(self, error: BaseException) -> None:
        with self.shared.changed:
            if self.shared.failed is None:
                self.shared.failed = (self.rank, error)
            self.shared.changed.notify_all()

    def close(self) -> None:
        return None


def run(size: int, work: Callable[[Local], Any]) -> list[Any]:
    """Run `work` on `size` ranks, each a thread; their results, or the first rank's own error."""
    world = World(size)
    results: list[Any] = [None] * size
    errors: dict[int, BaseException] = {}

    def body(rank: int) -> None:
        local = world.rank(rank)
        try:
            results[rank] = work(local)
        except BaseException as error:
            errors[rank] = error
            local.fail(error)

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        first = world.failed[0] if world.failed else min(errors)
        raise errors.get(first) or GemsError("a rank failed")
    return results
