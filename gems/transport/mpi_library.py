"""The MPI library of this process: loaded once, asked by one thread at a time.

[Note: who makes MPI progress] Most MPI libraries move large messages only while some thread is
inside one of their calls: one that was begun, and is never asked about, goes on when the process
waits for it. So a thread of ours asks every POLL seconds for all that has begun, while the rank
computes. (GEMS_MPI_PROGRESS=off leaves that out, for libraries that have a thread of their own.)

[Note: no call that blocks] A call that waits for a rank that has died never returns, and Python
cannot end it. So everything is begun and asked about; between two questions a rank learns whether
the others still live (gems.transport.heartbeat).
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from time import monotonic, sleep
from typing import Any

from gems.errors import GemsError

PROGRESS = "GEMS_MPI_PROGRESS"
POLL = 0.0005  # seconds between two questions while the rank computes
EAGER = 0.002  # seconds that one who waits asks without a pause
PAUSE, LONG_PAUSE, LONG = 0.00005, 0.0005, 0.1  # and then, and after so many seconds

INSTALL = (
    "install mpi4py for the MPI of this machine (pip install mpi4py, or the module or package of "
    "your site); see docs/mpi.md"
)


class Operation:
    """One or several requests of MPI that are done together. `keep` is the memory they use."""

    def __init__(self, keep: Any) -> None:
        self.left = 0
        self.keep = keep
        self.error: Exception | None = None

    @property
    def done(self) -> bool:
        return self.left == 0 or self.error is not None


Begun = Iterable[tuple[Any, int | None]]  # requests, each with the bytes that a receive must get


class Library:
    """`mpi4py.MPI`, what has begun, and the thread that asks about it. [Note: who makes MPI
    progress]"""

    def __init__(self, patience: float) -> None:
        self.MPI = _loaded(patience)
        self.lock = threading.Lock()
        self.requests: list[Any] = []
        self.owners: list[tuple[Operation, int | None]] = []  # of each request
        self.statuses: list[Any] = []  # mpi4py makes as many as it needs
        self.waiting = 0  # threads that ask anyway
        self.begun, self.over = threading.Event(), threading.Event()
        self.thread: threading.Thread | None = None
        if progress():
            self.thread = threading.Thread(target=self._poll, name="gems-mpi", daemon=True)
            self.thread.start()

    def begin(self, start: Callable[[], Begun], keep: Any) -> Operation:
        """Begin an operation. It goes on, whether somebody waits for it or not."""
        operation = Operation(keep)
        with self.lock:
            for request, size in start():
                self.requests.append(request)
                self.owners.append((operation, size))
                operation.left += 1
        self.begun.set()
        return operation

    def advance(self) -> None:
        """Ask about all that has begun."""
        with self.lock:
            if not self.requests:
                return
            try:
                found = self.MPI.Request.Testsome(self.requests, self.statuses) or ()
            except self.MPI.Exception as error:  # it does not tell of which: none can be trusted
                for operation, _ in self.owners:
                    operation.error = error
                self.requests, self.owners = [], []
                return
            for index, status in zip(found, self.statuses, strict=False):
                self._end(*self.owners[index], status)
            for index in sorted(found, reverse=True):
                del self.requests[index], self.owners[index]

    def _end(self, operation: Operation, size: int | None, status: Any) -> None:
        operation.left -= 1
        if size is not None and (got := status.Get_count(self.MPI.BYTE)) != size:
            operation.error = ValueError(f"{got} bytes came, and {size} were expected")

    def _poll(self) -> None:
        while not self.over.is_set():
            if not self.requests:
                self.begun.wait(1.0)
                self.begun.clear()
            elif not self.waiting:
                self.advance()
            sleep(POLL)

    def wait(self, operation: Operation, check: Callable[[float], None]) -> None:
        """Until it is done. `check` is called with the seconds so far, and may raise."""
        self.waiting += 1
        try:
            start = monotonic()
            while not operation.done:
                self.advance()
                if operation.done:
                    break
                waited = monotonic() - start
                check(waited)
                sleep(0 if waited < EAGER else PAUSE if waited < LONG else LONG_PAUSE)
        finally:
            self.waiting -= 1

    def end(self) -> None:
        """No more questions: the process ends."""
        self.over.set()
        self.begun.set()
        if self.thread is not None:
            self.thread.join(5.0)


def progress() -> bool:
    """Whether a thread of ours asks, by the environment."""
    given = os.environ.get(PROGRESS, "on")
    if given not in ("on", "off"):
        raise GemsError(f"{PROGRESS} is {given!r}; set it to on or off")
    return given == "on"


# [Note: ranks that never come] MPI waits for all ranks when it is initialised, inside of one call
# that lets no other thread of Python run: so another process looks at the clock.
WATCH = """
import os, select, signal, sys
if not select.select([0], [], [], float(sys.argv[2]))[0]:
    os.write(2, sys.argv[3].encode())
    os.kill(int(sys.argv[1]), signal.SIGKILL)
"""


@contextlib.contextmanager
def _watched(patience: float) -> Iterator[None]:
    """End this process if what is inside takes longer. [Note: ranks that never come]"""
    why = (
        f"MPI has waited {patience:g} seconds for all ranks to start: one has ended, or was "
        "stopped, before it came to MPI. Look for the rank that ended first, then start again\n"
    )
    command = [sys.executable, "-I", "-S", "-c", WATCH, str(os.getpid()), str(patience), why]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL):
        yield  # then its input is closed, which ends it


def _loaded(patience: float) -> Any:
    """`mpi4py.MPI`, initialised, with a level of threads that we can use."""
    try:
        with _watched(patience):
            from mpi4py import MPI
    except ImportError as error:
        why = f"backend mpi needs mpi4py, which cannot be used ({error})"
        raise GemsError(f"{why}: {INSTALL}") from error
    if MPI.Is_finalized():
        raise GemsError("MPI has ended in this process; use backend mpi before MPI.Finalize()")
    if not MPI.Is_initialized():  # mpi4py was told to leave that to its user
        with _watched(patience):
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        raise GemsError(
            "MPI here was initialised for one thread, and ranks need a second one for signs of "
            "life: initialise it with MPI_THREAD_MULTIPLE or _SERIALIZED (mpi4py.rc.thread_level; "
            "MVAPICH2: MV2_ENABLE_AFFINITY=0)"
        )
    return MPI


_library: Library | None = None


def library(patience: float) -> Library:
    """All ranks come to it, each at most so many seconds after the last one."""
    global _library
    if _library is None:
        _library = Library(patience)
    return _library


def end_library() -> None:
    """Before MPI ends: nobody may ask it any more."""
    if _library is not None:
        _library.end()
