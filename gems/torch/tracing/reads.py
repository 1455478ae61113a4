"""What a recording reads and writes of Python's state: attributes of modules, and global names."""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gems.torch.tracing.frozen import (
    MISSING,
    PLAIN,
    Difference,
    Frozen,
    difference,
    freeze,
    of_the_user,
    put_back,
)

# Weights, submodules, hooks and modes are watched elsewhere, or not Python's.
INTERNAL = frozenset(vars(nn.Module())) | {
    *("_compiled_call_impl", "_is_full_backward_hook"),
    "_flat_weight_refs",  # of recurrent layers, which make them anew when weights move
}
HOOKS = tuple(name for name in vars(nn.Module()) if "_hooks" in name and name[:1] == "_")
CACHE = type(functools.lru_cache(lambda: None))
METHODS = frozenset(vars(nn.Module)) - {"forward"}  # nobody replaces these
DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType)
CONTAINERS = (list, dict, tuple, set)
ALONE = (*PLAIN, torch.Tensor, nn.Module, type)  # lead to no function
TABLE = 100  # functions and objects in a list or dict that are followed
FOLLOWED = 5000  # functions that a module's own lead to
ALL = "__dict__"  # the key of all that a class or function holds


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
        return isinstance(self.mapping, OfFunction) or (
            isinstance(self.mapping, OfClass) and self.key == ALL
        )

    @property
    def place(self) -> tuple[int, str]:
        """The same for the same variable in every recording."""
        return id(getattr(self.mapping, "owner", self.mapping)), self.key


@dataclass
class Access:
    """The first access of a recording to an attribute or variable, and what it was before."""

    name: Name
    path: str | None  # of the module whose attribute it is
    before: Any
    wrote: bool  # before it was read
    outer: bool  # by what is recorded, not just by a module that runs as it is
    guarded: bool  # a recording depends on its value
    by: str | None = None  # the leaf that ran

    def change(self) -> Difference | None:
        return difference(self.before, self.name.now(), self.name.label)

    def undo(self) -> None:
        value = put_back(self.before)
        if value is MISSING:
            self.name.mapping.pop(self.name.key, None)
        elif self.name.now() is not value:
            self.name.mapping[self.name.key] = value


class Reads:
    """The accesses of one recording. `running` gives the leaf that runs just now."""

    def __init__(
        self,
        paths: dict[int, str],
        running: Callable[[], str | None],
        assign: Callable[[str, nn.Module, str, Any], bool],
    ) -> None:
        self.paths, self.running, self.assign = paths, running, assign
        self.thread = threading.get_ident()
        self.memo: dict[int, Any] = {}
        self.scopes: list[dict[tuple[int, str], Access]] = [{}]
        self.hooks: list[tuple[Any, Any]] = []  # dicts of hooks, and what was in them

    @property
    def accesses(self) -> list[Access]:
        return list(self.scopes[0].values())

    def names(self, names: Iterable[Name], *, outer: bool = True) -> None:
        """Variables that may be read: they are noted as they are now."""
        for name in names:
            if (place := name.place) in self.scopes[0]:
                continue
            before = freeze(name.now(), self.memo)
            if name.key == ALL and not isinstance(before, Frozen):
                continue  # too much is frozen already
            self.scopes[0][place] = Access(name, None, before, False, outer, outer)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note accesses to attributes of the model's modules by this thread."""
        plain_set = nn.Module.__setattr__

        def getattribute(module: nn.Module, name: str) -> Any:
            if name in INTERNAL or name[:2] == "__" or threading.get_ident() != self.thread:
                return object.__getattribute__(module, name)
            own = object.__getattribute__(module, "__dict__")
            had = name in own
            try:
                value = object.__getattribute__(module, name)
            except AttributeError:
                if not _registered(module, name):
                    self._note(module, name, wrote=False)
                raise
            if name not in METHODS and not _registered(module, name):
                new = not had and name in own  # a functools.cached_property
                self._note(module, name, wrote=False, new=new)
            return value

        def setattr_(module: nn.Module, name: str, value: Any) -> None:
            path = self.paths.get(id(module))
            if threading.get_ident() == self.thread and path is not None:
                if self.assign(path, module, name, value):
                    return
                if name not in INTERNAL and not _registered(module, name):
                    self._note(module, name, wrote=True)
            plain_set(module, name, value)

        nn.Module.__getattribute__ = getattribute  # type: ignore[method-assign]
        nn.Module.__setattr__ = setattr_  # type: ignore[method-assign]
        try:
            yield
        finally:
            del nn.Module.__getattribute__
            nn.Module.__setattr__ = plain_set  # type: ignore[method-assign]

    def _note(self, module: nn.Module, name: str, *, wrote: bool, new: bool = False) -> None:
        key = (id(module), name)
        found = self.scopes[-1].get(key)
        by = self.running()
        inside = by is not None
        if found is not None and (found.outer or inside):
            return
        if (path := self.paths.get(id(module))) is None:
            return
        guarded = not inside or type(module).__module__.startswith("torch.nn")
        if found is not None:
            found.outer, found.guarded = True, found.guarded or not wrote
            return
        own = object.__getattribute__(module, "__dict__")
        label = f"{path}.{name}" if path else f"{type(module).__name__}.{name}"
        before = MISSING if new else freeze(own.get(name, MISSING), self.memo)
        self.scopes[-1][key] = Access(
            Name(own, name, label), path, before, wrote, not inside, guarded and not wrote, by
        )

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """If what runs here fails, attributes and variables are again what they were before it."""
        memo: dict[int, Any] = {}
        variables = [x.name for x in self.accesses if x.path is None]
        befores = [freeze(name.now(), memo) for name in variables]
        self.scopes.append({})
        try:
            yield
        except BaseException:
            self._undo(self.scopes.pop().values())
            for name, before in zip(variables, befores, strict=True):
                Access(name, None, before, False, False, False).undo()
            raise
        for key, access in self.scopes.pop().items():
            earlier = self.scopes[-1].setdefault(key, access)
            earlier.outer |= access.outer
            earlier.guarded |= access.guarded and not earlier.wrote

    def undo(self) -> None:
        self._undo(self.accesses)
        for hooks, before in self.hooks:
            if len(hooks) != len(before) or any(hooks.get(k) is not v for k, v in before.items()):
                hooks.clear()
                hooks.update(before)

    def note_hooks(self, modules: Iterable[nn.Module]) -> None:
        """Forward may register hooks (transformers do): they must not be there a second time."""
        for module in modules:
            own = vars(module)
            self.hooks += [(own[kind], dict(own[kind])) for kind in HOOKS if kind in own]

    def _undo(self, accesses: Iterable[Access]) -> None:
        for access in reversed(list(accesses)):
            access.undo()


