"""What ranks tell each other, as bytes that cannot run anything: JSON, with tensors beside it.

    8 bytes: length of the JSON │ JSON │ bytes of tensors, arrays and texts of bytes, one by one

Numbers, texts, None, lists and dicts are themselves. Everything else is an object with one key that
starts with `$`; `{"$tensor": ["float32", [2, 3], 0]}` is a tensor whose bytes start at 0. Objects
of a class are made only of the classes that were registered by `sendable`, each by its own
constructor. Nothing received is unpickled: whoever gets hold of a connection can send wrong values
(as a wrong rank could), but no code.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np

from gems.errors import GemsError, PeerError
from gems.model.costs import Cost, Costs, Edge
from gems.predict.timeline import Event, Memory, Timeline

if TYPE_CHECKING:
    import torch

MOST = 1 << 30  # bytes that one rank may tell in one call
HEADER = 8
PLAIN = (bool, int, float, str, type(None))
ARRAYS = "biufc"  # kinds of numbers
REMEDY = "make it of numbers, texts, lists, dicts, tensors and arrays"

_CLASSES: dict[str, type] = {}


def _torch() -> Any:
    """PyTorch, if this process has loaded it: else no value is a tensor, and none is received."""
    return sys.modules.get("torch")


def _torch_kinds() -> tuple[type, ...]:
    loaded = _torch()
    return (loaded.dtype, loaded.layout, loaded.memory_format) if loaded else ()


class Malformed(ValueError):
    """Bytes that no `pack` has written."""


def sendable(*classes: type) -> None:
    """Let dataclasses and enumerations be told to other ranks. All ranks must have called this."""
    for kind in classes:
        assert dataclasses.is_dataclass(kind) or issubclass(kind, Enum), kind
        _CLASSES[_name(kind)] = kind


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


# --- to bytes -------------------------------------------------------------------------------------


def pack(value: Any) -> bytes:
    """`value` as bytes. One that has no form, or is too large, becomes the error that `unpack`
    raises, so that it is raised on all ranks, and none waits for the one that had it."""
    parts: list[bytes] = []
    try:
        text = json.dumps(_encode(value, "it", _Blob(parts)), separators=(",", ":")).encode()
        size = HEADER + len(text) + sum(map(len, parts))
        if size <= MOST:
            return b"".join((len(text).to_bytes(HEADER, "little"), text, *parts))
        why = f"what a rank tells the others takes {size} bytes; {MOST} are the most"
    except GemsError as error:
        why = str(error)
    except (RecursionError, ValueError, TypeError) as error:
        why = f"what a rank tells the others cannot be sent ({error}); {REMEDY}"
    text = json.dumps({"$unsendable": why}).encode()
    return len(text).to_bytes(HEADER, "little") + text


class _Blob:
    """The bytes beside the JSON, so far."""

    def __init__(self, parts: list[bytes]) -> None:
        self.parts, self.end = parts, 0

    def add(self, part: bytes) -> int:
        start, self.end = self.end, self.end + len(part)
        self.parts.append(part)
        return start


def _encode(value: Any, at: str, blob: _Blob) -> Any:
    kind = type(value)
    if kind in PLAIN:
        return value
    loaded = _torch()
    if loaded and isinstance(value, loaded.Tensor):
        return {"$tensor": _tensor(value, at, blob)}
    if isinstance(value, np.generic):
        return _encode(value.item(), at, blob)
    if isinstance(value, np.ndarray):
        return {"$array": _array(value, at, blob)}
    if isinstance(value, _torch_kinds()):
        return {"$torch": str(value).removeprefix("torch.")}
    if isinstance(value, bytes):
        return {"$bytes": [blob.add(value), len(value)]}
    if _CLASSES.get(_name(kind)) is kind:
        return _encode_object(value, at, blob)
    if isinstance(value, Mapping):
        return _encode_mapping(value, at, blob)
    if loaded and kind is loaded.Size:
        return {"$size": list(value)}
    for tag, kinds in SEQUENCES.items():
        if kind in kinds:
            items = [_encode(x, f"{at}[{i}]", blob) for i, x in enumerate(value)]
            return items if tag == "$list" else {tag: items}
    raise GemsError(
        f"{at} is a {_name(kind)}, which ranks cannot tell each other, because making it again "
        f"would mean running code that was received; {REMEDY}"
    )


def _encode_object(value: Any, at: str, blob: _Blob) -> Any:
    name = _name(type(value))
    if isinstance(value, Enum):
        return {"$enum": [name, value.name]}
    fields = [f.name for f in dataclasses.fields(value) if f.init]
    return {"$data": [name, *(_encode(getattr(value, f), f"{at}.{f}", blob) for f in fields)]}


def _encode_mapping(value: Mapping[Any, Any], at: str, blob: _Blob) -> Any:
    named = all(type(key) is str and not key.startswith("$") for key in value)
    if named and not isinstance(value, Counter):
        return {key: _encode(x, f"{at}[{key!r}]", blob) for key, x in value.items()}
    pairs = [
        [_encode(key, f"a key of {at}", blob), _encode(x, f"{at}[{key!r}]", blob)]
        for key, x in value.items()
    ]
    return {"$counter" if isinstance(value, Counter) else "$pairs": pairs}


def _array(array: np.ndarray[Any, Any], at: str, blob: _Blob) -> list[Any]:
    if array.dtype.kind not in ARRAYS or not array.dtype.isnative:
        raise GemsError(f"{at} is an array of {array.dtype}, and ranks tell each other numbers")
    return [array.dtype.name, list(array.shape), blob.add(array.tobytes())]


def _tensor(tensor: torch.Tensor, at: str, blob: _Blob) -> list[Any]:
    torch = _torch()
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        raise GemsError(
            f"{at} is a {tensor.layout} tensor on {tensor.device}, and ranks tell each other dense "
            "ones; make it dense"
        )
    own = tensor.detach().cpu().contiguous()
    shape = list(own.shape)
    flat = own.as_strided((own.numel(),), (1,))  # a single number may have any strides
    start = blob.add(flat.view(torch.uint8).numpy().tobytes() if own.numel() else b"")
    return [str(own.dtype).removeprefix("torch."), shape, start]


# --- from bytes -----------------------------------------------------------------------------------


def unpack(data: bytes | memoryview) -> Any:
    """The value that `pack` was given. Raises Malformed for anything else."""
    data = memoryview(data)
    length = int.from_bytes(data[:HEADER], "little")
    if len(data) < HEADER or length > len(data) - HEADER:
        raise Malformed(f"{len(data)} bytes with a header that announces {length}")
    try:
        told = json.loads(bytes(data[HEADER : HEADER + length]))
        if isinstance(told, dict) and set(told) == {"$unsendable"}:
            raise GemsError(str(told["$unsendable"]))
        return _decode(told, _Received(data[HEADER + length :]))
    except (GemsError, Malformed):
        raise
    except Exception as error:  # a class may reject what it is given in any way
        raise Malformed(f"{type(error).__name__}: {error}") from error


def unpack_all(packed: Sequence[bytes | memoryview]) -> list[Any]:
    """What every rank told, by rank."""
    found = []
    for rank, data in enumerate(packed):
        try:
            found.append(unpack(data))
        except Malformed as error:
            raise PeerError(
                f"what rank {rank} sent is not what a rank of this version of GEMS writes "
                f"({error}). Start all ranks from one installation; if that is so, another program "
                "has got at the connection: see docs/security.md"
            ) from error
        except GemsError as error:
            raise GemsError(f"rank {rank}: {error}") from None
    return found


def _decode(told: Any, blob: _Received) -> Any:
    if isinstance(told, list):
        return [_decode(x, blob) for x in told]
    if not isinstance(told, dict):
        return told
    if len(told) == 1 and (tag := next(iter(told))).startswith("$"):
        return DECODE[tag](told[tag], blob)
    return {key: _decode(x, blob) for key, x in told.items()}


class _Received:
    """The bytes beside the JSON. No two values are made of the same ones, so that what is received
    takes no more memory than it has bytes."""

    def __init__(self, data: memoryview) -> None:
        self.data, self.left = data, len(data)

    def part(self, start: int, length: int) -> memoryview:
        if not 0 <= start <= start + length <= len(self.data):
            raise Malformed(f"bytes {start} to {start + length} of {len(self.data)}")
        self.left -= length
        if self.left < 0:
            raise Malformed("several values of the same bytes")
        return self.data[start : start + length]


def _decode_tensor(told: Any, blob: _Received) -> torch.Tensor:
    name, shape, _ = told
    dtype, torch = _of_torch(name), _torch()
    if not isinstance(dtype, torch.dtype):
        raise Malformed(f"a tensor of {name!r} and shape {shape!r}")
    part = _numbers(told, dtype.itemsize, blob)
    if not len(part):
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(part, dtype=torch.uint8).view(dtype).reshape(shape)


def _decode_array(told: Any, blob: _Received) -> np.ndarray[Any, Any]:
    name, shape, _ = told
    dtype = np.dtype(name)
    if dtype.kind not in ARRAYS:
        raise Malformed(f"an array of {name!r} and shape {shape!r}")
    return np.frombuffer(_numbers(told, dtype.itemsize, blob), dtype).reshape(shape)


def _numbers(told: Any, width: int, blob: _Received) -> bytearray:
    name, shape, start = told
    if any(type(n) is not int or n < 0 for n in shape):
        raise Malformed(f"numbers of {name!r} and shape {shape!r}")
    return bytearray(blob.part(start, math.prod(shape) * width))


def _of_torch(name: str) -> Any:
    found = getattr(_torch(), name, None)
    if not isinstance(found, _torch_kinds()):
        raise Malformed(f"{name!r} is no type or layout of torch, or torch is not loaded here")
    return found


def _decode_object(told: Any, blob: _Received) -> Any:
    name, *values = told
    kind = _class(name)
    assert dataclasses.is_dataclass(kind)
    fields = [f.name for f in dataclasses.fields(kind) if f.init]
    if len(fields) != len(values):
        raise Malformed(f"{len(values)} values for the {len(fields)} fields of {name}")
    return kind(**{f: _decode(x, blob) for f, x in zip(fields, values, strict=True)})


def _class(name: str) -> type:
    if name not in _CLASSES:
        raise Malformed(f"{name!r} is not among the classes that ranks tell each other")
    return _CLASSES[name]


def _enum(told: Any, blob: _Received) -> Any:
    kind, member = _class(told[0]), told[1]
    assert issubclass(kind, Enum)
    return kind[member]


def _pairs(told: Any, blob: _Received) -> dict[Any, Any]:
    return {_decode(key, blob): _decode(x, blob) for key, x in told}


SEQUENCES: dict[str, tuple[type, ...]] = {
    "$list": (list,),
    "$tuple": (tuple,),
    "$set": (set, frozenset),
}
DECODE: dict[str, Callable[[Any, _Received], Any]] = {
    "$tensor": _decode_tensor,
    "$array": _decode_array,
    "$torch": lambda told, blob: _of_torch(told),
    "$bytes": lambda told, blob: bytes(blob.part(*told)),
    "$data": _decode_object,
    "$enum": _enum,
    "$pairs": _pairs,
    "$counter": lambda told, blob: Counter(_pairs(told, blob)),
    "$tuple": lambda told, blob: tuple(_decode(x, blob) for x in told),
    "$size": lambda told, blob: _torch().Size(_decode(x, blob) for x in told),
    "$set": lambda told, blob: {_decode(x, blob) for x in told},
}

sendable(Timeline, Event, Memory, Costs, Cost, Edge)
