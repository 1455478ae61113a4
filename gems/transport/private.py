"""A folder that only this user can open, in which the ranks of a local run meet.

Whoever may open the folder is this user, so nobody else can join the run or read what ranks tell
each other there. Every process of a run holds a lock in it while it lives; a folder in which no
lock is held is a leftover of a run that was killed, and the next run removes it.

    /tmp/gems-1000/              0700, ours, no symlink
      lock                         held while folders are made and removed
      meet-4f1c...                 name of the run's folder, for ranks that know the job only
      run-x8k2p/                   0700
        lock-launcher  lock-0 ...    held by the launcher and the ranks
        store                        torch's FileStore
        0/rank-0 0/rank-1 ...        signs of life (gems.transport.board)
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from gems.errors import GemsError, PeerError

VARIABLE = "GEMS_RENDEZVOUS"  # the folder, for ranks that `gems train` starts


def validate(folder: Path) -> Path:
    """Raise unless the folder is ours, and nobody else may open it."""
    try:
        found = folder.lstat()
    except OSError as error:
        raise GemsError(
            f"the folder {folder}, where ranks meet, cannot be opened: {error}"
        ) from None
    wrong = [
        text
        for is_so, text in (
            (not stat.S_ISDIR(found.st_mode), "is not a folder but a link or a file"),
            (found.st_uid != os.geteuid(), f"belongs to user {found.st_uid}, not {os.geteuid()}"),
            (bool(found.st_mode & 0o077), f"has mode {stat.S_IMODE(found.st_mode):04o}, not 0700"),
        )
        if is_so
    ]
    if wrong:
        raise GemsError(
            f"the folder {folder}, where ranks meet, {' and '.join(wrong)}; another user could "
            "join the run. Remove it, or set TMPDIR to a folder of your own"
        )
    return folder


def base() -> Path:
    """The folder of all local runs of this user."""
    folder = Path(tempfile.gettempdir()) / f"gems-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    return validate(folder)


class Folder:
    """A run's folder, and this process's lock in it."""

    def __init__(self, path: Path, name: str) -> None:
        """`name` is of this process, the only one in the run that has it."""
        self.path = validate(path)
        self.pid = os.getpid()
        self.lock = _open(path / f"lock-{name}")
        _flock(self.lock, wait=True)

    def leave(self) -> None:
        """Release it; the last process that does so removes it."""
        if self.lock is None or os.getpid() != self.pid:  # a fork has copies of all this
            return
        os.close(self.lock)
        self.lock = None
        with contextlib.suppress(OSError, GemsError), _alone():
            _remove_leftover(self.path)


def create(name: str) -> Folder:
    """A new folder for a run; leftovers of runs that were killed go."""
    with _alone() as folder:
        return _create(folder, name)


def _create(folder: Path, name: str) -> Folder:
    for old in folder.glob("run-*"):
        _remove_leftover(old)
    return Folder(Path(tempfile.mkdtemp(prefix="run-", dir=folder)), name)


def meet(job: str, rank: int, patience: float) -> Folder:
    """The folder of the run that all ranks of a job make, knowing nothing but its name."""
    pointer = base() / f"meet-{job}"
    return _host(pointer) if rank == 0 else _join(pointer, rank, patience)


def _host(pointer: Path) -> Folder:
    with _alone() as folder:
        if (taken := _pointed(pointer)) is not None and _held(taken / "lock-0"):
            raise GemsError(
                f"another run that has not ended uses {taken}; set MASTER_PORT to another "
                "number, the same on all ranks of this run"
            )
        made = _create(folder, "0")
        draft = folder / f"{made.path.name}.tmp"
        draft.write_text(made.path.name)
        os.replace(draft, pointer)
        return made


def _join(pointer: Path, rank: int, patience: float) -> Folder:
    late = time.monotonic() + patience
    while time.monotonic() < late:
        found = _pointed(pointer)
        if found is not None and _held(found / "lock-0"):  # else of an earlier run
            return Folder(found, str(rank))
        time.sleep(0.02)
    raise PeerError(
        f"rank 0 has not come within {patience:g} seconds: rank {rank} waits for {pointer}. Look "
        "for a rank that ended before; all ranks must have the same temporary folder (TMPDIR)"
    )


def _pointed(pointer: Path) -> Path | None:
    try:
        found = pointer.parent / Path(pointer.read_text()).name
        return found if found.name.startswith("run-") and found.is_dir() else None
    except OSError:
        return None


def _remove_leftover(folder: Path) -> None:
    """Unless a process holds a lock in it. Nobody makes one: the lock of all folders is ours."""
    if not any(_held(lock) for lock in folder.glob("lock-*")):
        shutil.rmtree(folder, ignore_errors=True)
        for pointer in folder.parent.glob("meet-*"):
            if _pointed(pointer) is None:
                pointer.unlink(missing_ok=True)


# --- locks ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _alone() -> Iterator[Path]:
    """With no other process of ours making or removing folders."""
    folder = base()
    lock = _open(folder / "lock")
    try:
        _flock(lock, wait=True)
        yield folder
    finally:
        os.close(lock)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)


def _flock(lock: int, *, wait: bool, shared: bool = False) -> bool:
    import fcntl  # not on every system, and only local runs need it

    try:
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        fcntl.flock(lock, kind | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


def _held(path: Path) -> bool:
    """Whether a living process has this lock. (Those who ask at the same time do not disturb.)"""
    try:
        lock = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        return not _flock(lock, wait=False, shared=True)
    finally:
        os.close(lock)
