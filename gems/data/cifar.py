"""CIFAR-10, from the files that Krizhevsky published: for Python or binary, unpacked or not."""

from __future__ import annotations

import io
import lzma
import pickle
import tarfile
import zlib
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from gems.data.pixels import Normal
from gems.data.resample import inside, resample, taps
from gems.data.source import Box, Image, Target, Task, spans
from gems.errors import GemsError, short

NAMES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
SIDE = 32
LARGEST, MEMBERS = 40_000_000, 30  # bytes of a file, and files of an archive
RECORD = 3 * SIDE * SIDE
TRAIN, TEST = tuple(f"data_batch_{i}" for i in range(1, 6)), ("test_batch",)
NORMAL = Normal((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))  # of the training set
Rows = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]


class Cifar10:
    """50,000 pictures to train on, or 10,000 to test on (`train=False`).

    `path` is the folder with `data_batch_1` (or `data_batch_1.bin`) and so on, one above it, or the
    `.tar.gz` as it was downloaded. Pictures of another `image_size` than 32 are resampled.
    """

    task: Task = "classify"
    names = NAMES
    classes = len(NAMES)

    def __init__(self, path: str | Path, train: bool = True, image_size: int = SIDE) -> None:
        if image_size < 1:
            raise ValueError(f"image_size is {image_size}; take 1 or more")
        self.path, self.image_size = Path(path), image_size
        self.shape = (3, image_size, image_size)
        parts = [_rows(*found) for found in _files(self.path, TRAIN if train else TEST)]
        self._pixels = np.concatenate([pixels for pixels, _ in parts])
        self._labels = np.concatenate([labels for _, labels in parts])

    def __len__(self) -> int:
        return len(self._labels)

    def read(self, index: int, box: Box) -> Image:
        rows, columns = spans(box, self.shape[1:])
        picture = self._pixels[index].transpose(1, 2, 0)
        if self.image_size == SIDE:
            return NORMAL.image(picture[slice(*rows), slice(*columns)])
        if rows[0] == rows[1] or columns[0] == columns[1]:
            return np.empty((3, rows[1] - rows[0], columns[1] - columns[0]), np.float32)
        step = SIDE / self.image_size
        return NORMAL.image(resample(inside(picture), taps(0, step, rows), taps(0, step, columns)))

    def target(self, index: int, box: Box) -> Target:
        return np.array(self._labels[index])


def _files(path: Path, names: tuple[str, ...]) -> list[tuple[str, bytes]]:
    """The name and content of each file, from a folder or an archive: unpacked in memory only."""
    if path.is_dir():
        found = {p.name: p for p in (*path.glob("*/*_batch*"), *path.glob("*_batch*"))}
        return [(name, _content(found[name])) for name in _chosen(path, set(found), names)]
    try:
        with tarfile.open(path) as archive:
            members = _members(archive, path)
            found = []
            for name in _chosen(path, set(members), names):
                file = archive.extractfile(members[name])
                assert file is not None
                found.append((name, file.read()))
            return found
    except (OSError, tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, ValueError) as error:
        raise GemsError(
            f"{path} is neither the folder nor the archive of CIFAR-10: {error}"
        ) from error


def _members(archive: tarfile.TarFile, path: Path) -> dict[str, tarfile.TarInfo]:
    """The files by name; the published archives have 8 of 31 MB. One of a few kilobytes may unpack
    to as many gigabytes, so what is too large is not even passed over."""
    found: dict[str, tarfile.TarInfo] = {}
    while (member := archive.next()) is not None:
        if member.size > LARGEST or len(found) > MEMBERS:
            raise GemsError(f"{path} is not the archive of CIFAR-10: it has much larger files")
        if member.isfile():
            found[Path(member.name).name] = member
    return found


def _content(path: Path) -> bytes:
    with path.open("rb") as file:
        content = file.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise GemsError(f"{path} is not a file of CIFAR-10: it has more than {LARGEST} bytes")
    return content


def _chosen(path: Path, there: set[str], names: tuple[str, ...]) -> list[str]:
    for ending in ("", ".bin"):
        if f"{names[0]}{ending}" in there:
            wanted = [f"{name}{ending}" for name in names]
            if lost := sorted(set(wanted) - there):
                raise GemsError(f"{path} lacks {', '.join(lost)}; unpack the archive again")
            return wanted
    raise GemsError(
        f"{path} has no {names[0]} or {names[0]}.bin; give the folder cifar-10-batches-py or "
        "cifar-10-batches-bin, or the archive of it"
    )


