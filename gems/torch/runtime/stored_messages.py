"""Values in a store that another rank reads: a message of a few rows at a time, store to store.

    stage 0, rank 0                                          stage 1, rank 1
    store ──► rows ──► message ──► message ──► ...  ──►  message ──► rows ──► store

No rank lays out the whole value, or its gradient. Threads of their own send and receive, one for
each peer and direction, beside the work; so a send never waits for a receiver that computes. Before
the rows of a gradient comes whether there is one at all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from gems.geometry.box import Box
from gems.torch.offload.stored_value import StoredValue, ValueStore
from gems.torch.runtime.reshard import Transfer
from gems.transport.protocol import STORED, Transport, Work

Tensor = torch.Tensor
ROWS = 1 << 20  # bytes of a message, at most, unless one row has more
AHEAD = 2  # messages on their way at once
HOST = torch.device("cpu")


@dataclass(frozen=True)
class Moving:
    """A value that is being sent or received: bytes in all, and the handle."""

    size: int
    work: Work


class _Job:
    def __init__(self, future: Future[None]) -> None:
        self.future = future

    def wait(self) -> None:
        self.future.result()


class StoredMessages:
    """Of one rank. Sends to a rank, and receives from it, are each in the order of the calls."""

    def __init__(self, transport: Transport, store: ValueStore) -> None:
        self.transport, self.store = transport, store
        self.threads: dict[tuple[str, int], ThreadPoolExecutor] = {}

    def send(self, transfer: Transfer, value: StoredValue | None, target: int) -> Moving:
        """Send what another rank wants of a value; None: of a gradient, there is none."""
        boxes, held = self._boxes(transfer, self.transport.rank, target), _held(transfer)
        boxes = boxes if value is not None else []

        def work() -> None:
            there = torch.tensor([value is not None], dtype=torch.uint8)
            self.transport.isend(there, target, STORED).wait()
            moving: deque[tuple[Work, Tensor]] = deque()
            for box in boxes:
                assert value is not None
                rows = value.begin(box.relative_to(held), HOST).finish().contiguous().view(-1)
                while len(moving) >= AHEAD:
                    moving.popleft()[0].wait()
                moving.append((self.transport.isend(rows, target, STORED), rows))
            for handle, _ in moving:
                handle.wait()

        size = sum(box.size for box in boxes) * _itemsize(transfer)
        return Moving(size, self._submit(work, "to", target))

    def receive(self, transfer: Transfer, into: StoredValue, source: int) -> Moving:
        """Receive a value. Of a gradient that does not exist nothing is written."""
        boxes, held = self._boxes(transfer, source, self.transport.rank), _held(transfer)

        def work() -> None:
            there = torch.zeros(1, dtype=torch.uint8)
            self.transport.irecv(there, source, STORED).wait()
            for box, rows in self._arriving(boxes if bool(there) else [], into.dtype, source):
                into.write(box.relative_to(held), rows.view(box.shape))
            into.settle()

        size = sum(box.size for box in boxes) * _itemsize(transfer)
        return Moving(size, self._submit(work, "from", source))

    def _arriving(
        self, boxes: Sequence[Box], dtype: torch.dtype, source: int
    ) -> Iterator[tuple[Box, Tensor]]:
        posted: deque[tuple[Box, Tensor, Work]] = deque()
        for box in boxes:
            rows = torch.empty(box.size, dtype=dtype)
            posted.append((box, rows, self.transport.irecv(rows, source, STORED)))
            if len(posted) == AHEAD:
                yield _arrived(*posted.popleft())
        for waiting in posted:
            yield _arrived(*waiting)

    def _boxes(self, transfer: Transfer, source: int, target: int) -> list[Box]:
        """What is sent, a few rows at a time; the same on both ranks."""
        itemsize = _itemsize(transfer)
        return [part for box in transfer.between(source, target) for part in _rows(box, itemsize)]

    def _submit(self, work: Callable[[], None], way: str, peer: int) -> Work:
        if (way, peer) not in self.threads:
            self.threads[way, peer] = ThreadPoolExecutor(1, f"gems-{way}-{peer}")
        return _Job(self.threads[way, peer].submit(work))

    def close(self) -> None:
        for thread in self.threads.values():
            thread.shutdown(wait=False, cancel_futures=True)


def _arrived(box: Box, rows: Tensor, work: Work) -> tuple[Box, Tensor]:
    work.wait()
    return box, rows


def _held(transfer: Transfer) -> Box:
    return Box.whole(transfer.value.shape)


def _itemsize(transfer: Transfer) -> int:
    return int(getattr(torch, transfer.value.dtype).itemsize)


def _rows(box: Box, itemsize: int) -> Iterator[Box]:
    """A box in parts of few bytes, along its longest dim."""
    dim = max(range(len(box.shape)), key=lambda d: box.shape[d])
    each = box.size // max(box.shape[dim], 1) * itemsize
    step = max(ROWS // max(each, 1), 1)
    for a in range(box.start[dim], box.stop[dim], step):
        start, stop = list(box.start), list(box.stop)
        start[dim], stop[dim] = a, min(a + step, box.stop[dim])
        yield Box(tuple(start), tuple(stop))
