"""Open files, the last used ones of them: opened when first read, and never pickled."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

T = TypeVar("T")
MOST = 32


class Handles(Generic[T]):
    """What `open` gave for each path. Shared by threads; a copy in another process is empty."""

    def __init__(self, open: Callable[[Path], T], most: int = MOST) -> None:
        self._open, self._most = open, most
        self._files: OrderedDict[Path, T] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, path: Path) -> T:
        with self._lock:
            if path in self._files:
                self._files.move_to_end(path)
                return self._files[path]
        opened = self._open(path)  # outside the lock: others read on meanwhile
        with self._lock:
            opened = self._files.setdefault(path, opened)
            self._files.move_to_end(path)
            # One that leaves is closed when the last thread that still reads it is done.
            while len(self._files) > self._most:
                self._files.popitem(last=False)
        return opened

    def __reduce__(self) -> tuple[Any, ...]:
        return Handles, (self._open, self._most)
