"""Python values as they were at one moment: frozen, compared with what they are now, put back."""

from __future__ import annotations

import argparse
import random
import sys
import types
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

DEPTH = 6  # of containers and objects inside each other
ENTRIES = 1000  # larger containers are compared by identity and length
PLAIN = (
    *(int, float, complex, bool, str, bytes, type(None), range, slice),
    *(torch.dtype, torch.device, torch.Size, torch.memory_format),
)
NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
OTHERS = {*sys.stdlib_module_names, "torch", "numpy"}  # whose objects are compared by identity


class Missing:
    """In place of an attribute, a key or a global name that does not exist."""

    def __repr__(self) -> str:
        return "nothing"


MISSING = Missing()


@dataclass(frozen=True, eq=False)
class Frozen:
    """A container or object, and what was in it: `parts` are frozen themselves where mutable."""

    thing: Any
    kind: str
    parts: Any


@dataclass(frozen=True)
class Difference:
    """A value that is not what it was: where it is, and both values."""

    label: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.label} was {shown(self.before)} and is {shown(self.after)}"


def freeze(value: Any, memo: dict[int, Frozen | None] | None = None, depth: int = DEPTH) -> Any:
    """What `value` is now. Tensors, modules, functions and classes are compared by identity."""
    memo = {} if memo is None else memo
    if isinstance(value, PLAIN) or (kind := _kind(value)) is None or not depth:
        return value
    if (known := memo.get(id(value))) is not None:
        return known
    if id(value) in memo:  # inside of itself
        return value
    memo[id(value)] = None
    inside = _inside(kind, value)
    if kind in ("list", "tuple", "deque"):
        parts: Any = [freeze(x, memo, depth - 1) for x in inside]
    elif kind in ("dict", "object"):
        parts = {k: freeze(x, memo, depth - 1) for k, x in inside.items()}
    else:
        parts = inside
    found = memo[id(value)] = Frozen(value, kind, parts)
    return found


def difference(
    before: Any, now: Any, label: str, seen: set[int] | None = None
) -> Difference | None:
    """The first place where `now` is not what was frozen; None if all is as it was."""
    if not isinstance(before, Frozen):
        return None if _same(before, now) else Difference(label, before, now)
    seen = set() if seen is None else seen
    if before.thing is now:
        if id(now) in seen:
            return None
        seen.add(id(now))
    elif type(before.thing) is not type(now):
        return Difference(label, before.thing, now)
    inside = _inside(before.kind, now)
    if before.kind in ("list", "tuple", "deque"):
        pairs = {str(i): (x, y) for i, (x, y) in enumerate(zip(before.parts, inside, strict=False))}
        alike = len(before.parts) == len(inside)
    elif before.kind in ("dict", "object"):
        pairs = {k: (x, inside.get(k, MISSING)) for k, x in before.parts.items()}
        alike = len(before.parts) == len(inside)
    else:
        return None if before.parts == inside else Difference(label, before.parts, inside)
    for key, (x, y) in pairs.items():
        inner = f"{label}.{key}" if before.kind == "object" else f"{label}[{key}]"
        if (found := difference(x, y, inner, seen)) is not None:
            return found
    return None if alike else Difference(label, f"of {len(before.parts)}", f"of {len(inside)}")


def thing_of(value: Any) -> Any:
    """The value itself, of one that may be frozen."""
    return value.thing if isinstance(value, Frozen) else value


def within(values: Iterable[Frozen]) -> list[Frozen]:
    """These and all that is frozen inside of them, each once."""
    found: dict[int, Frozen] = {}
    left = list(values)
    while left:
        value = left.pop()
        if id(value) in found:
            continue
        found[id(value)] = value
        if value.kind in ("list", "tuple", "deque"):
            left += [x for x in value.parts if isinstance(x, Frozen)]
        elif value.kind in ("dict", "object"):
            left += [x for x in value.parts.values() if isinstance(x, Frozen)]
    return list(found.values())


