"""One run per folder: a lock that ends with the process that holds it, however that ends.

Rank 0 of a run holds it, and the launcher looks before it starts any. It is flock(2) on a file in
the folder, which names the holder for the message; a file that a dead run has left locks nothing.
Over NFS the server must lock files (Linux: NFSv4, or NFSv3 with lockd); where it cannot, there is a
warning and no lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gems.errors import GemsError

log = logging.getLogger(__name__)
NAME = ".lock"
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder while the block runs, or raise if another run has it."""
    handle = _take(folder)
    try:
        yield
    finally:
        # The file goes first: who locks what has no name any more will see that, and try again.
        if handle is not None:
            with contextlib.suppress(OSError):
                (folder / NAME).unlink()
            os.close(handle)


def require_free(folder: Path) -> None:
    """Raise if a run has the folder now. The folder may not exist yet."""
    if (folder / NAME).exists():
        with locked(folder):
            pass


def _take(folder: Path) -> int | None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise GemsError(f"{folder} exists and is not a folder; choose another --out") from None
    while True:
        handle = _open(folder / NAME)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(handle, 200, 0).decode("utf-8", "replace").strip()
            os.close(handle)
            raise GemsError(
                f"{folder} is in use by another run ({owner or 'which has just begun'}); wait for "
                "it or stop it, or choose another --out"
            ) from None
        except OSError as error:
            os.close(handle)
            if error.errno not in NO_LOCKS:
                raise
            log.warning("%s cannot be locked (%s); see that only one run uses it", folder, error)
            return None
        if _is_there(handle, folder / NAME):
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
            return handle
        os.close(handle)  # its holder has just gone, and the file with it


def _open(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise GemsError(f"{path} is a link, and not the lock of a run; remove it") from None
        raise


def _is_there(handle: int, path: Path) -> bool:
    """Whether the file that was opened still has its name."""
    try:
        here = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    mine = os.fstat(handle)
    return (here.st_dev, here.st_ino) == (mine.st_dev, mine.st_ino)
