"""The manifest of a checkpoint, which lists every tensor and every file with its checksum.

step-200/
  manifest.json   this; written last, and signed with its own checksum
  state.json      all that is not a tensor
  __0_0.distcp    tensors, one file per rank that wrote any (torch.distributed.checkpoint)
  .metadata       the same index for DCP's own tools; a pickle, which GEMS never opens
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from gems.errors import CheckpointError, problems, short
from gems.files import LARGEST, parse_json
from gems.torch.checkpoint.atomic_folder import OWN, foreign, remove
from gems.transport.encoding import sendable

log = logging.getLogger(__name__)
FORMAT = 1
WHAT = "GEMS checkpoint"
NAME, STATE = "manifest.json", "state.json"
REMEDY = "take another checkpoint (gems.latest(folder) finds the newest complete one)"


@dataclass(frozen=True)
class TensorEntry:
    """A tensor's shape and type, and where its bytes are."""

    shape: tuple[int, ...]
    dtype: str
    file: str
    offset: int
    bytes: int


@dataclass(frozen=True)
class File:
    bytes: int
    sha256: str


sendable(File)


@dataclass(frozen=True)
class Manifest:
    """`plan` is the JSON of the gems.Plan that it was saved under; it may be loaded under any."""

    what: str
    format: int
    gems: str
    step: int
    plan: dict[str, Any]
    tensors: dict[str, TensorEntry]
    files: dict[str, File]

    def section(self, name: str) -> dict[str, TensorEntry]:
        """The tensors whose keys start with `name.`, without it."""
        start = f"{name}."
        return {k[len(start) :]: p for k, p in self.tensors.items() if k.startswith(start)}


def text(manifest: Manifest) -> str:
    """Its JSON, with a checksum of all the rest inside; a change of any byte is found."""
    plain = asdict(manifest)
    return json.dumps({"sha256": _signature(plain), **plain}, indent=1)


def _signature(plain: dict[str, Any]) -> str:
    whole = json.dumps({k: v for k, v in plain.items() if k != "sha256"}, sort_keys=True)
    return hashlib.sha256(whole.encode()).hexdigest()


def read(path: Path) -> Manifest:
    """The manifest of a checkpoint, whose own checksum fits. Its files may yet be damaged."""
    if not path.is_dir():
        raise CheckpointError(
            f"there is no checkpoint {path}{'' if path.exists() else ', nor anything else'}; "
            f"{REMEDY}"
        )
    if not (path / NAME).is_file():
        raise CheckpointError(
            f"{path} has no {NAME}, so it is not a GEMS checkpoint, or not a whole one; {REMEDY}, "
            "or read plain weights with gems.read_weights"
        )
    return _checked(read_json(path / NAME), path)


def read_json(path: Path) -> Any:
    """The JSON of one of a checkpoint's files, which is no link to elsewhere."""
    if path.is_symlink():
        raise CheckpointError(f"{path} is a link; {REMEDY}, or copy the files themselves")
    try:
        if not path.is_file():
            raise ValueError("it is not a file")
        if path.stat().st_size > LARGEST:
            raise ValueError(f"it has more than {LARGEST} bytes")
        return parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} is damaged or not JSON ({short(error, 200)}); {REMEDY}"
        ) from error


def _checked(plain: Any, path: Path) -> Manifest:
    if not isinstance(plain, dict) or plain.get("what") != WHAT:
        raise CheckpointError(f"{path / NAME} is not the manifest of a {WHAT}; {REMEDY}")
    if isinstance(number := plain.get("format"), int) and number > FORMAT:
        writer = short(plain.get("gems"), 60)
        raise CheckpointError(
            f"{path} has format {number}, written by GEMS {writer}, and this GEMS reads up to "
            f"format {FORMAT}; install GEMS {writer} or later"
        )
    if plain.pop("sha256", None) != _signature(plain):
        raise CheckpointError(f"{path / NAME} is damaged: its checksum does not fit; {REMEDY}")
    try:
        # Thousands of tensors: not by from_json, which looks at every field's type each time.
        entries = {
            key: TensorEntry(tuple(x.pop("shape")), **x) for key, x in plain["tensors"].items()
        }
        files = {name: File(**x) for name, x in plain["files"].items()}
        found = Manifest(**{**plain, "tensors": entries, "files": files})
        wrong = [*_wrong_fields(found), *_wrong_entries(found)]
        strange = [name for name in files if not OWN.fullmatch(name) or name == NAME]
        wrong += [] if STATE in files else [f"it lists no {STATE}"]
        strange += [key for key, entry in entries.items() if entry.file not in files]
    except (LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path / NAME} is not a manifest: {short(error, 200)}; {REMEDY}"
        ) from error
    if strange:
        listed = short([short(name, 60) for name in strange[:5]])
        raise CheckpointError(
            f"{path / NAME} names what is not inside the checkpoint: {listed}; {REMEDY}"
        )
    if wrong := wrong or list(_overlapping(found)):
        raise CheckpointError(problems(f"{path / NAME} cannot be true; {REMEDY}:", wrong))
    return found


MOST = 2**63
DTYPES = {str(x).removeprefix("torch."): x for x in vars(torch).values() if type(x) is torch.dtype}


def _is_count(x: object) -> bool:
    return type(x) is int and 0 <= x < MOST


