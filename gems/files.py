"""Frozen dataclasses to JSON and back, and files that are written whole or not at all."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import textwrap
import types
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from gems.errors import GemsError

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
    try:
        return _build(kind, json.loads(text))
    except (ValueError, TypeError, LookupError, AttributeError, StopIteration) as error:
        if isinstance(error, GemsError):
            raise
        raise GemsError(f"this is not the JSON of a {kind.__name__}: {error}") from error


@contextmanager
def in_one_move(path: Path) -> Iterator[Path]:
    """A file to fill, then put at `path`: a reader sees the old one or the new, never half.

    If filling it fails, it is gone.
    """
    import tempfile  # here, because it is half of what importing this room would take

    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        yield Path(name)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def write(path: str | Path, text: str) -> Path:
    """Put `text` at `path`, whole or not at all."""
    path = Path(path)
    with in_one_move(path) as file:
        file.write_text(text, encoding="utf-8")
    return path


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
    if origin is tuple and arguments[-1:] == (Ellipsis,):
        return tuple(_build(arguments[0], v, f"{at}[{i}]") for i, v in enumerate(value))
    if origin is tuple:
        pairs = enumerate(zip(arguments, value, strict=True))
        return tuple(_build(k, v, f"{at}[{i}]") for i, (k, v) in pairs)
    if origin is dict:
        return {arguments[0](k): _build(arguments[1], v, f"{at}.{k}") for k, v in value.items()}
    if origin in (typing.Union, types.UnionType):
        return _build_union(arguments, value, at)
    if kind in _SCALARS:
        return _scalar(kind, value, at)
    return value


def _build_dataclass(kind: type, value: Any, at: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{at or 'it'} is {value!r}, not an object of fields")
    fields = {f.name: f for f in dataclasses.fields(kind) if f.init}
    found = [f"there is no field {_under(at, name)}" for name in value if name not in fields]
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


def _scalar(kind: Any, value: Any, at: str) -> Any:
    """The number, text or truth itself. People write 16e9 for whole numbers, and 1 for 1.0."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is int and number and value == value // 1:
        return int(value)
    if number if kind is float else type(value) is kind:
        return value
    raise ValueError(f"{at} is {value!r}, not {_SCALARS[kind]}")


def _build_union(kinds: tuple[Any, ...], value: Any, at: str) -> Any:
    """A list becomes the tuple type of the union, an object its dataclass, all else stays."""
    if isinstance(value, list):
        return _build(next(k for k in kinds if typing.get_origin(k) is tuple), value, at)
    if isinstance(value, dict):
        return _build(next(k for k in kinds if dataclasses.is_dataclass(k)), value, at)
    if len(scalars := [k for k in kinds if k is not type(None)]) == 1 and value is not None:
        return _build(scalars[0], value, at)
    return value
