"""Frozen dataclasses to JSON and back, and files that are written whole or not at all.

Whatever is read may be damaged or forged: sizes, levels and numbers are bounded before they are
used, and what is wrong is a GemsError. Files are written with the permissions that the umask gives.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import stat
import textwrap
import types
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from gems.errors import GemsError, short

T = TypeVar("T")


def to_json(value: Any) -> str:
    """Readable JSON of a dataclass; `from_json` gives an equal value back."""
    return _spelled(_plain(value)) + "\n"


WIDE = 100


def _spelled(x: Any, indent: int = 0) -> str:
    """JSON in as few lines as fit: short things on one, lists of words filled up, one per field."""
    flat = json.dumps(x)
    if len(flat) + indent <= WIDE or not isinstance(x, (dict, list)):
        return flat
    pad = "\n" + " " * (indent + 1)
    if isinstance(x, dict):
        parts = [f"{json.dumps(k)}: {_spelled(v, indent + 1)}" for k, v in x.items()]
        return "{" + pad + ("," + pad).join(parts) + pad[:-1] + "}"
    if any(isinstance(v, (dict, list)) for v in x):
        parts = [_spelled(v, indent + 1) for v in x]
        return "[" + pad + ("," + pad).join(parts) + pad[:-1] + "]"
    words = textwrap.wrap(flat[1:-1], WIDE - indent - 1, break_long_words=False)
    return "[" + pad + pad.join(words) + pad[:-1] + "]"


def from_json(kind: type[T], text: str) -> T:
    """The value of dataclass `kind` that `to_json` wrote."""
    wrong = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
    try:
        return _build(kind, parse_json(text))
    except wrong as error:
        if isinstance(error, GemsError):
            raise
        why = short(error) if not isinstance(error, RecursionError) else "it is nested too deeply"
        raise GemsError(f"this is not the JSON of a {kind.__name__}: {why}") from error


DEEPEST = 100  # levels of brackets; Python's own functions recurse over them
LARGEST = 256 << 20  # bytes of a file of text


def parse_json(text: str | bytes) -> Any:
    """JSON as it is defined: no name twice in an object, and no more than DEEPEST levels."""
    try:
        value = json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError(f"it is nested more than {DEEPEST} levels deep") from None
    level: list[Any] = [value]
    for _ in range(DEEPEST):
        level = [y for x in level for y in _inside(x) if isinstance(y, (dict, list))]
        if not level:
            return value
    raise ValueError(f"it is nested more than {DEEPEST} levels deep")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object has the name {short(twice, 100)!r} twice")
    return found


def _inside(value: Any) -> Any:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def read_text(path: str | Path, most: int = LARGEST) -> str:
    """The text of a file, or a GemsError if it is none or has more than `most` bytes."""
    data = bytearray()
    with open(path, "rb") as file:
        while len(data) <= most and (block := file.read(1 << 20)):
            data += block
    if len(data) > most:
        raise GemsError(f"{path} has more than {most} bytes; such a file is much smaller")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise GemsError(
            f"{path} is not a text file (byte {error.start} is no UTF-8); give the file that was "
            "meant, or save it as UTF-8"
        ) from None


@contextmanager
def in_one_move(path: Path) -> Iterator[Path]:
    """A file to fill, then put at `path`: a reader sees the old one or the new, never half.

    If filling it fails, it is gone. If `path` is a link, the link is replaced, not what it leads
    to. The permissions are those that the umask gives.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() and not path.is_symlink():
        raise GemsError(f"{path} is a folder; give the name of a file")
    made = path.with_name(f".{path.name[:60]}.{os.urandom(6).hex()}")
    # With O_EXCL a link that somebody has put at this name is not followed.
    handle = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    mode = stat.S_IMODE(os.fstat(handle).st_mode)
    os.close(handle)
    try:
        yield made
        if stat.S_IMODE(made.stat().st_mode) != mode:  # some put a private file of theirs there
            made.chmod(mode)
        os.replace(made, path)
    except BaseException:
        made.unlink(missing_ok=True)
        raise


def write(path: str | Path, text: str) -> Path:
    """Put `text` at `path`, whole or not at all; a device or pipe gets it as it comes."""
    path, data = Path(path), text.encode("utf-8", "backslashreplace")
    if _is_stream(path):  # as root one would put a file in the place of /dev/null
        path.write_bytes(data)
        return path
    with in_one_move(path) as file:
        file.write_bytes(data)
    return path


