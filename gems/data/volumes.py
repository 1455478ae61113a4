"""Volumes in HDF5 and Zarr: each rank reads only its own part of the array."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gems.data.extras import extra
from gems.data.labels import numbered, read_table
from gems.data.source import Box, Image, Target, Task, spans
from gems.errors import GemsError, problems, short

HDF5 = {".h5", ".hdf5", ".hdf"}
CODECS = ("zarr.json", ".zarray", ".zmetadata", ".zgroup")  # where Zarr keeps the codecs of arrays
LARGEST = 64 << 20  # characters of such a file
MOST_CELLS = 2**45  # of one sample
MOST_LABELS = 10**8
MOST_NUMBERS = 4096  # that a sample may have to regress


class Volumes:
    """Volumes (or pictures, with `dims=2`) out of arrays.

    path       an HDF5 file or Zarr group whose array `images` has the samples along its first dim,
               or a folder of such files with one sample each
    images     name of the array: (samples,) (channels,) depth, height, width
    labels     name of an array (or of an attribute) with a whole number per sample, or a CSV file
               `volume,label` for a folder
    masks      name of an array of class numbers shaped like the images, without channels
    targets    name of an array (or of an attribute) with the numbers to regress: (samples, numbers)
    names      of the classes in order; else labels sorted. Needed with masks. Of the numbers
    mean, deviation   what to subtract, and then to divide by

    Files are opened by each thread for itself, when it first reads.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        images: str = "images",
        labels: str | Path | None = None,
        masks: str | None = None,
        targets: str | None = None,
        names: Sequence[str] | None = None,
        dims: int = 3,
        mean: float = 0.0,
        deviation: float = 1.0,
    ) -> None:
        if sum(what is not None for what in (labels, masks, targets)) != 1:
            raise ValueError(
                f"give one of labels ({labels!r}), masks ({masks!r}) and targets ({targets!r})"
            )
        if masks is not None and names is None:
            raise ValueError("with masks, give the names of the classes")
        if deviation <= 0 or dims < 1:
            raise ValueError(f"deviation {deviation} must be above 0, and dims {dims} 1 or more")
        self.path, self._images, self._masks = Path(path).absolute(), images, masks
        self.dims, self.mean, self.deviation = dims, mean, deviation
        self.task: Task = "segment" if masks else "regress" if targets else "classify"
        self._files = _files(self.path)
        self._many = self._files[0] == self.path  # one file of many samples
        self._local = threading.local()
        self.shape, self._count = self._measure()
        self._labels = np.empty(0, np.int64)
        known = None if names is None else tuple(names)
        if labels is not None:
            found = self._label_names(labels)
            self.names = numbered(found, known)
            self._labels = np.array([self.names.index(x) for x in found], np.int64)
        elif targets is not None:
            self._numbers = self._read_numbers(targets)
            count = self._numbers.shape[1]
            self.names = known or tuple(f"number {i}" for i in range(count))
            if len(self.names) != count:
                raise GemsError(f"{targets} has {count} numbers per sample, names {self.names}")
        else:
            self.names = known or ()
        self.classes = len(self.names)

    def __len__(self) -> int:
        return self._count

    def read(self, index: int, box: Box) -> Image:
        array = self._array(index, self._images)
        part = self._part(array, index, box)
        if part.ndim == self.dims:
            part = part[None]
        image = part.astype(np.float32)
        image -= np.float32(self.mean)
        image /= np.float32(self.deviation)
        return image

    def target(self, index: int, box: Box) -> Target:
        if self.task == "regress":
            return np.array(self._numbers[index])
        if self._masks is None:
            return np.array(self._labels[index])
        mask = self._part(self._array(index, self._masks), index, box).astype(np.int64)
        if mask.size and not 0 <= mask.min() <= mask.max() < self.classes:
            raise GemsError(
                f"{self._masks} of sample {index} of {self.path} has classes {mask.min()} to "
                f"{mask.max()}, but there are {self.classes}: 0 to {self.classes - 1}"
            )
        return mask

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "_local"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _local=threading.local())

    def _part(self, array: Any, index: int, box: Box) -> npt.NDArray[Any]:
        sides = array.shape[array.ndim - self.dims :]
        place = tuple(slice(a, b) for a, b in spans(box, sides))
        sample = (index,) if self._many else ()
        channels = (slice(None),) * (array.ndim - self.dims - len(sample))
        with _readable(self.path):
            return np.asarray(array[(*sample, *channels, *place)])

    def _array(self, index: int, name: str) -> Any:
        file = self._files[0 if self._many else index]
        opened = self._local.__dict__.setdefault("opened", {})
        if (file, name) not in opened:
            if len(opened) > 64:
                opened.clear()
            opened[file, name] = _array(file, name)
        return opened[file, name]

    def _measure(self) -> tuple[tuple[int, ...], int]:
        """The shape of a sample, and how many there are; or all that does not fit."""
        shapes = {f: tuple(_array(f, self._images).shape) for f in self._files}
        found = []
        first = shapes[self._files[0]]
        if len(first) - self._many not in (self.dims, self.dims + 1):
            found.append(f"{self._images} is {first}: {self.dims} dims and perhaps channels wanted")
        found += [f"{f} is {s}, others {first}" for f, s in shapes.items() if s != first]
        sample = first[1:] if self._many else first
        if not found and 0 in first:
            found.append(f"{self._images} is {first}: there is nothing in it")
        if self._masks is not None:
            wanted = (*first[: self._many], *sample[-self.dims :])
            for file in self._files:
                if (got := tuple(_array(file, self._masks).shape)) != wanted:
                    found.append(f"{self._masks} of {file} is {got}, not {wanted}")
        if found:
            raise GemsError(problems(f"the volumes of {self.path} do not fit", found[:20]))
        shape = sample if len(sample) == self.dims + 1 else (1, *sample)
        return shape, first[0] if self._many else len(self._files)

    def _label_names(self, labels: str | Path) -> list[str]:
        """The label of each sample, from an array, an attribute or a table."""
        if str(labels).endswith(".csv"):
            if self._many:
                raise GemsError(f"{labels} labels files, but {self.path} is one of many samples")
            table = read_table(labels)
            found = [table.of(f) for f in self._files]
            if lost := [str(f) for f, s in zip(self._files, found, strict=True) if s is None]:
                raise GemsError(problems(f"{labels} has no label for", lost[:20]))
            return [str(s) for s in found]
        most = self._count if self._many else 1
        values = [np.ravel(_values(f, str(labels), most)) for f in self._files]
        found = np.concatenate(values)
        if len(found) != self._count or found.dtype.kind not in "iub":
            raise GemsError(
                f"{labels} of {self.path} has {len(found)} values of {found.dtype}; it takes "
                f"{self._count} whole numbers"
            )
        return [str(int(x)) for x in found]

    def _read_numbers(self, targets: str) -> npt.NDArray[np.float32]:
        """One row per sample, out of one array or one of each file."""
        most = MOST_NUMBERS * (self._count if self._many else 1)
        rows = [_values(f, targets, most) for f in self._files]
        shapes = {np.shape(row) for row in rows}
        found = np.asarray(rows[0]) if self._many or len(shapes) > 1 else np.stack(rows)
        found = found.reshape(len(found), -1) if found.ndim else found.reshape(1, 1)
        whole = found.dtype.kind in "iuf" and bool(np.isfinite(found).all())
        if len(shapes) > 1 or len(found) != self._count or not found.size or not whole:
            raise GemsError(
                f"{targets} of {self.path} has shape {sorted(shapes)[:3]} of {found.dtype}; it "
                f"takes finite numbers, as many for each of the {self._count} samples"
            )
        return found.astype(np.float32)


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise GemsError(f"{path} does not exist")
    if path.is_file() or _is_zarr(path):
        return [path]
    found = sorted(p for p in path.iterdir() if p.suffix.lower() in HDF5 or _is_zarr(p))
    if not found:
        raise GemsError(f"there are no volumes (.h5, .zarr) in {path}")
    return found


