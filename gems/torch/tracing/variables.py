"""Variables that functions may read: global names, closures, values of classes and functions."""

from __future__ import annotations

import functools
import opcode
import sys
import types
from collections.abc import Collection, Iterable, Iterator, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gems.torch.tracing.frozen import MISSING, NAMESPACES, PLAIN, of_the_user

# Weights, submodules, hooks and modes are watched elsewhere, or not Python's.
INTERNAL = frozenset(vars(nn.Module())) | {
    *("_compiled_call_impl", "_is_full_backward_hook"),
    "_flat_weight_refs",  # of recurrent layers, which make them anew when weights move
}
CACHE = type(functools.lru_cache(lambda: None))
DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType)
ALONE = (*PLAIN, torch.Tensor, nn.Module)  # lead to no function
IMPORT = opcode.opmap["IMPORT_NAME"]
TABLE = 100  # functions and objects in a list, dict or object that are followed
DEPTH = 3  # of these inside each other
FOLLOWED = 5000  # functions that a module's own lead to
ALL = "__dict__"  # the key of all that a class or function holds
DEFAULTS = ("__defaults__", "__kwdefaults__")
KEPT = (ALL, *DEFAULTS)


class Cell:
    """A variable that a function took from around it, as a mapping with one key."""

    def __init__(self, cell: types.CellType) -> None:
        self.owner = cell

    def get(self, key: Any, default: Any = None) -> Any:
        try:
            return self.owner.cell_contents
        except ValueError:  # not set yet
            return default

    def __setitem__(self, key: Any, value: Any) -> None:
        self.owner.cell_contents = value

    def pop(self, key: Any, default: Any = None) -> None:
        pass


class OfFunction:
    """Attributes of a function (`table.cache`) and its default arguments, as a mapping."""

    def __init__(self, function: types.FunctionType) -> None:
        self.owner = function

    def get(self, key: Any, default: Any = None) -> Any:
        return getattr(self.owner, key, default)

    def __setitem__(self, key: Any, value: Any) -> None:
        setattr(self.owner, key, value)

    def pop(self, key: Any, default: Any = None) -> None:
        pass


class OfClass:
    """The attributes of a class itself, as a mapping. `ALL` of its values are a new dict each time:
    values that forward adds are in it as well."""

    def __init__(self, kind: type) -> None:
        self.owner = kind

    def get(self, key: Any, default: Any = None) -> Any:
        if key != ALL:
            return vars(self.owner).get(key, default)
        return {k: v for k, v in vars(self.owner).items() if k[:2] != "__" and _is_value(v)}

    def __setitem__(self, key: str, value: Any) -> None:
        if key != ALL:
            return type.__setattr__(self.owner, key, value)
        now = self.get(ALL)
        for k in now.keys() - value.keys():
            self.pop(k)
        for k, v in value.items():
            if now.get(k, MISSING) is not v:
                self[k] = v

    def pop(self, key: str, default: Any = None) -> None:
        if key in vars(self.owner):
            type.__delattr__(self.owner, key)


def _is_value(x: Any) -> bool:
    """Whether a class holds this as a value: no method, property or other descriptor."""
    return isinstance(x, PLAIN) or not (callable(x) or hasattr(type(x), "__get__"))


@dataclass(frozen=True)
class Name:
    """A variable: where it is held, under which key, and what to call it in errors."""

    mapping: Any
    key: str
    label: str
    path: str | None = None  # of the container whose hook uses it

    def now(self) -> Any:
        return self.mapping.get(self.key, MISSING)

    @property
    def kept(self) -> bool:
        """Whether forward may keep tables here, but no model has its settings here."""
        return isinstance(self.mapping, (OfFunction, OfClass)) and self.key in KEPT

    @property
    def place(self) -> tuple[int, str]:
        """The same for the same variable in every recording."""
        return id(getattr(self.mapping, "owner", self.mapping)), self.key


def variables(modules: Iterable[nn.Module]) -> list[Name]:
    """Global names and variables taken from around that the methods of these modules may read, and
    the functions and objects that the modules hold."""
    search = _Search({})
    modules = list(modules)
    kinds = dict.fromkeys(map(type, modules))
    for base in dict.fromkeys(base for kind in kinds for base in _own_bases(kind)):
        search.methods(base)
    for kind in kinds:  # `type(self).alpha`
        search.in_class(kind, search.names)
    for module in modules:
        for name, value in vars(module).items():
            if name not in INTERNAL:
                search.held(value)
    return list(search.found.values())


