"""Frozen dataclasses to JSON and back, and files that are written whole or not at all."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

from gems.errors import GemsError

T = TypeVar("T")


def to_json(value: Any) -> str:
    """Readable JSON of a dataclass; `from_json` gives an equal value back."""
    return json.dumps(_plain(value), indent=1) + "\n"


def from_json(kind: type[T], text: str) -> T:
    """The value of dataclass `kind` that `to_json` wrote."""
    try:
        return _build(kind, json.loads(text))
    except (ValueError, TypeError, LookupError, AttributeError, StopIteration) as error:
        if isinstance(error, GemsError):
            raise
        raise GemsError(f"this is not the JSON of a {kind.__name__}: {error}") from error


def write(path: str | Path, text: str) -> Path:
    """Put `text` at `path` in one move: a reader sees the old file or the new one, never half."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
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


def _build(kind: Any, value: Any) -> Any:
    """`value`, as json gave it, as the annotated type `kind`."""
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = typing.get_type_hints(kind)
        return kind(**{name: _build(hints[name], v) for name, v in value.items()})
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple and arguments[-1:] == (Ellipsis,):
        return tuple(_build(arguments[0], v) for v in value)
    if origin is tuple:
        return tuple(_build(k, v) for k, v in zip(arguments, value, strict=True))
    if origin is dict:
        return {arguments[0](k): _build(arguments[1], v) for k, v in value.items()}
    if origin in (typing.Union, types.UnionType):
        return _build_union(arguments, value)
    return value


def _build_union(kinds: tuple[Any, ...], value: Any) -> Any:
    """A list becomes the tuple type of the union, an object its dataclass, all else stays."""
    if isinstance(value, list):
        return _build(next(k for k in kinds if typing.get_origin(k) is tuple), value)
    if isinstance(value, dict):
        return _build(next(k for k in kinds if dataclasses.is_dataclass(k)), value)
    return value