def _rows(name: str, content: bytes) -> Rows:
    pixels, labels = _binary(name, content) if name.endswith(".bin") else _python(name, content)
    if not len(labels) or not 0 <= labels.min() <= labels.max() < len(NAMES):
        raise GemsError(f"{name} has labels outside of 0 to 9, or none; it is damaged")
    return pixels.reshape(-1, 3, SIDE, SIDE), labels


def _binary(name: str, content: bytes) -> Rows:
    """Records of a label and the red, green and blue of a picture, row by row."""
    if not content or len(content) % (1 + RECORD):
        raise GemsError(
            f"{name} has {len(content)} bytes, not a multiple of {1 + RECORD}; it is damaged"
        )
    rows = np.frombuffer(content, np.uint8).reshape(-1, 1 + RECORD)
    return rows[:, 1:], rows[:, 0].astype(np.int64)


def _python(name: str, content: bytes) -> Rows:
    """A pickled dict with `data` and `labels`; the keys are bytes where Python 2 wrote it."""
    try:
        found = _Plain(io.BytesIO(content), encoding="bytes").load()
    except GemsError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise GemsError(f"{name} cannot be read: {short(error, 200)}; it is damaged") from error
    if not isinstance(found, dict):
        raise GemsError(f"{name} holds a {type(found).__name__}, not the dict of CIFAR-10")
    found = {k.decode("latin1") if isinstance(k, bytes) else k: v for k, v in found.items()}
    data, labels = getattr(found.get("data"), "pixels", None), found.get("labels")
    if not isinstance(data, np.ndarray) or data.shape[1:] != (RECORD,):
        raise GemsError(f"{name} has no `data` of {RECORD} bytes per picture")
    if not isinstance(labels, list) or len(labels) != len(data):
        raise GemsError(f"{name} has no list of {len(data)} `labels`")
    if not all(isinstance(label, int) and 0 <= label < len(NAMES) for label in labels):
        raise GemsError(f"{name} has labels outside of 0 to 9; it is damaged")
    return data, np.array(labels, np.int64)


# A pickle calls functions by name. Those of an array's pickle would make any array of any memory
# (numpy.ndarray can be found that some bytes are pointers to objects), so these take their places.


class _Array:
    """The array that the file describes: bytes in rows, and nothing else."""

    def __setstate__(self, state: Any) -> None:
        _, shape, _, _, content = state
        if isinstance(content, str):
            content = content.encode("latin1")
        self.pixels = np.frombuffer(content, np.uint8).reshape(shape)


class _Type:
    """The type of such an array, which can only be bytes."""

    def __setstate__(self, state: Any) -> None:
        pass


def _reconstruct(kind: Any, shape: Any, letter: Any) -> _Array:
    if kind is not _Array:
        raise GemsError("the file makes something else than an array; it is not the published file")
    return _Array()


def _dtype(name: Any, *_: Any) -> _Type:
    if name not in ("u1", b"u1", "|u1"):
        raise GemsError(f"the file has an array of {name!r}; the published one has bytes")
    return _Type()


def _encode(text: str, encoding: str) -> bytes:
    """Bytes, as Python 3 writes them for Python 2."""
    if encoding != "latin1":
        raise GemsError(f"the file holds bytes as {encoding}; it is not the published file")
    return text.encode("latin1")


def _frombuffer(content: Any, dtype: Any, shape: Any, order: Any = "C") -> _Array:
    """As numpy writes an array with protocol 5."""
    found = _Array()
    found.__setstate__((1, shape, dtype, False, bytes(content)))
    return found


class _Plain(pickle.Unpickler):
    """Makes arrays and plain values, and rejects everything else that a pickle could run."""

    ALLOWED: ClassVar[dict[tuple[str, str], Any]] = {
        ("numpy", "ndarray"): _Array,
        ("numpy", "dtype"): _dtype,
        ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
        ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
        ("numpy.core.numeric", "_frombuffer"): _frombuffer,
        ("numpy._core.numeric", "_frombuffer"): _frombuffer,
        ("_codecs", "encode"): _encode,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.ALLOWED:
            raise GemsError(
                f"the file asks for {module}.{name}, which CIFAR-10 does not need: it is not the "
                "published file, and was not run"
            )
        return self.ALLOWED[module, name]