def _registered(module: nn.Module, name: str) -> bool:
    own = object.__getattribute__(module, "__dict__")
    return any(name in own.get(kind, ()) for kind in ("_parameters", "_buffers", "_modules"))


# --- variables of functions --------------------------------------------------------------------


def variables(modules: Iterable[nn.Module]) -> list[Name]:
    """Global names and variables taken from around that the methods of these modules may read, and
    the functions and objects that the modules hold."""
    search = _Search({})
    modules = list(modules)
    for kind in {type(module): None for module in modules}:
        for base in _own_bases(kind):
            search.methods(base)
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

    def held(self, value: Any) -> None:
        """A function, an object of a user's class with its methods and the values of its class, or
        a table of these."""
        if isinstance(value, ALONE):
            return
        values = dict.values(value) if isinstance(value, dict) else value
        if isinstance(value, (dict, list, tuple)) and len(value) <= TABLE:
            for x in list(values):
                if not isinstance(x, ALONE):
                    self._held(x)
        self._held(value)

    def _held(self, value: Any) -> None:
        for function in _functions(value):
            if of_the_user(function.__module__):
                self.follow(function)
        if isinstance(value, types.FunctionType):
            return
        for kind in _own_bases(type(value)):
            if id(kind) not in self.followed:
                self.followed.add(id(kind))
                self.methods(kind)
                self._in_class(kind, vars(kind))

    def follow(self, function: types.FunctionType) -> None:
        if id(function) in self.followed or len(self.followed) > FOLLOWED:
            return
        self.followed.add(id(function))
        self._own(function)
        names, entries = _names_in(function.__code__), function.__globals__
        for name in names & entries.keys():
            value = entries[name]
            if isinstance(value, types.ModuleType):
                self._in_module(value, names)
                continue
            self._add(entries, name, f"{function.__module__}.{name}")
            if isinstance(value, type):
                self._in_class(value, names)
            else:
                self.held(value)
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in cells:
            if name != "__class__":
                self._add(Cell(cell), name, f"{name} (of {function.__qualname__})")
                self.held(Cell(cell).get(name))

    def _own(self, function: types.FunctionType) -> None:
        """What a function holds itself: `table.cache = {}`, `def table(n, cache={})`."""
        label = f"{function.__module__}.{function.__qualname__}"
        self._add(OfFunction(function), ALL, label)
        for key in ("__defaults__", "__kwdefaults__"):
            defaults = getattr(function, key) or ()
            values = defaults.values() if isinstance(defaults, dict) else defaults
            if not all(isinstance(x, PLAIN) for x in values):
                self._add(OfFunction(function), key, f"{label}.{key}")

    def _in_module(self, module: types.ModuleType, names: set[str]) -> None:
        """`settings.alpha`, `rope.tables.of(n)`: plain values and functions of a module of the
        user's, and of the modules in it."""
        modules = [module]
        for inner in modules:  # which grow
            if not of_the_user(inner.__name__):
                continue
            entries = vars(inner)
            for name in names & entries.keys():
                value = entries[name]
                if isinstance(value, types.ModuleType):
                    modules += [value] if value not in modules else []
                elif isinstance(value, (*PLAIN, *CONTAINERS)) or _functions(value):
                    self._add(entries, name, f"{inner.__name__}.{name}")
                    self.held(value)

    def _in_class(self, kind: type, names: Iterable[str]) -> None:
        """`Settings.alpha`, `Tables.of(n)`: what functions read of a class of the user's."""
        bases = _own_bases(kind)
        for base in bases:
            self._values(base)
        for name in [n for n in names if n[:2] != "__"]:
            value = next((vars(x)[name] for x in bases if name in vars(x)), MISSING)
            if value is MISSING or isinstance(value, DESCRIPTORS):
                continue
            for place in of_class(kind, name, f"{kind.__qualname__}.{name}", self.path):
                self.found[place.place] = place
            for inner in _functions(value):
                if of_the_user(inner.__module__):
                    self.follow(inner)


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


def _names_in(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names_in(constant)
    return names
