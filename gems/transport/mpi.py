"""Ranks as processes of MPI, over mpi4py, for buffers of any framework.

Messages and collectives are non-blocking, on one duplicated communicator per channel; MPI keeps the
order of messages of a link, and of the collectives of a communicator:

    messages    between stages
    exchanges   halos and statistics of spatial groups, as messages
    notes       small things of all ranks: losses, shapes, names
    sums[ranks] sums of gradients, gathers of weights

Buffers travel by their addresses, so PyTorch is not imported here. Types that MPI cannot sum
(bfloat16, float16) are summed in float32 and rounded once. Buffers on a GPU travel through pinned
host memory; an MPI that reads GPU memory by itself may do so, if the environment has
GEMS_MPI_GPU_AWARE=1. (Neither was ever run on a GPU: there was none where this was written.)

[Note: how a failure spreads over MPI] Nothing closes a connection here. A rank that fails writes so
on the board that all ranks read, and every rank that waits looks there. It raises the first cause,
and ends by MPI_Abort once the others have told that they know, so that mpirun does not end them
before they could tell why. A rank that does not come back from what it does, although another is
lost, aborts all after COMING_BACK seconds, with the cause on stderr. A rank that ends without
closing its transport while others wait for it is noticed by its last line.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Sequence
from time import monotonic, sleep
from typing import Any

from gems.errors import GemsError, PeerError
from gems.transport.board import CLOSED, ENDED, FAILED, LOST, WORKING, parse
from gems.transport.encoding import MOST, pack, unpack_all
from gems.transport.heartbeat import AGAIN, TIMEOUT, Heartbeat, in_short
from gems.transport.mpi_board import MessageBoard
from gems.transport.mpi_library import Begun, Operation, end_library, library
from gems.transport.mpi_memory import Memory
from gems.transport.protocol import (
    SAME,
    STORED,
    SUMS,
    Done,
    Exchanges,
    Link,
    Parts,
    Work,
    own_part,
)

COMING_BACK = 10.0  # seconds for a rank to notice that another one is lost
LAST_WORDS = 6.0  # seconds that the others get to tell why, before all are ended
LOOK = 0.02  # seconds between two looks at the board, while waiting
LEFT = 1.0  # seconds for what a rank sent before it ended
FIRST_TAG, TAGS = 30000, 2000  # of boards; every MPI has tags to 32767
_made: Any = None  # the attribute of a communicator that counts transports on it


class _Work:
    """A handle: an operation, and what its receiver does with it once it is through."""

    def __init__(
        self,
        transport: Mpi,
        operation: Operation,
        what: str,
        peers: tuple[int, ...],
        after: Callable[[], None] | None,
    ) -> None:
        self.transport, self.operation, self.what = transport, operation, what
        self.peers, self.after = peers, after

    def wait(self) -> None:
        if self.operation is None:
            return
        self.transport._wait(self.operation, self.what, self.peers)
        after, self.operation, self.after = self.after, None, None
        if after is not None:
            after()


class Mpi:
    """This process's end of the ranks of `comm` (MPI.COMM_WORLD), all of which make one at the same
    time. A rank that gives no sign of life for `timeout` seconds is lost; `patience` seconds are
    for the next one to come, as long as some have not."""

    backend = "mpi"

    def __init__(
        self, timeout: float = TIMEOUT, *, patience: float | None = None, comm: Any = None
    ) -> None:
        patience = timeout if patience is None else patience
        self.library = library(patience)
        self.MPI = self.library.MPI
        given = self.MPI.COMM_WORLD if comm is None else comm
        self.rank, self.world = given.rank, given.size
        self.memory = Memory(self.MPI)
        self.failed: BaseException | None = None
        self.noticed = threading.Event()
        self.closed = False
        self.failing = threading.Lock()
        self.pid, self.thread = os.getpid(), threading.current_thread()
        self.everyone = tuple(range(self.world))
        self.sums: dict[tuple[int, ...], Any] = {}
        self.board = MessageBoard(self.library, given, _next_tag(self.MPI, given))
        place = f"MPI ({given.Get_name() or 'a communicator'})"
        self.heartbeat = Heartbeat(self.board, self.rank, self.world, timeout, place)
        try:
            self.heartbeat.attend(patience)
        except PeerError as error:
            self.heartbeat.end(LOST, str(error))
            raise
        self.heartbeat.on_loss(self._lose)
        self.messages, self.exchanges, self.notes, stored = (
            _duplicate(self, given) for _ in range(4)
        )
        self.channels = {SUMS: self.messages, STORED: stored}
        # All ranks are there: what failed before is over.
        _open[:] = [*(other for other in _open if other.failed is None), self]
        _unread[:] = [*(board for board in _unread if not board.is_over()), self.board]

    def prepare(
        self,
        groups: Sequence[tuple[int, ...]],
        links: Sequence[Link],
        exchanges: Exchanges | None = None,
    ) -> None:
        # A new communicator waits for its members: first see that all have come to the same.
        mine = (tuple(groups), tuple(links), {k: tuple(v) for k, v in (exchanges or {}).items()})
        for rank, theirs in enumerate(self.all_gather_object(mine)):
            if theirs != mine:
                why = theirs if isinstance(theirs, str) else "came to another plan"
                self.fail(error := PeerError(f"rank {rank} {why}. {SAME}"))
                raise error
        for ranks in sorted({ranks for ranks in groups if len(ranks) > 1} - self.sums.keys()):
            if self.rank in ranks:
                with self.library.lock:
                    group = self.notes.Get_group()
                    self.sums[ranks] = self.notes.Create_group(group.Incl(list(ranks)))

    # --- messages ---------------------------------------------------------------------------------

    def isend(self, buffer: Any, target: int, channel: int = SUMS) -> Work:
        what = f"sending from rank {self.rank} to rank {target}"
        return self._messages([(buffer, target)], [], self.channels[channel], what)

    def irecv(self, buffer: Any, source: int, channel: int = SUMS) -> Work:
        what = f"receiving on rank {self.rank} from rank {source}"
        return self._messages([], [(buffer, source)], self.channels[channel], what)

    def exchange(self, sends: Parts, receives: Parts, ranks: tuple[int, ...]) -> Work:
        if not sends and not receives:
            return Done()
        what = f"exchanging on rank {self.rank} with ranks {_listed(ranks)}"
        return self._messages(sends, receives, self.exchanges, what)

    def _messages(self, sends: Parts, receives: Parts, comm: Any, what: str) -> Work:
        arriving = [(self.memory.host(buffer), buffer, source) for buffer, source in receives]
        leaving = [(self.memory.filled(buffer), target) for buffer, target in sends]

        def start() -> Begun:
            for host, _, source in arriving:
                for piece, size in self.memory.pieces(host):
                    yield comm.Irecv(piece, source), size
            for host, target in leaving:
                for piece, _ in self.memory.pieces(host):
                    yield comm.Isend(piece, target), None

        copies = [(host, buffer) for host, buffer, _ in arriving if host is not buffer]
        peers = tuple(rank for _, rank in (*sends, *receives))
        after = (lambda: _copy(copies)) if copies else None
        return self._begin(what, start, (arriving, leaving), peers, after)

    def _begin(
        self,
        what: str,
        start: Callable[[], Begun],
        keep: Any,
        peers: tuple[int, ...],
        after: Callable[[], None] | None = None,
    ) -> Work:
        self._raise_failed(what)
        try:
            operation = self.library.begin(start, keep)
        except self.MPI.Exception as error:
            raise self._lost(what, error) from error
        return _Work(self, operation, what, peers, after)

    # --- collectives ------------------------------------------------------------------------------

    def all_reduce(self, buffer: Any, ranks: tuple[int, ...]) -> Work:
        if len(ranks) < 2:
            return Done()
        what = f"summing on rank {self.rank} over ranks {_listed(ranks)}"
        comm, total = self._sums(ranks, what), self.memory.summable(buffer, what)

        def start() -> Begun:
            for piece in self.memory.numbers(total):
                yield comm.Iallreduce(self.MPI.IN_PLACE, piece, self.MPI.SUM), None

        after = None if total is buffer else lambda: _copy([(total, buffer)])
        return self._begin(what, start, total, ranks, after)

    def reduce_scatter(self, buffer: Any, ranks: tuple[int, ...]) -> Work:
        """An all-reduce: see docs/mpi.md for the figures."""
        return self.all_reduce(buffer, ranks)

    def all_gather(self, buffer: Any, ranks: tuple[int, ...], channel: int = SUMS) -> Work:
        if len(ranks) < 2:
            return Done()
        what = f"gathering shares on rank {self.rank} from ranks {_listed(ranks)}"
        others = [rank for rank in ranks if rank != self.rank]
        own = own_part(buffer, self.rank, ranks)
        if channel != SUMS:
            receives = [(own_part(buffer, rank, ranks), rank) for rank in others]
            return self._messages([(own, rank) for rank in others], receives, self.exchanges, what)
        comm, host = self._sums(ranks, what), self.memory.host(buffer)
        if host is not buffer:
            own_part(host, self.rank, ranks)[...] = own

        def start() -> Begun:
            if self.memory.is_one_piece(host):
                ((whole, _),) = self.memory.pieces(host)
                yield comm.Iallgather(self.MPI.IN_PLACE, whole), None
                return
            for turn, rank in enumerate(ranks):  # more than MPI can count
                for piece, _ in self.memory.pieces(own_part(host, rank, ranks)):
                    yield comm.Ibcast(piece, turn), None

        after = None if host is buffer else lambda: _copy([(host, buffer)])
        return self._begin(what, start, host, ranks, after)

    def _sums(self, ranks: tuple[int, ...], what: str) -> Any:
        if ranks == self.everyone:
            return self.sums.get(ranks, self.notes)
        if ranks not in self.sums:
            raise GemsError(
                f"{what}: there is no communicator of these ranks, and making one now could hang; "
                "name them in prepare(), on all ranks"
            )
        return self.sums[ranks]

    def broadcast(self, buffer: Any, source: int) -> None:
        what = f"broadcasting from rank {source} to rank {self.rank}"
        pieces = [piece for piece, _ in self.memory.pieces(buffer)]

        def start() -> Begun:
            for piece in pieces:
                yield self.notes.Ibcast(piece, source), None

        self._begin(what, start, buffer, self.everyone).wait()

    def all_gather_object(self, thing: Any) -> list[Any]:
        if self.world == 1:
            return [thing]
        try:
            return unpack_all(_gathered(self, pack(thing)))
        except PeerError as error:  # nothing after that can be trusted
            self.fail(error)
            raise

    def all_gather_numbers(self, row: Sequence[int]) -> list[list[int]]:
        width, what = len(row), f"gathering numbers on rank {self.rank} from all ranks"
        table = memoryview(bytearray(8 * width * self.world)).cast("q")
        for i, number in enumerate(row):
            table[self.rank * width + i] = number
        self._collect(what, lambda: self.notes.Iallgather(self.MPI.IN_PLACE, table), table)
        return [list(table[r * width : (r + 1) * width]) for r in self.everyone]

    def _collect(self, what: str, start: Callable[[], Any], keep: Any) -> None:
        self._begin(what, lambda: [(start(), None)], keep, self.everyone).wait()

    # --- failure ----------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks. [Note: how a failure spreads over MPI] The heartbeat's thread may
        call it, too."""
        with self.failing:
            first, self.failed = self.failed is None, self.failed or error
        if first:
            why = (error.cause or str(error)) if isinstance(error, PeerError) else in_short(error)
            self.heartbeat.tell(LOST if isinstance(error, PeerError) else FAILED, why)
        if threading.current_thread() is self.thread:
            self.noticed.set()

    def _lose(self, error: PeerError) -> None:
        """By the heartbeat's thread: a rank is lost."""
        self.fail(error)
        if not self.noticed.wait(COMING_BACK):
            sys.stderr.write(f"rank {self.rank} is ended: {error}\n")
            sys.stderr.flush()
            self.MPI.COMM_WORLD.Abort(1)

    def _wait(self, operation: Operation, what: str, peers: tuple[int, ...]) -> None:
        looked, left = 0.0, 0.0

        def check(waited: float) -> None:
            nonlocal looked, left
            self._raise_failed(what)
            if waited - looked < LOOK:
                return
            looked = waited
            if self.board.has_news():
                self.heartbeat.wake.set()
            if not any(self._has_left(rank) for rank in peers):
                left = waited
            elif waited - left > LEFT:
                raise self._lost(what, None)

        try:
            self.library.wait(operation, check)
        except BaseException:
            operation.error = operation.error or RuntimeError("nobody waits for it any more")
            raise
        if isinstance(operation.error, ValueError):  # of a message of another length
            wrong = PeerError(f"{what}: {operation.error}. {SAME}")
            self.fail(wrong)
            raise wrong
        if operation.error is not None:
            raise self._lost(what, operation.error) from operation.error
        self._raise_failed(what)

    def _has_left(self, rank: int) -> bool:
        """Whether a rank has told that it does nothing more."""
        sign = self.heartbeat.signs[rank]
        return rank != self.rank and sign is not None and sign.state != WORKING

    def _raise_failed(self, what: str) -> None:
        if self.failed is not None or self.closed:
            raise self._lost(what, self.failed)

    def _lost(self, what: str, error: BaseException | None) -> PeerError:
        """What to raise when a peer cannot be reached: the first failure is the one to tell."""
        self.noticed.set()
        if isinstance(self.failed, PeerError):
            return self.failed
        if self.failed is not None:
            why: str | None = f"this rank has failed before ({self.failed!r})"
        elif self.closed:
            why = "this rank has closed its trainer"
        else:
            why = self.heartbeat.cause()
            if isinstance(self.failed, PeerError):  # the heartbeat was first
                return self.failed
            why = why or (in_short(error) if error is not None else "the other process has ended")
        lost = PeerError(
            f"{what} failed: {why}. Look at the output of the rank that ended first, then {AGAIN}"
        )
        lost.cause = why
        self.fail(lost)
        return lost

    # --- end --------------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave the other ranks; those that still need this one are told that it has gone."""
        if self.closed or os.getpid() != self.pid:
            return
        self.closed = True
        self.noticed.set()
        self._leave(CLOSED)
        if self.failed is None:  # else what is in flight still uses them
            _open.remove(self)
            own = (*self.channels.values(), self.exchanges, self.notes, *self.sums.values())
            with self.library.lock:
                for comm in own:
                    comm.Free()

    def end(self) -> None:
        """The process ends without having closed the transport; others may wait for it."""
        if not self.closed and os.getpid() == self.pid:  # a fork is not the rank
            raised = getattr(sys, "last_value", None)
            self._leave(ENDED, "" if raised is None else in_short(raised))
            if raised is not None:
                self.failed = self.failed or raised

    def _leave(self, state: str, why: str = "") -> None:
        self.heartbeat.end(state, why)
        self.board.write(self.heartbeat.own.text())  # if its thread had no time to