def _is_stream(path: Path) -> bool:
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return path.absolute().parent == Path("/dev") or stat.S_ISCHR(mode) or stat.S_ISFIFO(mode)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {f.name: _plain(getattr(value, f.name)) for f in fields if f.init}
    if isinstance(value, (tuple, list)):
        return [_plain(v) for v in value]
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    return value


def _build(kind: Any, value: Any, at: str = "") -> Any:
    """`value`, as json gave it, as the annotated type `kind`. `at` is its place: `device.flops`."""
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _build_dataclass(kind, value, at)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple and not isinstance(value, list):
        raise ValueError(f"{at} is {_seen(value)}, not a list")
    if origin is tuple and arguments[-1:] == (Ellipsis,):
        return tuple(_build(arguments[0], v, f"{at}[{i}]") for i, v in enumerate(value))
    if origin is tuple:
        if len(arguments) != len(value):
            raise ValueError(f"{at} has {len(value)} items, not {len(arguments)}")
        pairs = enumerate(zip(arguments, value, strict=True))
        return tuple(_build(k, v, f"{at}[{i}]") for i, (k, v) in pairs)
    if origin is dict:
        if not isinstance(value, dict):
            raise ValueError(f"{at} is {_seen(value)}, not an object of names")
        return {arguments[0](k): _build(arguments[1], v, f"{at}.{k}") for k, v in value.items()}
    if origin in (typing.Union, types.UnionType):
        return _build_union(arguments, value, at)
    if kind in _SCALARS:
        return _scalar(kind, value, at)
    return value


def _build_dataclass(kind: type, value: Any, at: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{at or 'it'} is {_seen(value)}, not an object of fields")
    fields = {f.name: f for f in dataclasses.fields(kind) if f.init}
    found = [f"there is no field {_under(at, short(n, 100))}" for n in value if n not in fields]
    found += [f"{_under(at, f.name)} is missing" for f in fields.values() if _lacks(f, value)]
    if found:
        raise ValueError(f"{'; '.join(found)}; the fields are {', '.join(fields)}")
    hints = _hints(kind)
    given = {name: _build(hints[name], v, _under(at, name)) for name, v in value.items()}
    try:
        return kind(**given)
    except GemsError as error:
        raise type(error)(f"{at}: {error}" if at else str(error)) from error


def _under(at: str, name: str) -> str:
    return f"{at}.{name}" if at else name


def _lacks(field: dataclasses.Field[Any], value: dict[str, Any]) -> bool:
    missing = dataclasses.MISSING
    return field.name not in value and field.default is missing is field.default_factory


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


_SCALARS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def _seen(value: Any) -> str:
    """A value for a message, which may be as long as its file."""
    return short(repr(value), 100)


WIDEST = 2**63  # whole numbers that others can count with


def _scalar(kind: Any, value: Any, at: str) -> Any:
    """The number, text or truth itself. People write 16e9 for whole numbers, and 1 for 1.0."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if number and kind in (int, float) and not (-WIDEST < value < WIDEST or _is_float(kind, value)):
        raise ValueError(f"{at} is {_seen(value)}, which is no number that can be counted with")
    if kind is int and number and value == value // 1:
        return int(value)
    if number if kind is float else type(value) is kind:
        return value
    raise ValueError(f"{at} is {_seen(value)}, not {_SCALARS[kind]}")


def _is_float(kind: Any, value: float) -> bool:
    """A large one, as seconds and speeds may be."""
    return kind is float and isinstance(value, float) and math.isfinite(value)


def _build_union(kinds: tuple[Any, ...], value: Any, at: str) -> Any:
    """A list becomes the tuple type of the union, an object its dataclass, all else a scalar."""
    if isinstance(value, list):
        fitting = [k for k in kinds if typing.get_origin(k) is tuple]
    elif isinstance(value, dict):
        fitting = [k for k in kinds if dataclasses.is_dataclass(k)]
    elif value is None and type(None) in kinds:
        return None
    else:
        fitting = [k for k in kinds if k in _SCALARS]
    exact = [k for k in fitting if type(value) is k]
    if not fitting:
        raise ValueError(f"{at} is {_seen(value)}, which it cannot be")
    return _build((exact or fitting)[0], value, at)