def variables_of_hooks(modules: dict[str, nn.Module]) -> list[Name]:
    """What hooks may change: variables around them, and the object they are methods of."""
    found: dict[tuple[int, str], Name] = {}
    for path, module in modules.items():
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            search = _Search(found, path)
            for function in _functions(hook):
                search.follow(function)
            owner = getattr(hook, "__self__", None)
            if owner is None and not isinstance(hook, types.FunctionType):
                owner = hook
            if owner is not None and not isinstance(owner, (nn.Module, type)):
                mapping = {"hook": owner}
                label = f"the hook {type(owner).__name__}"
                found[id(owner), "hook"] = Name(mapping, "hook", label, path)
    return list(found.values())


def caches(modules: Iterable[nn.Module]) -> list[Any]:
    """The `functools.lru_cache`s that these modules may fill."""
    modules = list(modules)
    names = variables(modules)
    found = [name.now() for name in names]
    kinds = {n.mapping.owner for n in names if isinstance(n.mapping, OfClass)}
    found += [value for kind in kinds for value in vars(kind).values()]
    found += [value for module in modules for value in vars(module).values()]
    found = [_part(x, "__func__", x) for x in found]  # of a static or a class method
    return list({id(x): x for x in found if type(x) is CACHE}.values())


def of_class(kind: type, key: str, label: str, path: str | None = None) -> Iterator[Name]:
    """An attribute of a class, and where it would be found first if it were set."""
    for base in _own_bases(kind):
        yield Name(OfClass(base), key, label, path)
        if key in vars(base):
            return


class _Search:
    """What functions lead to: the variables found so far, and what was followed already."""

    def __init__(self, found: dict[tuple[int, str], Name], path: str | None = None) -> None:
        self.found, self.path = found, path
        self.followed: set[int] = set()
        self.names: set[str] = set()  # in all functions

    def _add(self, mapping: Any, key: str, label: str) -> None:
        name = Name(mapping, key, label, self.path)
        self.found[name.place] = name

    def methods(self, kind: type) -> None:
        """All methods of a class, and what it holds."""
        self._values(kind)
        for method in vars(kind).values():
            for function in _functions(method):
                self.follow(function)

    def _values(self, kind: type) -> None:
        if (id(kind), ALL) not in self.found:
            self._add(OfClass(kind), ALL, f"{kind.__module__}.{kind.__qualname__}")

    def held(self, value: Any, depth: int = DEPTH) -> None:
        """What a value leads to: functions, classes, and objects or tables of these."""
        if isinstance(value, ALONE) or id(value) in self.followed:
            return
        if isinstance(value, types.ModuleType):
            return self._in_module(value, self.names)
        for function in _functions(value):
            if of_the_user(function.__module__):
                self.follow(function)
        if isinstance(value, types.FunctionType):
            return
        for kind in _own_bases(value if isinstance(value, type) else type(value)):
            self._all_of(kind)
        self.followed.add(id(value))
        inside = _inside(value) if depth else ()
        for x in list(inside) if len(inside) <= TABLE else ():
            self.held(x, depth - 1)

    def _all_of(self, kind: type) -> None:
        """A class whose objects, or which itself, may be handed to any function."""
        if id(kind) in self.followed:
            return
        self.followed.add(id(kind))
        if issubclass(kind, nn.Module):  # its methods count once there is a module of it
            return self.in_class(kind, [n for n, x in vars(kind).items() if _is_value(x)])
        self.methods(kind)
        self.in_class(kind, vars(kind))

    def follow(self, function: types.FunctionType) -> None:
        if id(function) in self.followed or len(self.followed) > FOLLOWED:
            return
        self.followed.add(id(function))
        self._own(function)
        names, entries = _names_in(function.__code__), function.__globals__
        self.names |= names
        self._entries(entries, names, function.__module__)
        if _imports(function.__code__):
            for module in [sys.modules[n] for n in names - entries.keys() if n in sys.modules]:
                self._in_module(module, names)
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in cells:
            if name != "__class__":
                self._add(Cell(cell), name, f"{name} (of {function.__qualname__})")
                self.held(Cell(cell).get(name))

    def _own(self, function: types.FunctionType) -> None:
        """What a function holds itself: `table.cache = {}`, `def table(n, cache={})`."""
        label = f"{function.__module__}.{function.__qualname__}"
        self._add(OfFunction(function), ALL, label)
        for key, value in vars(function).items():
            if isinstance(value, PLAIN):
                self._add(OfFunction(function), key, f"{label}.{key}")
        for key in DEFAULTS:
            defaults = getattr(function, key) or ()
            values = defaults.values() if isinstance(defaults, dict) else defaults
            if not all(isinstance(x, PLAIN) for x in values):
                self._add(OfFunction(function), key, f"{label}.{key}")

    def _entries(self, entries: dict[str, Any], names: Set[str], module: str | None) -> None:
        """The names that a function reads of its own globals, or of a module."""
        for name in names & entries.keys():
            value = entries[name]
            if isinstance(value, types.ModuleType):
                self._in_module(value, names)
                continue
            self._add(entries, name, f"{module}.{name}")
            if isinstance(value, type):
                self.in_class(value, names)
            else:
                self.held(value)

    def _in_module(self, module: types.ModuleType, names: Set[str]) -> None:
        """`settings.alpha`, `settings.Config.alpha`, `rope.tables.of(n)`, of a module of the
        user's, and of the modules in it."""
        key = hash((id(module), frozenset(names)))
        if of_the_user(module.__name__) and key not in self.followed:
            self.followed.add(key)
            self._entries(vars(module), names, module.__name__)

    def in_class(self, kind: type, names: Iterable[str]) -> None:
        """`Settings.alpha`, `Tables.of(n)`: what functions read of a class of the user's, and of
        the classes in it."""
        names, kinds = [n for n in names if n[:2] != "__"], [kind]
        for kind in kinds:  # which grow
            bases = _own_bases(kind)
            for base in bases:
                self._values(base)
            for name in names:
                value = next((vars(x)[name] for x in bases if name in vars(x)), MISSING)
                if value is MISSING or isinstance(value, DESCRIPTORS):
                    continue
                for place in of_class(kind, name, f"{kind.__qualname__}.{name}", self.path):
                    self.found[place.place] = place
                if isinstance(value, type) and value not in kinds:
                    kinds.append(value)
                elif isinstance(value, types.ModuleType):
                    self._in_module(value, self.names)
                for inner in _functions(value):
                    if of_the_user(inner.__module__):
                        self.follow(inner)