def _duplicate(transport: Mpi, comm: Any) -> Any:
    made: list[Any] = []

    def start() -> Begun:
        new, request = comm.Idup()
        made.append(new)
        yield request, None

    transport._begin("duplicating a communicator", start, None, transport.everyone).wait()
    return made[0]


def _gathered(transport: Mpi, mine: bytes) -> list[bytes]:
    """The bytes of every rank, which may be of different lengths."""
    lengths = [length for (length,) in transport.all_gather_numbers([len(mine)])]
    if bad := [rank for rank, n in enumerate(lengths) if not 0 < n <= MOST]:
        raise PeerError(
            f"rank {bad[0]} announced {lengths[bad[0]]} bytes; a rank tells at most {MOST}"
        )
    what = f"gathering on rank {transport.rank} from all ranks"
    told = [bytearray(mine) if r == transport.rank else bytearray(n) for r, n in enumerate(lengths)]

    def start() -> Begun:
        for rank, part in enumerate(told):
            yield transport.notes.Ibcast([part, transport.MPI.BYTE], rank), None

    transport._begin(what, start, told, transport.everyone).wait()
    return [bytes(part) for part in told]


def _told(transport: Mpi) -> bool:
    """Whether all other ranks have told that they have ended, or why."""
    transport.board.read()
    lines = [parse(line) for line in transport.board.lines]
    return all(line is not None and line.state != WORKING for line in lines)


