"""Folders that appear whole or not at all.

    run/step-200.tmp-5f3a09c1   being written, locked by the writer; or left behind by a dead one
    run/step-200                complete: renamed only after every file was on the disk

A folder is renamed before it is removed, so that half of one never has a final name.

Only what GEMS wrote is removed: files by the names in OWN. A link in the place of a folder is
replaced or removed itself, never what it leads to.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import os
import re
import secrets
from pathlib import Path

log = logging.getLogger(__name__)
UNFINISHED = re.compile(r".+\.tmp-[0-9a-f]{8}")
# The files that GEMS and torch.distributed.checkpoint write into a checkpoint, and no other.
OWN = re.compile(r"manifest\.json|state\.json|\.metadata(\.tmp)?|__\d{1,9}_\d{1,9}\.distcp")
EXCHANGE, HERE = 2, -100  # RENAME_EXCHANGE and AT_FDCWD of renameat2(2)


class AtomicFolder:
    """A temporary folder, until it is published. Its lock ends with the process."""

    def __init__(self, path: Path) -> None:
        self.target = path
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_unfinished(path.parent)
        self.path = _aside(path)
        self.path.mkdir()
        self.handle = os.open(self.path, os.O_RDONLY)
        _lock(self.handle)

    def publish(self) -> None:
        """Give it its name. What had that name before is removed."""
        try:
            sync(self.path)
            replaced = os.path.lexists(self.target)
            if not replaced:
                os.rename(self.path, self.target)
            elif not _exchange(self.path, self.target):
                # Between these two lines there is no folder of that name, though both are whole.
                os.rename(self.target, gone := _aside(self.target))
                os.rename(self.path, self.target)
                os.rename(gone, self.path)
            sync(self.target.parent)
            if replaced:
                _clear(self.path)
        finally:
            self._unlock()

    def discard(self) -> None:
        _clear(self.path)
        self._unlock()

    def _unlock(self) -> None:
        if self.handle >= 0:
            os.close(self.handle)
            self.handle = -1


def remove(path: Path) -> None:
    """Remove a folder, in one move as far as others can see."""
    os.rename(path, gone := _aside(path))
    _clear(gone)


def foreign(path: Path) -> list[str]:
    """What a folder holds that GEMS did not write there. A link holds nothing."""
    if path.is_symlink():
        return []
    with os.scandir(path) as entries:
        return sorted(
            e.name for e in entries if not OWN.fullmatch(e.name) or e.is_dir(follow_symlinks=False)
        )


def _clear(path: Path) -> None:
    """Remove a folder's own files and then itself, or a link; all else stays."""
    with contextlib.suppress(OSError):
        if path.is_symlink():
            path.unlink()
            return
        strange = foreign(path)
        for entry in path.iterdir():
            if entry.name not in strange:
                entry.unlink()
        path.rmdir()


def remove_unfinished(folder: Path) -> None:
    """Remove what died saves left behind. Unfinished ones elsewhere hold their lock."""
    for path in folder.iterdir():
        if path.is_symlink() or not (UNFINISHED.fullmatch(path.name) and path.is_dir()):
            continue
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            if _lock(handle) and not foreign(path):
                log.info("removing %s, which a save that died has left behind", path)
                _clear(path)
        finally:
            os.close(handle)


def sync(folder: Path) -> None:
    """Have the names in a folder on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_synced(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _aside(path: Path) -> Path:
    return path.with_name(f"{path.name}.tmp-{secrets.token_hex(4)}")


def _lock(handle: int) -> bool:
    """Whether nobody else has it. (Some network file systems cannot lock a folder.)"""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _exchange(a: Path, b: Path) -> bool:
    """Swap two names in one move, where kernel and file system can."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    return call is not None and call(HERE, bytes(a), HERE, bytes(b), EXCHANGE) == 0
