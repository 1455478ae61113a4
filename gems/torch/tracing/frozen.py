"""Python values as they were at one moment: frozen, compared with what they are now, put back."""

from __future__ import annotations

import argparse
import functools
import logging
import random
import sys
import types
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

log = logging.getLogger(__name__)
DEPTH = 24  # of containers and objects inside each other
ENTRIES = 100_000  # of larger containers the length is compared
FROZEN = 20_000  # containers and objects that are looked into; the others are compared by identity
BYTES = 1 << 22  # of larger arrays 4,096 cells are compared
PLAIN = (
    *(int, float, complex, bool, str, bytes, type(None), range, slice),
    *(torch.dtype, torch.device, torch.Size, torch.memory_format),
)
NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
OTHERS = {  # whose objects are compared by identity
    *(*sys.stdlib_module_names, "torch", "numpy"),
    *("pytest", "_pytest", "pluggy"),  # which the assertions of a test lead to
}


FORMS = (("list", list), ("tuple", tuple), ("dict", dict), ("set", set), ("deque", deque))
EXACT = {form: kind for kind, form in FORMS}
NAMED = ("dict", "object", "slots", "partial", "function")  # whose parts have names
SUBSCRIPTED = ("list", "tuple", "deque", "dict")
OF_FUNCTIONS = ("__code__", "__defaults__", "__kwdefaults__")  # see reads.py for its variables


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
    if len(memo) >= FROZEN:
        if len(memo) == FROZEN:
            memo[id(memo)] = None
            log.warning(
                "forward reads more than %d Python containers and objects (the last is a %s); "
                "changes inside of any more are not noticed. Give modules only what they need",
                FROZEN, type(value).__name__,
            )  # fmt: skip
        return value
    memo[id(value)] = None
    inside = _inside(kind, value)
    if kind in ("list", "tuple", "deque"):
        parts: Any = [freeze(x, memo, depth - 1) for x in inside]
    elif kind in NAMED:
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
    if not before.parts and not inside:
        return None
    if before.kind in ("list", "tuple", "deque"):
        pairs = {str(i): (x, y) for i, (x, y) in enumerate(zip(before.parts, inside, strict=False))}
        alike = len(before.parts) == len(inside)
    elif before.kind in NAMED:
        pairs = {k: (x, inside.get(k, MISSING)) for k, x in before.parts.items()}
        alike = len(before.parts) == len(inside)
        if before.kind == "dict" and alike and list(before.parts) != list(inside):
            return Difference(f"the order of {label}", list(before.parts), list(inside))
    else:
        return None if before.parts == inside else Difference(label, before.parts, inside)
    for key, (x, y) in pairs.items():
        inner = f"{label}[{key}]" if before.kind in SUBSCRIPTED else f"{label}.{key}"
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
        elif value.kind in NAMED:
            left += [x for x in value.parts.values() if isinstance(x, Frozen)]
    return list(found.values())


def as_it_was(value: Frozen) -> bool:
    """Whether this very object holds what it held, not looking into what is inside of it."""
    if value.kind == "tuple":
        return True
    inside = _inside(value.kind, value.thing)
    if value.kind not in NAMED:
        return inside == value.parts
    return len(inside) == len(value.parts) and all(
        inside.get(key, MISSING) is thing_of(part) for key, part in value.parts.items()
    )


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
    elif before.kind in NAMED:
        _put_back_fields(before, seen)
    elif before.kind == "set" and thing != before.parts:
        thing.clear()
        thing.update(before.parts)
    elif before.kind == "random":
        thing.setstate(before.parts)
    return thing


def _put_back_entries(entries: dict[Any, Any], was: dict[Any, Any], seen: set[int]) -> None:
    if not entries and not was:
        return
    for key in [k for k in entries if k not in was]:
        del entries[key]
    for key, part in was.items():
        value = put_back(part, seen)
        if entries.get(key, MISSING) is not value:
            entries[key] = value
    if list(entries) != list(was):
        ordered = {key: entries[key] for key in was}
        entries.clear()
        entries.update(ordered)


def _put_back_fields(before: Frozen, seen: set[int]) -> None:
    now = _inside(before.kind, before.thing)
    for name, part in before.parts.items():
        value = put_back(part, seen)
        if before.kind == "slots" and now.get(name, MISSING) is not value:
            object.__setattr__(before.thing, name, value)
    if before.kind == "slots":
        for name in now.keys() - before.parts.keys():
            object.__delattr__(before.thing, name)


def tensors_within(value: Any, seen: set[int] | None = None) -> list[torch.Tensor]:
    """The tensors that a value holds, however deep."""
    seen = set() if seen is None else seen
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, PLAIN) or id(value) in seen or (kind := _kind(value)) is None:
        return []
    seen.add(id(value))
    if kind in ("random", "array", "numpy random", "large"):
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
    if (exact := EXACT.get(type(value))) is not None:
        return exact if len(value) <= ENTRIES else "large"
    if isinstance(value, (torch.Tensor, nn.Module, type, Missing)):
        return None
    for kind, form in FORMS:
        if isinstance(value, form):
            return kind if len(value) <= ENTRIES else "large"
    if isinstance(value, random.Random):
        return "random"
    if isinstance(value, functools.partial):
        return "partial"
    if isinstance(value, types.FunctionType):
        return "function" if of_the_user(value.__module__) else None
    if type(value).__module__.partition(".")[0] == "numpy":
        return _kind_of_numpy(value)
    if isinstance(value, NAMESPACES):
        return "object"
    if not of_the_user(type(value).__module__):
        return None
    if _slots(type(value)):
        return "slots"
    return "object" if hasattr(value, "__dict__") else None


@functools.cache
def of_the_user(module: str | None) -> bool:
    """Whether a module of this name is looked into: not Python's, torch's, numpy's, pytest's."""
    return (module or "").partition(".")[0] not in OTHERS


@functools.cache
def _slots(kind: type) -> tuple[str, ...]:
    """The fields that objects of a class have beside those of their `__dict__`."""
    found = [vars(base).get("__slots__", ()) for base in kind.__mro__]
    names = [n for slots in found for n in ((slots,) if isinstance(slots, str) else slots)]
    return tuple(n for n in names if isinstance(getattr(kind, n, None), types.MemberDescriptorType))


def _kind_of_numpy(value: Any) -> str | None:
    if hasattr(value, "tobytes"):
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
        whole = value.nbytes <= BYTES
        cells = value if whole else value.flat[:: max(value.size // 4096, 1)]
        return cells.tobytes(), str(value.dtype), value.shape
    if kind == "large":
        return len(value)
    if kind == "partial":
        return {"func": value.func, "args": value.args, "keywords": value.keywords}
    if kind == "function":
        return {name: getattr(value, name) for name in OF_FUNCTIONS}
    if kind == "slots":
        own = {
            n: x for n in _slots(type(value)) if (x := getattr(value, n, MISSING)) is not MISSING
        }
        return own | getattr(value, "__dict__", {})
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
