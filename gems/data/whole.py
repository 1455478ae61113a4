"""Files that are there whole, or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def write_whole(path: Path, write: Callable[[Path], object]) -> Path:
    """Have `write` make a file, and put it at `path` in one move: several ranks may at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".") as folder:
        made = Path(folder) / path.name
        write(made)
        os.replace(made, path)
    return path
