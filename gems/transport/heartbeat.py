"""Signs of life: who of the ranks is at work, who has ended and why, who has fallen silent.

[Note: what counts as life] One thread writes this rank's line and reads the others', several times
per `timeout`. It needs Python's lock for some microseconds each time, so work of any length may go
on beside it: torch and numpy release the lock while they compute, and so do sleeping, reading and
waiting. A rank that is in one call that holds the lock for longer than `timeout` looks like one
that is stopped; on the node of whoever asks, it counts as alive as long as it uses the processor.
Across nodes it does not: then `timeout` must be longer than the longest such call.

A second thread looks at what the first has read, because the first may wait for ever where the
place of the lines is a store whose process is stopped.

[Note: how soon a lost rank is noticed] One that fails, or ends by an error, writes it down; one
that is killed on this node is missed within two beats. On another node the system closes the
connections of a killed process: then a rank is lost that gives no sign for HUNG_UP seconds. What is
left is a rank that is stopped, and a node that is gone: `timeout`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from time import monotonic, sleep

from gems.errors import PeerError
from gems.transport.board import (
    CLOSED,
    ENDED,
    FAILED,
    LOST,
    WORKING,
    Board,
    Sign,
    cpu_time,
    is_gone,
    own_sign,
    parse,
)

BEATS = 6  # per timeout
SLOWEST = 5.0  # seconds between two
HUNG_UP = 12.0  # seconds without a sign of life, once a connection has closed
WORDS = 600  # characters of why a rank ended
AGAIN = "start again from a checkpoint"
TIMEOUT = 25.0  # seconds without a sign of life; with the time between two beats under 30


class Heartbeat:
    """This rank's line on a board, and what it knows of the others'.

    `lost` is called once, by a thread of ours, with the error that ends this rank's part: a rank
    has failed, or was silent for `timeout` seconds. `place` is where the board is, for messages.
    """

    def __init__(self, board: Board, rank: int, world: int, timeout: float, place: str) -> None:
        self.board, self.rank, self.world = board, rank, world
        self.timeout, self.place = timeout, place
        self.interval = min(SLOWEST, timeout / BEATS)
        self.own = self.written = own_sign()
        self.signs: list[Sign | None] = [None] * world
        self.worked: dict[int, int] = {}  # ticks of processes that have fallen silent
        self.changed = threading.Condition()
        self.wake, self.over = threading.Event(), threading.Event()
        self.news = threading.Event()  # a rank has ended
        self.rounds, self.trouble = 0, ""
        self.read_at = monotonic()
        self.heard = [self.read_at] * world
        self.problem: PeerError | None = None
        self.lost: Callable[[PeerError], None] = lambda error: None
        self.hung_up: Callable[[], bool] = lambda: False
        self.limit = timeout
        self.threads = [
            threading.Thread(target=work, name=f"gems-{work.__name__.strip('_')}", daemon=True)
            for work in (self._exchange, self._watch)
        ]
        for thread in self.threads:
            thread.start()

    def on_loss(
        self, lost: Callable[[PeerError], None], hung_up: Callable[[], bool] = lambda: False
    ) -> None:
        """Call this when a rank is lost; at once if one is already. `hung_up` tells whether another
        rank has closed a connection."""
        with self.changed:
            self.lost, self.hung_up = lost, hung_up
            problem = self.problem
        if problem is not None:
            lost(problem)

    # --- this rank's line -------------------------------------------------------------------------

    def tell(self, state: str, why: str = "", patience: float = 2.0) -> None:
        """Let the others know that this rank has ended; the first word counts."""
        late = monotonic() + patience
        with self.changed:
            if self.own.state == WORKING:
                self.own = replace(self.own, state=state, why=why[:WORDS])
            while self.written.state == WORKING and monotonic() < late and not self.over.is_set():
                self.wake.set()
                self.changed.wait(0.05)

    def end(self, state: str, why: str = "") -> None:
        """The last word, and no more signs."""
        self.tell(state, why)
        self.over.set()
        self.wake.set()
        self.news.set()
        for thread in self.threads:
            if thread is not threading.current_thread():
                thread.join(2.0)

    def _exchange(self) -> None:
        while not self.over.is_set():
            with self.changed:
                own = self.own = replace(self.own, beat=self.own.beat + 1)
            try:
                self.board.write(own.text())
                lines = self.board.read()
            except Exception as error:  # torch's, the system's: whatever the place is made of
                self.trouble = str(error).strip().partition("\n")[0] or type(error).__name__
            else:
                self._note(own, [parse(line) for line in lines])
            self.wake.wait(self.interval)
            self.wake.clear()

    def _note(self, own: Sign, signs: list[Sign | None]) -> None:
        with self.changed:
            self.read_at, self.trouble = monotonic(), ""
            for rank, sign in enumerate(signs):
                if sign is not None and sign != self.signs[rank]:
                    self.signs[rank], self.heard[rank] = sign, self.read_at
                    self.worked.pop(rank, None)
                    if sign.state != WORKING and rank != self.rank:
                        self.news.set()
            self.written, self.rounds = own, self.rounds + 1
            self.changed.notify_all()

    # --- the others' ------------------------------------------------------------------------------

    def attend(self, patience: float) -> None:
        """Wait until all ranks have come; so long for the next one of them."""
        late, missing = monotonic() + patience, self.world
        while True:
            self._refresh(0.2)
            absent = [rank for rank, sign in enumerate(self.signs) if sign is None]
            if not absent:
                return
            if len(absent) < missing:
                missing, late = len(absent), monotonic() + patience
            if ended := self._ended():
                raise PeerError(f"rank {self.rank} cannot meet the others: {ended}. Start again")
            if monotonic() > late:
                more = f" ({self.place}: {self.trouble})" if self.trouble else ""
                raise PeerError(
                    f"{_ranks(absent)} of {self.world} {_have(absent)} not come within "
                    f"{patience:g} seconds; rank {self.rank} waits at {self.place}{more}. Look for "
                    "a rank that ended before, and start as many as the plan takes"
                )

    def _refresh(self, patience: float) -> None:
        """Read the lines again, if their place answers in so many seconds."""
        late = monotonic() + patience
        with self.changed:
            wanted = self.rounds + 2  # one may have begun
            while self.rounds < wanted and monotonic() < late:
                self.wake.set()
                self.changed.wait(0.05)

    def cause(self, patience: float = 1.5) -> str | None:
        """Why a rank cannot be reached, if that can be learnt."""
        late = monotonic() + patience
        while True:
            self._refresh(0.5)
            if found := self._ended():
                return found
            if monotonic() > late:
                silent = self._silent()
                return self._silence(silent) if silent else None
            sleep(0.05)

    def _ended(self) -> str | None:
        """The word of a rank that has ended, or its death; the most telling first."""
        others = [(r, s) for r, s in enumerate(self.signs) if s is not None and r != self.rank]
        for rank, sign in others:
            if sign.state == FAILED:
                return f"rank {rank} failed: {sign.why}"
        for rank, sign in others:
            if sign.state == WORKING and is_gone(sign, self.own):
                return f"rank {rank} (process {sign.pid} on {sign.host}) was killed or has crashed"
        for rank, sign in others:
            if sign.state == ENDED and sign.why:
                return f"rank {rank} has ended: {sign.why}"
        for rank, sign in others:
            if sign.state == CLOSED:
                return f"rank {rank} has closed its trainer, and the others still need it"
            if sign.state == ENDED:
                return f"rank {rank} has ended"
        return next((sign.why for _, sign in others if sign.state == LOST), None)

    def _watch(self) -> None:
        before = monotonic()
        while True:
            self.news.wait(self.interval)
            self.news.clear()
            if self.over.is_set():
                return
            now = monotonic()
            if now - before > self.interval + self.timeout / 3:  # this process itself was stopped
                with self.changed:
                    self.heard, self.read_at = [now] * self.world, now
            before = now
            if (problem := self._found(now)) is not None:
                with self.changed:
                    self.problem, lost = problem, self.lost
                lost(problem)
                return

    def _found(self, now: float) -> PeerError | None:
        others = [sign for rank, sign in enumerate(self.signs) if sign and rank != self.rank]
        if any(map(self._is_lost, others)) and (why := self._ended()):
            return _because(why, f"rank {self.rank} stops: {why}. Look at its output, then {AGAIN}")
        if all(sign.state == WORKING for sign in others) and self.hung_up():
            self.limit = min(self.timeout, HUNG_UP)  # [Note: how soon a lost rank is noticed]
        if now - self.read_at > self.limit:
            why = f" ({self.trouble})" if self.trouble else ""
            return PeerError(
                f"rank {self.rank} has learnt nothing of the other ranks for {self.limit:g} "
                f"seconds: {self.place} does not answer{why}. See whether it was stopped, or its "
                f"node is gone, then {AGAIN}"
            )
        if silent := self._silent():
            why = self._silence(silent)
            return _because(
                why,
                f"{why}. Was it stopped, or is its node gone? Then {AGAIN}. If it was in one long "
                "call that holds Python's lock, raise timeout",
            )
        return None

    def _is_lost(self, sign: Sign) -> bool:
        if sign.state == WORKING:
            return is_gone(sign, self.own)
        return sign.state in (FAILED, LOST) or (sign.state == ENDED and bool(sign.why))

    def _silent(self) -> list[int]:
        """Ranks at work that have given no sign for too long."""
        return [
            rank
            for rank, sign in enumerate(self.signs)
            if sign is not None and rank != self.rank and sign.state == WORKING
            if self._is_silent(rank, sign)
        ]

    def _is_silent(self, rank: int, sign: Sign) -> bool:
        since = self.read_at - self.heard[rank]
        if since > self.timeout / 2:  # [Note: what counts as life]
            ticks = cpu_time(sign, self.own)
            if ticks is not None and ticks > self.worked.setdefault(rank, ticks):
                self.worked[rank], self.heard[rank] = ticks, self.read_at
                return False
        return since > self.limit

    def _silence(self, ranks: list[int]) -> str:
        named = []
        for rank in ranks:
            sign = self.signs[rank]
            named.append(f"rank {rank}" + (f" (process {sign.pid} on {sign.host})" if sign else ""))
        listed = " and ".join(named)
        return f"{listed} {_have(ranks)} given no sign of life for {self.limit:g} seconds"


def in_short(error: BaseException) -> str:
    """Type and first line, as others are told of it."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}".removesuffix(": ")


def _because(cause: str, message: str) -> PeerError:
    error = PeerError(message)
    error.cause = cause
    return error


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _have(ranks: list[int]) -> str:
    return "have" if len(ranks) > 1 else "has"