def _is_zarr(path: Path) -> bool:
    return any((path / name).exists() for name in ("zarr.json", ".zgroup", ".zarray"))


def _group(path: Path) -> Any:
    """An open HDF5 file or Zarr group."""
    with _readable(path):
        if path.is_dir():
            _check_codecs(path)
            return extra("zarr").open_group(str(path), mode="r")
        return extra("h5py").File(path, "r")


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """The libraries report damage by errors of many kinds."""
    try:
        yield
    except (GemsError, AssertionError):
        raise
    except MemoryError as error:
        raise GemsError(
            f"{path}: a box of its arrays does not fit into memory ({error}); take smaller samples"
        ) from error
    except Exception as error:
        why = f"{type(error).__name__}: {short(error, 300)}"
        raise GemsError(f"{path} cannot be read as HDF5 or Zarr: {why}") from error


def _array(path: Path, name: str) -> Any:
    with _readable(path):
        group = _group(path)
        _check_codecs(path / name)
        if name not in group:
            raise GemsError(f"{path} has no array {name!r}, but {', '.join(group) or 'none'}")
        return _checked(group[name], path, name)


def _checked(array: Any, path: Path, name: str) -> Any:
    """An array of numbers, inside of its own file, of a size that can be."""
    if not hasattr(array, "dtype") or np.dtype(array.dtype).kind not in "biuf":
        raise GemsError(f"{name!r} of {path} is no array of numbers")
    if getattr(array, "external", None):
        raise GemsError(
            f"{name!r} of {path} takes its bytes from other files ({array.external[0][0]}), which "
            "may be any; copy them into it"
        )
    if math.prod(array.shape[1:]) > MOST_CELLS or not all(n < MOST_CELLS for n in array.shape):
        raise GemsError(f"{name!r} of {path} is {tuple(array.shape)}: no such array can be read")
    return array


def _check_codecs(folder: Path) -> None:
    """Some codecs of Zarr run what they decode, in older releases: reading data must not."""
    for file in (name for name in CODECS if (folder / name).is_file()):
        text = (folder / file).read_text(encoding="utf-8", errors="replace")
        if len(text) > LARGEST or "pickle" in json.dumps(json.loads(text)).lower():
            raise GemsError(f"{folder / file} wants a pickle decoded, which could run any code")


def _values(path: Path, name: str, count: int) -> npt.NDArray[Any]:
    """The labels, if there are as many as samples."""
    with _readable(path):
        group = _group(path)
        _check_codecs(path / name)
        if name in group:
            array = _array(path, name)
            if array.size > max(count, 1):
                raise GemsError(f"{name} of {path} has {array.size} values; it takes {count}")
            if array.size > MOST_LABELS:
                raise GemsError(f"{path} has {array.size} samples; take {MOST_LABELS} at most")
            return np.asarray(array[...])
        if name in group.attrs:
            return np.asarray(group.attrs[name])
    raise GemsError(f"{path} has neither an array nor an attribute {name!r} for its labels")