def as_it_was(value: Frozen) -> bool:
    """Whether this very object holds what it held, not looking into what is inside of it."""
    return value.kind == "tuple" or _inside(value.kind, value.thing) == value.parts


def put_back(before: Any, seen: set[int] | None = None) -> Any:
    """Have in every mutable container what was in it; gives the value itself."""
    if not isinstance(before, Frozen):
        return before
    seen = set() if seen is None else seen
    if id(before) in seen:
        return before.thing
    seen.add(id(before))
    thing = before.thing
    if before.kind in ("list", "deque"):
        was = [put_back(x, seen) for x in before.parts]
        if len(was) != len(thing) or any(a is not b for a, b in zip(was, thing, strict=True)):
            thing.clear()
            thing.extend(was)
    elif before.kind == "tuple":
        for x in before.parts:
            put_back(x, seen)
    elif before.kind in ("dict", "object"):
        _put_back_entries(_inside(before.kind, thing), before.parts, seen)
    elif before.kind == "set" and thing != before.parts:
        thing.clear()
        thing.update(before.parts)
    elif before.kind == "random":
        thing.setstate(before.parts)
    return thing


def _put_back_entries(entries: dict[Any, Any], was: dict[Any, Any], seen: set[int]) -> None:
    for key in [k for k in entries if k not in was]:
        del entries[key]
    for key, part in was.items():
        value = put_back(part, seen)
        if entries.get(key, MISSING) is not value:
            entries[key] = value


def tensors_within(value: Any, seen: set[int] | None = None) -> list[torch.Tensor]:
    """The tensors that a value holds, however deep."""
    seen = set() if seen is None else seen
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, PLAIN) or id(value) in seen or (kind := _kind(value)) is None:
        return []
    seen.add(id(value))
    if kind in ("random", "array"):
        return []
    inside = _inside(kind, value)
    entries = inside.values() if isinstance(inside, dict) else inside
    return [t for x in entries for t in tensors_within(x, seen)]


def shown(value: Any) -> str:
    """A value in an error message."""
    if isinstance(value, Frozen):
        value = value.thing
    if isinstance(value, torch.Tensor):
        return f"a tensor {list(value.shape)}"
    if isinstance(value, (*PLAIN, Missing, list, tuple, dict, set)):
        text = repr(value)
        return text if len(text) <= 60 else f"{text[:57]}..."
    return f"a {type(value).__name__}"


def _kind(value: Any) -> str | None:
    """How a value is looked into; None: it is compared by identity."""
    if isinstance(value, (torch.Tensor, nn.Module, type, Missing)):
        return None
    for kind, form in (("list", list), ("tuple", tuple), ("dict", dict), ("set", set)):
        if isinstance(value, form):
            return kind if len(value) <= ENTRIES else None
    if isinstance(value, deque):
        return "deque" if len(value) <= ENTRIES else None
    if isinstance(value, random.Random):
        return "random"
    if type(value).__module__.partition(".")[0] == "numpy":
        return _kind_of_numpy(value)
    if isinstance(value, NAMESPACES):
        return "object"
    root = type(value).__module__.partition(".")[0]
    return "object" if root not in OTHERS and hasattr(value, "__dict__") else None


def _kind_of_numpy(value: Any) -> str | None:
    if hasattr(value, "tobytes") and getattr(value, "size", ENTRIES + 1) <= ENTRIES:
        return "array"
    return "numpy random" if hasattr(value, "bit_generator") else None


def _inside(kind: str, value: Any) -> Any:
    if kind == "object":
        return vars(value)
    if kind == "set":
        return set(value)
    if kind == "random":
        return value.getstate()
    if kind == "array":
        return value.tobytes(), str(value.dtype), value.shape
    if kind == "numpy random":
        return repr(value.bit_generator.state)
    return value


def _same(before: Any, now: Any) -> bool:
    if before is now:
        return True
    if type(before) is not type(now) or not isinstance(before, PLAIN):
        return isinstance(before, types.MethodType) and before == now
    if isinstance(before, (float, complex)):
        return repr(before) == repr(now)  # -0.0 is not 0.0, and nan is nan
    return bool(before == now)
