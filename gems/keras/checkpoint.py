"""Folders that training of a Keras model goes on from.

step-200/
  model.weights.h5   weights and the optimizer's state, as Keras writes and reads them
  checkpoint.json    all else, and the size and checksum of the weights; written last
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gems.errors import CheckpointError, GemsError, short
from gems.files import parse_json, read_text
from gems.version import __version__

log = logging.getLogger(__name__)
WHAT, FORMAT = "GEMS checkpoint of a Keras model", 1
NAME, WEIGHTS = "checkpoint.json", "model.weights.h5"
FIELDS = {"step": int, "plan": dict, "random": list, "file": dict}


def fill(folder: Path, about: dict[str, Any], save: Callable[[str], None]) -> None:
    """Write a checkpoint into a folder that gets its name when it is complete."""
    folder.mkdir(parents=True)
    weights = folder / WEIGHTS
    save(str(weights))
    file = {"bytes": weights.stat().st_size, "sha256": _checksum(weights)}
    head = {"what": WHAT, "format": FORMAT, "gems": __version__}
    text = json.dumps({**head, **about, "file": file}, indent=1)
    (folder / NAME).write_text(text + "\n", encoding="utf-8")


def read(path: Path) -> dict[str, Any]:
    """What `fill` was given, of a checkpoint whose weights are as they were written."""
    found = _head(path)
    if _checksum(path / WEIGHTS) != found["file"].get("sha256"):
        raise CheckpointError(f"{path / WEIGHTS} has another checksum than when it was written")
    return found


def _head(path: Path) -> dict[str, Any]:
    try:
        found = parse_json(read_text(path / NAME))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} is no {WHAT}: {short(error, 200)}; give a folder that gems train wrote"
        ) from error
    if not isinstance(found, dict) or found.get("what") != WHAT:
        raise CheckpointError(f"{path / NAME} is not that of a {WHAT}")
    if found.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has format {short(found.get('format'), 40)}, written by GEMS "
            f"{short(found.get('gems'), 40)}, and this GEMS reads format {FORMAT}"
        )
    wrong = [name for name, kind in FIELDS.items() if type(found.get(name)) is not kind]
    if wrong or found["step"] < 0:
        raise CheckpointError(f"{path / NAME} is damaged: {', '.join(wrong) or 'step'} is wrong")
    size = found["file"].get("bytes")
    if not (path / WEIGHTS).is_file() or (path / WEIGHTS).stat().st_size != size:
        raise CheckpointError(f"{path / WEIGHTS} is missing, or has not {short(size, 40)} bytes")
    return found


def _checksum(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def plain(state: Sequence[np.ndarray]) -> list[Any]:
    """Small arrays as JSON has them: seeds and counters."""
    return [[x.dtype.name, x.tolist()] for x in state]


def arrays(found: list[Any]) -> list[np.ndarray]:
    """What `plain` was given."""
    try:
        return [np.array(values, dtype) for dtype, values in found]
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the seeds of a checkpoint are damaged: {error}") from error


def is_complete(path: Path) -> bool:
    """Whether all is there; the weights are not read."""
    try:
        _head(path)
        return True
    except (GemsError, OSError) as error:
        log.warning("skipping %s: %s", path, error)
        return False


def latest(folder: str | Path) -> Path | None:
    """The complete checkpoint in a folder that is furthest in training; None if there is none."""
    found = [path for path in _inside(Path(folder)) if is_complete(path)]
    return max(found, key=lambda path: (_head(path)["step"], path.name), default=None)


def remove_all(folder: Path) -> None:
    """Remove all checkpoints in a folder, also damaged ones, and nothing else."""
    for path in _inside(folder):
        _remove(path)


def remove_old(path: Path, keep: int) -> None:
    """Remove the oldest of the numbered ones like `path`, so that `keep` stay; 0 keeps all."""
    stem = re.sub(r"[0-9]+$", "", path.name)
    alike = [p for p in _inside(path.parent) if re.fullmatch(re.escape(stem) + "[0-9]+", p.name)]
    others = sorted((p for p in alike if p != path), key=lambda p: int(p.name[len(stem) :]))
    for old in others[: max(0, len(others) - keep + 1)] if keep else ():
        _remove(old)


def _remove(path: Path) -> None:
    """Only what `fill` wrote."""
    if strange := sorted({p.name for p in path.iterdir()} - {NAME, WEIGHTS}):
        log.warning("%s stays: it holds %s, which GEMS did not write", path, short(strange, 200))
    else:
        shutil.rmtree(path)


def _inside(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return [p for p in folder.iterdir() if p.name[:1] != "." and (p / NAME).is_file()]
