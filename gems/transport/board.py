"""What each rank lets the others know of itself beside the process groups: one line per rank.

The lines are on files of a private folder, or in a torch store. Whoever reads them checks them.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

LONGEST = 4000  # bytes of a line
WORKING, CLOSED, ENDED, FAILED, LOST = "working", "closed", "ended", "failed", "lost"
STATES = (WORKING, CLOSED, ENDED, FAILED, LOST)


@dataclass(frozen=True)
class Sign:
    """A rank's line. `beat` counts; `where` is the same for processes that see each other's ids."""

    beat: int
    pid: int
    host: str
    where: str
    state: str = WORKING
    why: str = ""

    def text(self) -> str:
        return json.dumps(asdict(self))


def parse(line: bytes | str | None) -> Sign | None:
    """A line that was read; None if it is none of ours."""
    try:
        if line is None or len(line) > LONGEST:
            return None
        found = Sign(**json.loads(line))
        kinds = (int, int, str, str, str, str)
        fits = all(type(x) is kind for x, kind in zip(asdict(found).values(), kinds, strict=True))
        return found if fits and found.state in STATES else None
    except (ValueError, TypeError, RecursionError):
        return None


def own_sign() -> Sign:
    host = socket.gethostname()
    with contextlib.suppress(OSError):
        space = os.readlink("/proc/self/ns/pid")
        with open("/proc/sys/kernel/random/boot_id") as boot:
            return Sign(0, os.getpid(), host, f"{boot.read().strip()} {space}")
    return Sign(0, os.getpid(), host, "")


class Board(Protocol):
    """A line per rank. Writing or reading may raise, or wait for long, if its place is gone."""

    def write(self, line: str) -> None: ...

    def read(self) -> list[bytes | None]: ...


class FolderBoard:
    """A file per rank. No locks: a rank that is stopped anywhere holds up nobody."""

    def __init__(self, folder: Path, rank: int, world: int) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        self.files = [folder / f"rank-{r}" for r in range(world)]
        self.own = self.files[rank]

    def write(self, line: str) -> None:
        draft = self.own.with_suffix(".tmp")
        draft.write_text(line)
        os.replace(draft, self.own)

    def read(self) -> list[bytes | None]:
        return [_content(file) for file in self.files]


def _content(file: Path) -> bytes | None:
    try:
        with open(file, "rb") as opened:
            return opened.read(LONGEST + 1)
    except FileNotFoundError:
        return None


class StoreBoard:
    """A key per rank in a torch store. The store should be a connection of its own: one that waits
    for a key holds up everybody else."""

    def __init__(self, store: Any, name: str, rank: int, world: int) -> None:
        self.store = store
        self.keys = [f"{name}/rank-{r}" for r in range(world)]
        self.own = self.keys[rank]
        self.come: set[str] = set()

    def write(self, line: str) -> None:
        self.store.set(self.own, line)

    def read(self) -> list[bytes | None]:
        self.come |= {k for k in self.keys if k not in self.come and self.store.check([k])}
        known = [key for key in self.keys if key in self.come]
        if self.store.has_extended_api():
            lines = self.store.multi_get(known) if known else []
        else:
            lines = [self.store.get(key) for key in known]
        found = dict(zip(known, lines, strict=True))
        return [found.get(key) for key in self.keys]


# --- processes that this one can see --------------------------------------------------------------


def is_gone(sign: Sign, here: Sign) -> bool:
    """Whether the process surely has ended. (Linux; elsewhere, or on another node, unknown.)"""
    if not sign.where or sign.where != here.where:
        return False
    found = _stat(sign.pid)
    return found is None or found[0] in "ZX"


def cpu_time(sign: Sign, here: Sign) -> int | None:
    """Clock ticks that the process has worked; None if it is stopped, gone or out of sight."""
    found = _stat(sign.pid) if sign.where and sign.where == here.where else None
    return None if found is None or found[0] in "TtZX" else found[1]


def _stat(pid: int) -> tuple[str, int] | None:
    try:
        with open(f"/proc/{pid}/stat") as opened:
            fields = opened.read().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[11]) + int(fields[12])
