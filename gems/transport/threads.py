"""Ranks as threads of one process: for tests, and for one rank alone. Buffers are tensors of torch
or arrays of numpy."""

from __future__ import annotations

import faulthandler
import tempfile
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

from gems.errors import GemsError, PeerError
from gems.transport.encoding import pack, unpack_all
from gems.transport.protocol import (
    EXCHANGES,
    SUMS,
    AllOf,
    Done,
    Exchanges,
    Link,
    Parts,
    Work,
    own_part,
)

Finish = Callable[[list[Any]], Any]
Box = tuple[int, int, int]  # source, target, channel


class World:
    """What the threads share: mail boxes, collectives in progress, and the first failure."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.mail: dict[Box, deque[Any]] = defaultdict(deque)
        self.posted: dict[Box, int] = defaultdict(int)
        self.taken: dict[Box, int] = defaultdict(int)
        self.collectives: dict[Any, dict[int, Any]] = {}  # that some rank has not joined yet
        self.failed: tuple[int, BaseException] | None = None
        self.closed: set[int] = set()

    def rank(self, rank: int) -> Local:
        return Local(self, rank)

    def wait_for(self, missing: Callable[[], set[int]], rank: int) -> None:
        """With `changed` held: wait until no rank is missing, or one failed or will never come."""

        def settled() -> bool:
            ranks = missing()
            return not ranks or self.failed is not None or bool(ranks & self.closed)

        self.changed.wait_for(settled)
        if not (ranks := missing()):
            return
        if self.failed is not None:
            culprit, error = self.failed
            raise PeerError(f"rank {rank} stops because rank {culprit} failed: {error}")
        raise PeerError(
            f"rank {rank} stops because rank {min(ranks & self.closed)} has closed its trainer, "
            "and the others still need it"
        )


class _Arrival:
    """A posted receive. Receives of one link are served in the order in which they were posted."""

    def __init__(self, local: Local, buffer: Any, box: Box) -> None:
        self.local, self.buffer, self.link = local, buffer, box
        with local.shared.changed:
            self.turn = local.shared.posted[self.link]
            local.shared.posted[self.link] += 1
        self.done = False

    def wait(self) -> None:
        shared = self.local.shared
        with shared.changed:
            while not self.done:
                shared.wait_for(self._missing, self.local.rank)
                self._take()

    def _missing(self) -> set[int]:
        box = self.local.shared.mail[self.link]
        return set() if len(box) > self._ahead() else {self.link[0]}

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
        self.buffer[...] = message
        box[self._ahead()] = None
        while box and box[0] is None:
            box.popleft()
            self.local.shared.taken[self.link] += 1
        self.done = True


class _Collective:
    """A collective that all of `ranks` join; `finish` gets what each of them gave, in order.

    Once all have joined, only their handles hold the parts.
    """

    def __init__(
        self, local: Local, ranks: tuple[int, ...], given: Any, finish: Finish, name: str = ""
    ) -> None:
        self.local, self.ranks, self.finish = local, ranks, finish
        shared, count = local.shared, local.joined[ranks, name]
        local.joined[ranks, name] += 1
        with shared.changed:
            key = (ranks, name, count)
            self.parts = shared.collectives.setdefault(key, {})
            self.parts[local.rank] = given
            if len(self.parts) == len(ranks):
                del shared.collectives[key]
            shared.changed.notify_all()

    def wait(self) -> Any:
        shared = self.local.shared
        with shared.changed:
            shared.wait_for(lambda: set(self.ranks) - self.parts.keys(), self.local.rank)
            finish, self.finish = self.finish, lambda parts: None
            return finish([self.parts[rank] for rank in self.ranks])


def _copy(buffer: Any) -> Any:
    """Of a tensor of torch or an array of numpy."""
    return buffer.clone() if hasattr(buffer, "clone") else buffer.copy()


def _added(parts: list[Any]) -> Any:
    """In the order of ranks, so that all of them come to the same bits."""
    total = _copy(parts[0])
    for part in parts[1:]:
        total += part
    return total


def _fill(buffer: Any, found: Any) -> None:
    buffer[...] = found


class Local:
    """The transport of one thread."""

    def __init__(self, shared: World, rank: int) -> None:
        self.shared, self.rank, self.world = shared, rank, shared.size
        self.joined: dict[tuple[tuple[int, ...], str], int] = defaultdict(int)

    def prepare(
        self,
        groups: Sequence[tuple[int, ...]],
        links: Sequence[Link],
        exchanges: Exchanges | None = None,
    ) -> None:
        return None

    def isend(self, buffer: Any, target: int, channel: int = SUMS) -> Work:
        self._post(buffer, (self.rank, target, channel))
        return Done()

    def _post(self, buffer: Any, box: Box) -> None:
        with self.shared.changed:
            self.shared.mail[box].append(_copy(buffer))
            self.shared.changed.notify_all()

    def irecv(self, buffer: Any, source: int, channel: int = SUMS) -> Work:
        return _Arrival(self, buffer, (source, self.rank, channel))

    def exchange(self, sends: Parts, receives: Parts, ranks: tuple[int, ...]) -> Work:
        for buffer, target in sends:
            self._post(buffer, (self.rank, target, EXCHANGES))
        boxes = [(buffer, (source, self.rank, EXCHANGES)) for buffer, source in receives]
        return AllOf([_Arrival(self, buffer, box) for buffer, box in boxes])

    def all_reduce(self, buffer: Any, ranks: tuple[int, ...]) -> Work:
        if len(ranks) < 2:
            return Done()
        return _Collective(self, ranks, _copy(buffer), lambda parts: _fill(buffer, _added(parts)))

    def reduce_scatter(self, buffer: Any, ranks: tuple[int, ...]) -> Work:
        if len(ranks) < 2:
            return Done()

        def finish(parts: list[Any]) -> None:
            mine = [own_part(part, self.rank, ranks) for part in parts]
            _fill(own_part(buffer, self.rank, ranks), _added(mine))

        return _Collective(self, ranks, _copy(buffer), finish)

    def all_gather(self, buffer: Any, ranks: tuple[int, ...], channel: int = SUMS) -> Work:
        if len(ranks) < 2:
            return Done()

        def finish(parts: list[Any]) -> None:
            for rank, part in zip(ranks, parts, strict=True):
                _fill(own_part(buffer, rank, ranks), part)

        mine = _copy(own_part(buffer, self.rank, ranks))
        return _Collective(self, ranks, mine, finish, f"channel {channel}")

    def broadcast(self, buffer: Any, source: int) -> None:
        parts = self._gather(_copy(buffer) if self.rank == source else None)
        _fill(buffer, parts[source])

    def all_gather_numbers(self, row: Sequence[int]) -> list[list[int]]:
        return [list(row)] if self.world == 1 else self._gather(list(row))

    def all_gather_object(self, thing: Any) -> list[Any]:
        """By way of bytes, so that a thread sees what a process would see."""
        return [thing] if self.world == 1 else unpack_all(self._gather(pack(thing)))

    def _gather(self, thing: Any) -> list[Any]:
        everyone = tuple(range(self.world))
        return _Collective(self, everyone, thing, lambda parts: parts, "objects").wait()

    def fail(self, error: BaseException) -> None:
        with self.shared.changed:
            if self.shared.failed is None:
                self.shared.failed = (self.rank, error)
            self.shared.changed.notify_all()

    def close(self) -> None:
        with self.shared.changed:
            self.shared.closed.add(self.rank)
            self.shared.changed.notify_all()


class Hung(GemsError):
    """Ranks have not ended in time; the message is the stacks of all threads."""


def run(size: int, work: Callable[[Local], Any], seconds: float | None = None) -> list[Any]:
    """Run `work` on `size` ranks, each a thread; their results, or the first rank's own error.

    Raises Hung if that takes more than `seconds`.
    """
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

    threads = [
        threading.Thread(target=body, args=(rank,), name=f"rank {rank} of {size}", daemon=True)
        for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    deadline = None if seconds is None else monotonic() + seconds
    for thread in threads:
        thread.join(None if deadline is None else max(0.0, deadline - monotonic()))
    if any(thread.is_alive() for thread in threads):
        hung = Hung(_stacks())
        world.rank(0).fail(Hung(f"ranks have not ended in {seconds} seconds"))
        for thread in threads:
            thread.join(5)
        raise hung
    if errors:
        own = [rank for rank, error in errors.items() if not isinstance(error, PeerError)]
        first = world.failed[0] if world.failed else min(errors)
        raise errors[first if not own or first in own else min(own)]
    return results


def _stacks() -> str:
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()