def _wrong_fields(found: Manifest) -> Iterator[str]:
    for name, kind in (("gems", str), ("plan", dict)):
        if not isinstance(getattr(found, name), kind):
            yield f"{name} is {short(repr(getattr(found, name)), 60)}"
    for name in ("format", "step"):
        if not _is_count(getattr(found, name)):
            yield f"{name} is {short(repr(getattr(found, name)), 60)}"
    for name, file in found.files.items():
        if not _is_count(file.bytes) or not isinstance(file.sha256, str):
            yield f"the size or checksum of {short(name, 60)} is none"


def _wrong_entries(found: Manifest) -> Iterator[str]:
    """Tensors that do not fit into their bytes: no more is allocated than files have."""
    for key, entry in found.tensors.items():
        counts = (*entry.shape, entry.offset, entry.bytes)
        if not all(map(_is_count, counts)) or not isinstance(entry.dtype, str):
            yield f"{short(key, 80)} has the shape, type, offset or bytes {short(entry, 200)}"
            continue
        size = DTYPES[entry.dtype].itemsize if entry.dtype in DTYPES else 1
        if math.prod(entry.shape) * size > entry.bytes or len(entry.shape) > 64:
            yield f"{short(key, 80)} is {short(entry.shape, 60)} in {entry.bytes} bytes"
        file = found.files.get(entry.file)
        if file is not None and entry.offset + entry.bytes > file.bytes:
            yield (
                f"{short(key, 80)} ends at byte {entry.offset + entry.bytes} of {entry.file}, "
                f"which has {file.bytes}"
            )


def _overlapping(found: Manifest) -> Iterator[str]:
    """Tensors that share bytes; only the names of a tied weight may, all of them."""
    ordered = sorted(found.tensors.items(), key=lambda item: (item[1].file, item[1].offset))
    for (one, a), (other, b) in pairwise(ordered):
        tied = a == b and one.startswith("model.") and other.startswith("model.")
        if a.file == b.file and b.offset < a.offset + a.bytes and not tied:
            yield f"{short(one, 80)} and {short(other, 80)} overlap in {a.file}"


def measured(path: Path) -> File:
    """Size and checksum of a file as it is."""
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
        return File(file.tell(), digest.hexdigest())


def verify(path: Path, manifest: Manifest, names: Iterable[str] | None = None) -> None:
    """Read these files, or all, and raise if they are not what was written."""
    found = []
    for name in manifest.files if names is None else names:
        expected = manifest.files[name]
        if (path / name).is_symlink():
            found.append(f"{name} is a link")
        elif not (path / name).is_file():
            found.append(f"{name} is missing")
        elif (here := (path / name).stat().st_size) != expected.bytes:
            found.append(f"{name} has {here} bytes, {expected.bytes} were written")
        elif measured(path / name) != expected:
            found.append(f"{name} has another checksum than when it was written")
    if found:
        raise CheckpointError(problems(f"the checkpoint {path} is damaged; {REMEDY}:", found))


def is_complete(path: Path) -> bool:
    """Whether the manifest is whole and all files are there with their sizes; nothing is read."""
    try:
        manifest = read(path)
        return all((path / n).stat().st_size == f.bytes for n, f in manifest.files.items())
    except (CheckpointError, OSError) as error:
        log.warning("skipping %s: %s", path, error)
        return False


def latest(folder: str | Path) -> Path | None:
    """The complete checkpoint in a folder that is furthest in training; None if there is none."""
    found = [path for path in _inside(Path(folder)) if is_complete(path)]
    return max(found, key=lambda path: (read(path).step, number(path.name)), default=None)


def remove_all(folder: Path) -> None:
    """Remove all checkpoints in a folder, also damaged ones, and nothing else."""
    for path in _inside(folder):
        _remove(path)


def remove_old(path: Path, keep: int) -> None:
    """Remove the oldest of the numbered ones like `path`, so that `keep` stay."""
    for old in beyond(path, keep):
        log.info("removing %s; %s are kept", old, keep)
        _remove(old)


def _remove(path: Path) -> None:
    if strange := foreign(path):
        log.warning("%s stays: it holds %s, which GEMS did not write", path, short(strange, 200))
    else:
        remove(path)


def beyond(path: Path, keep: int) -> list[Path]:
    """The oldest complete ones among `step-100`, `step-200`, ..., so that `keep` stay, always with
    the one at `path`."""
    start = stem(path.name)
    others = [
        other
        for other in _inside(path.parent)
        if other != path and stem(other.name) == start and number(other.name) >= 0
    ]
    ordered = sorted(filter(is_complete, others), key=lambda other: number(other.name))
    return ordered[: max(0, len(ordered) - (keep - 1))]


def _inside(folder: Path) -> Sequence[Path]:
    """Folders with a manifest, except temporary ones."""
    if not folder.is_dir():
        return []
    here = [path for path in folder.iterdir() if ".tmp-" not in path.name]
    return [path for path in here if (path / NAME).is_file()]


def stem(name: str) -> str:
    return re.sub(r"[0-9]+$", "", name)


def number(name: str) -> int:
    """100 for `step-100`; -1 for a name that does not end in a number."""
    digits = name[len(stem(name)) :]
    return int(digits) if digits and len(digits) < 100 else -1
