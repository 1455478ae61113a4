"""Python values as JSON with the tensors beside: what a checkpoint may hold, and nothing that runs.

Numbers, texts, None, lists and dicts are themselves. All else is an object with one key that starts
with `$`: `{"$tensor": key}` stands for a tensor that is stored under this key.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from gems.errors import CheckpointError

Tensor = torch.Tensor
PLAIN = (bool, int, float, str, type(None))


def encode(value: Any, at: str, tensors: dict[str, Tensor]) -> Any:
    """`value` as JSON. Its tensors go to `tensors`, under keys that start with `at`."""
    if type(value) in PLAIN:
        return value
    if isinstance(value, Tensor):
        return {"$tensor": _stored(value.detach(), at, tensors)}
    if _is_numpy(value):
        if not value.shape:
            return value.item()
        return {"$array": _stored(torch.from_numpy(value.copy()), at, tensors)}
    if isinstance(value, Mapping):
        return _encode_mapping(value, at, tensors)
    if type(value) in (list, tuple, set, frozenset, torch.Size):
        items = sorted(value) if isinstance(value, (set, frozenset)) else value
        found = [encode(x, f"{at}/{i}", tensors) for i, x in enumerate(items)]
        if type(value) is list:
            return found
        return {"$tuple" if isinstance(value, tuple) else "$set": found}
    if isinstance(value, (int, float)):  # also those of numpy
        return float(value) if isinstance(value, float) else int(value)
    raise CheckpointError(
        f"{at} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot "
        "hold, because reading it back would mean running code from a file; make it of numbers, "
        "texts, lists, dicts, tensors and arrays"
    )


def _stored(tensor: Tensor, at: str, tensors: dict[str, Tensor]) -> str:
    tensors[at] = tensor
    return at


def _is_numpy(value: Any) -> bool:
    return type(value).__module__ == "numpy" and hasattr(value, "shape")


def _encode_mapping(value: Mapping[Any, Any], at: str, tensors: dict[str, Tensor]) -> Any:
    named = all(isinstance(key, str) and not key.startswith("$") for key in value)
    if named and not isinstance(value, Counter):
        return {key: encode(x, f"{at}/{key}", tensors) for key, x in value.items()}
    pairs = [
        [encode(key, f"{at}/{i}", tensors), encode(x, f"{at}/{key}", tensors)]
        for i, (key, x) in enumerate(value.items())
    ]
    return {"$counter" if isinstance(value, Counter) else "$pairs": pairs}


def references(spelled: Any) -> Iterator[Any]:
    """The keys of the tensors that an encoded value needs."""
    if isinstance(spelled, dict):
        for key, x in spelled.items():
            if key in ("$tensor", "$array"):
                yield x
            else:
                yield from references(x)
    elif isinstance(spelled, list):
        for x in spelled:
            yield from references(x)


def decode(spelled: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The value that `encode` was given."""
    if isinstance(spelled, list):
        return [decode(x, tensors) for x in spelled]
    if not isinstance(spelled, dict):
        return spelled
    if len(spelled) == 1 and (tag := next(iter(spelled))) in DECODE:
        return DECODE[tag](spelled[tag], tensors)
    return {key: decode(x, tensors) for key, x in spelled.items()}


def _pairs(x: Any, tensors: Mapping[str, Tensor]) -> dict[Any, Any]:
    return {decode(key, tensors): decode(value, tensors) for key, value in x}


DECODE = {
    "$tensor": lambda x, tensors: tensors[x],
    "$array": lambda x, tensors: tensors[x].numpy(),
    "$tuple": lambda x, tensors: tuple(decode(v, tensors) for v in x),
    "$set": lambda x, tensors: {decode(v, tensors) for v in x},
    "$pairs": _pairs,
    "$counter": lambda x, tensors: Counter(_pairs(x, tensors)),
}


def same(a: Any, b: Any) -> bool:
    """Whether two encoded values are equal; a number that is not one equals itself."""
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b):
        return True
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(x, b[key]) for key, x in a.items())
    return a == b