def _next_tag(MPI: Any, comm: Any) -> int:
    """Of a board: all ranks of a communicator make their transports on it in the same order."""
    global _made
    if _made is None:
        _made = MPI.Comm.Create_keyval()
    made = comm.Get_attr(_made) or 0
    comm.Set_attr(_made, made + 1)
    return FIRST_TAG + made % TAGS


_open: list[Mpi] = []  # and the last that has failed
_unread: list[MessageBoard] = []  # of transports that were closed, too


@atexit.register
def _at_exit() -> None:
    """Before mpi4py ends MPI, which waits for all ranks: if one of them has failed, end them all.
    [Note: how a failure spreads over MPI]"""
    for transport in _open:
        transport.end()
    failed = [transport for transport in _open if transport.failed is not None]
    if failed and os.getpid() == failed[-1].pid:
        late = monotonic() + LAST_WORDS
        while not _told(failed[-1]) and monotonic() < late:
            sleep(0.05)
        sleep(1.0)  # for their tracebacks
        sys.stdout.flush()
        sys.stderr.flush()
        failed[-1].MPI.COMM_WORLD.Abort(1)
    while not all([board.is_over() for board in _unread]):  # [Note: nothing is left unread]
        sleep(LOOK)  # as MPI would wait for all ranks
    end_library()


def _copy(pairs: Sequence[tuple[Any, Any]]) -> None:
    for source, target in pairs:
        target[...] = source


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
