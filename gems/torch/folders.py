"""Folders that appear whole or not at all.

    run/step-200.tmp-5f3a09c1   being written, locked by the writer; or left behind by a dead one
    run/step-200                complete: renamed only after every file was on the disk

A folder that goes is renamed first, so that half of one never has a name that counts.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import re
import secrets
import shutil
from pathlib import Path

log = logging.getLogger(__name__)
UNFINISHED = re.compile(r".+\.tmp-[0-9a-f]{8}")
EXCHANGE, HERE = 2, -100  # RENAME_EXCHANGE and AT_FDCWD of renameat2(2)


class Draft:
    """A folder under way. Its lock ends with the process, however that ends."""

    def __init__(self, path: Path) -> None:
        self.target = path
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_unfinished(path.parent)
        self.path = _aside(path)
        self.path.mkdir()
        self.handle = os.open(self.path, os.O_RDONLY)
        _lock(self.handle)

    def publish(self) -> None:
        """Give it its name. What had that name before goes."""
        try:
            sync(self.path)
            replaced = self.target.exists()
            if not replaced:
                os.rename(self.path, self.target)
            elif not _exchange(self.path, self.target):
                # Between these two lines there is no folder of that name, though both are whole.
                os.rename(self.target, gone := _aside(self.target))
                os.rename(self.path, self.target)
                os.rename(gone, self.path)
            sync(self.target.parent)
            if replaced:
                shutil.rmtree(self.path, ignore_errors=True)
        finally:
            self._unlock()

    def discard(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        if self.handle >= 0:
            os.close(self.handle)
            self.handle = -1


def remove(path: Path) -> None:
    """Away with a folder, in one move as far as others can see."""
    os.rename(path, gone := _aside(path))
    shutil.rmtree(gone, ignore_errors=True)


def remove_unfinished(folder: Path) -> None:
    """Away with what saves left behind that died. Those under way elsewhere hold their lock."""
    for path in folder.iterdir():
        if not (UNFINISHED.fullmatch(path.name) and path.is_dir()):
            continue
        handle = os.open(path, os.O_RDONLY)
        try:
            if _lock(handle):
                log.info("removing %s, which a save that died has left behind", path)
                shutil.rmtree(path, ignore_errors=True)
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