def _inside(value: Any) -> Collection[Any]:
    """What a table, a partial or an object of a user's class holds."""
    if isinstance(value, dict):
        return dict.values(value)
    if isinstance(value, (list, tuple, set, frozenset)):
        return value
    if isinstance(value, functools.partial):
        return (*value.args, *value.keywords.values())
    if isinstance(value, NAMESPACES) or of_the_user(type(value).__module__):
        return () if isinstance(value, type) else getattr(value, "__dict__", {}).values()
    return ()


def _own_bases(kind: type) -> list[type]:
    return [base for base in kind.__mro__ if of_the_user(base.__module__)]


def _functions(thing: Any) -> list[types.FunctionType]:
    if isinstance(thing, functools.partial):
        return _functions(thing.func)
    if isinstance(thing, property):
        return [f for part in (thing.fget, thing.fset) if part for f in _functions(part)]
    thing = _part(thing, "__func__", thing)
    seen: set[int] = set()
    while (inner := _part(thing, "__wrapped__")) is not None and id(thing) not in seen:
        seen.add(id(thing))
        if isinstance(thing, types.FunctionType):  # a decorator's own variables count, too
            return [thing, *_functions(inner)]
        thing = inner
    return [thing] if isinstance(thing, types.FunctionType) else []


def _part(thing: Any, name: str, default: Any = None) -> Any:
    """An attribute of anything; what stands for a package that is not installed raises its own
    errors (MONAI's optional imports)."""
    try:
        return getattr(thing, name, default)
    except Exception:
        return default


@functools.cache
def _names_in(code: types.CodeType) -> frozenset[str]:
    """Names that code reads, and texts that `getattr` may read by."""
    texts = {x for x in code.co_consts if isinstance(x, str) and x.isidentifier()}
    inner = [_names_in(x) for x in code.co_consts if isinstance(x, types.CodeType)]
    return frozenset(texts).union(code.co_names, *inner)


@functools.cache
def _imports(code: types.CodeType) -> bool:
    inner = (x for x in code.co_consts if isinstance(x, types.CodeType))
    return IMPORT in code.co_code[::2] or any(map(_imports, inner))
