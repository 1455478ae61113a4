"""Start ranks on this computer, and see to it that all of them end.

[Note: ranks without a launcher] A launcher that is killed cannot end its ranks. The kernel does
where it can (prctl, Linux); elsewhere each rank reads from a pipe whose other end only the launcher
has, and which ends with it. Ranks hold locks and files in a private folder, which the launcher
makes and removes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import IO

from gems.errors import GemsError
from gems.transport.private import VARIABLE, create

# Training frees and takes the same memory all the time. glibc would hand it back to the kernel and
# have every page cleared again; kept, a CPU rank is some per cent faster.
KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 30), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
LAUNCHER = "GEMS_LAUNCHER"  # its process, and the end of the pipe that a rank reads from
PR_SET_PDEATHSIG = 1
PATIENCE = 15.0  # seconds that ranks get to end by themselves once one has failed


def start(command: Sequence[str], world: int, stderr: IO[str] | None = None) -> int:
    """Run `command` once per rank; 0 if all succeed, else the first failing rank's exit code.

    `stderr` is a file for what ranks write there, instead of this process's own.
    """
    folder = create("launcher")
    theirs, ours = os.pipe()  # nothing is ever written
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(world):
            environment = _environment(rank, world) | {
                VARIABLE: str(folder.path),
                LAUNCHER: f"{os.getpid()} {theirs}",
            }
            processes.append(
                subprocess.Popen(command, env=environment, pass_fds=(theirs,), stderr=stderr)
            )
        with _passing_on(processes):
            code = _watch(processes, stderr)
        return 128 - code if code < 0 else code  # a shell's exit code for a signal
    finally:
        for process in processes:
            process.kill()
            process.wait()
        os.close(theirs)
        os.close(ours)
        folder.leave()


def reject_mpi(backend: str | None, world: int) -> None:
    """Ranks that are started here are none of MPI."""
    if backend == "mpi":
        raise GemsError(
            f"--backend mpi with {world} ranks, and none were started: put the mpirun of your MPI "
            f"before this command (mpirun -np {world} gems ...), or leave --backend out"
        )


def _environment(rank: int, world: int) -> dict[str, str]:
    environment = os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),  # not used, but the variables of a rank include it
    }
    threads = str(max(1, (os.cpu_count() or 1) // world))
    for name, value in (KEEP_MEMORY | {"OMP_NUM_THREADS": threads}).items():
        environment.setdefault(name, value)
    return environment


def end_with_launcher() -> None:
    """In a rank: end when the launcher has, however that came about.

    [Note: ranks without a launcher]
    """
    if LAUNCHER not in os.environ:
        return
    launcher, pipe = map(int, os.environ.pop(LAUNCHER).split())
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # it ended before we asked
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Thread(target=_end_with, args=(pipe,), name="gems-launcher", daemon=True).start()


def _end_with(pipe: int) -> None:
    os.read(pipe, 1)  # returns when the other end is closed
    os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def _passing_on(processes: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Pass signals on to the ranks, which save what they have and end.

    Ctrl-C reaches all processes of a terminal. Passed on as it is, ranks would take it for a second
    one, which means at once; a second one here ends them all.
    """

    def pass_on(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM if number == signal.SIGINT else number)

    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, pass_on) for number in (PASSED_ON if main else ())}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(processes: list[subprocess.Popen[bytes]], stderr: IO[str] | None) -> int:
    failed, since = 0, 0.0
    while any(process.poll() is None for process in processes):
        codes = [process.poll() for process in processes]
        bad = [(rank, code) for rank, code in enumerate(codes) if code]
        if bad and not failed:
            (rank, failed), since = bad[0], time.monotonic()
            told = f"rank {rank} ended with exit code {failed}; stopping the others"
            print(told, file=stderr or sys.stderr, flush=True)
        if failed and time.monotonic() - since > PATIENCE:
            break
        time.sleep(0.05)
    codes = [process.poll() for process in processes]
    return failed or next((code for code in codes if code), 0)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
