"""What a recording reads and writes of Python's state: attributes of modules, and global names."""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from gems.torch.frozen import MISSING, OTHERS, PLAIN, Difference, difference, freeze, put_back

# Weights, submodules, hooks and modes are watched elsewhere, or not Python's.
INTERNAL = frozenset(vars(nn.Module())) | {"_compiled_call_impl", "_is_full_backward_hook"}
HOOKS = tuple(name for name in vars(nn.Module()) if "_hooks" in name and name[:1] == "_")
CACHE = type(functools.lru_cache(lambda: None))
TABLE = 100  # functions in a list or dict that are followed
FOLLOWED = 1000  # functions that a module's own lead to


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
    """The values that a class holds, as a mapping with one key: a dict of them all, so that one
    that forward adds is seen as well."""

    def __init__(self, kind: type) -> None:
        self.owner = kind

    def get(self, key: Any, default: Any = None) -> Any:
        return {k: v for k, v in vars(self.owner).items() if k[:2] != "__" and _is_value(v)}

    def __setitem__(self, key: Any, value: Any) -> None:
        now = self.get(key)
        for k in now.keys() - value.keys():
            delattr(self.owner, k)
        for k, v in value.items():
            if now.get(k, MISSING) is not v:
                setattr(self.owner, k, v)

    def pop(self, key: Any, default: Any = None) -> None:
        pass


KEPT = (OfFunction, OfClass)  # where forward keeps tables; no setting of a model


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
        now = self.name.mapping.get(self.name.key, MISSING)
        return difference(self.before, now, self.name.label)

    def undo(self) -> None:
        value = put_back(self.before)
        if value is MISSING:
            self.name.mapping.pop(self.name.key, None)
        elif self.name.mapping.get(self.name.key, MISSING) is not value:
            self.name.mapping[self.name.key] = value


class Reads:
    """The accesses of one recording. `running` gives the leaf that runs just now."""

    def __init__(
        self,
        paths: dict[int, str],
        running: Callable[[], str | None],
        assign: Callable[[nn.Module, str, Any], bool],
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
            before = freeze(name.mapping.get(name.key, MISSING), self.memo)
            self.scopes[0].setdefault(name.place, Access(name, None, before, False, outer, outer))

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
            if name in own and not had:  # a functools.cached_property
                self._note(module, name, wrote=False, new=True)
            elif name in own or isinstance(value, (*PLAIN, list, dict, tuple, set)):
                self._note(module, name, wrote=False)
            return value

        def setattr_(module: nn.Module, name: str, value: Any) -> None:
            if threading.get_ident() == self.thread and id(module) in self.paths:
                if self.assign(module, name, value):
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
        befores = [freeze(name.mapping.get(name.key, MISSING), memo) for name in variables]
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
    """Global names and variables taken from around that the methods of these modules may read."""
    found: dict[tuple[int, str], Name] = {}
    followed: set[int] = set()
    for base in _classes(modules):
        _of_class(base, found, None)
        for method in vars(base).values():
            for function in _functions(method):
                _follow(function, found, followed, None)
    return list(found.values())


def _classes(modules: Iterable[nn.Module]) -> list[type]:
    """The user's own classes: of these modules, and of the objects that they hold."""
    kinds: dict[type, None] = {}
    for module in modules:
        kinds[type(module)] = None
        if _of_the_user(type(module).__module__):
            kinds |= dict.fromkeys(type(v) for k, v in vars(module).items() if k not in INTERNAL)
    bases = dict.fromkeys(base for kind in kinds for base in kind.__mro__)
    return [base for base in bases if base is not nn.Module and _of_the_user(base.__module__)]


def _of_class(kind: type, found: dict[tuple[int, str], Name], path: str | None) -> None:
    label = f"{kind.__module__}.{kind.__qualname__}"
    found[id(kind), "__dict__"] = Name(OfClass(kind), "__dict__", label, path)


def caches(modules: Iterable[nn.Module]) -> list[Any]:
    """The `functools.lru_cache`s that these modules may fill."""
    modules = list(modules)
    names = variables(modules)
    found = [name.mapping.get(name.key) for name in names]
    kinds = [n.mapping.owner for n in names if isinstance(n.mapping, OfClass)]
    found += [value for kind in kinds for value in vars(kind).values()]
    found += [value for module in modules for value in vars(module).values()]
    found = [_part(x, "__func__", x) for x in found]  # of a static or a class method
    return list({id(x): x for x in found if type(x) is CACHE}.values())


def variables_of_hooks(modules: dict[str, nn.Module]) -> list[Name]:
    """What hooks may change: variables around them, and the object they are methods of."""
    found: dict[tuple[int, str], Name] = {}
    for path, module in modules.items():
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            for function in _functions(hook):
                _follow(function, found, set(), path)
            owner = getattr(hook, "__self__", None)
            if owner is None and not isinstance(hook, types.FunctionType):
                owner = hook
            if owner is not None and not isinstance(owner, (nn.Module, type)):
                mapping = {"hook": owner}
                label = f"the hook {type(owner).__name__}"
                found[id(owner), "hook"] = Name(mapping, "hook", label, path)
    return list(found.values())


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


def _follow(
    function: types.FunctionType,
    found: dict[tuple[int, str], Name],
    followed: set[int],
    path: str | None,
) -> None:
    if id(function) in followed or len(followed) > FOLLOWED:
        return
    followed.add(id(function))
    _own(function, found, path)
    names = _names_in(function.__code__)
    for name in names:
        if name not in function.__globals__:
            continue
        value = function.__globals__[name]
        label = f"{function.__module__}.{name}"
        if isinstance(value, types.ModuleType):
            _in_module(value, names, found, followed, path)
        elif isinstance(value, type):
            _in_class(value, names, found, followed, path)
        else:
            found[id(function.__globals__), name] = Name(function.__globals__, name, label, path)
            _follow_all(value, found, followed, path)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if name != "__class__":
            label = f"{name} (of {function.__qualname__})"
            found[id(cell), name] = Name(Cell(cell), name, label, path)
            _follow_all(Cell(cell).get(name), found, followed, path)


def _follow_all(value: Any, found: dict[Any, Name], followed: set[int], path: str | None) -> None:
    """A function of the user's, or those in a table of functions."""
    values = list(value.values()) if isinstance(value, dict) else value
    table = isinstance(values, (list, tuple)) and len(values) <= TABLE
    for x in values if table else [value]:
        for inner in _functions(x):
            if _of_the_user(inner.__module__):
                _follow(inner, found, followed, path)


def _own(
    function: types.FunctionType, found: dict[tuple[int, str], Name], path: str | None
) -> None:
    """What a function holds itself: `table.cache = {}`, `def table(n, cache={})`."""
    label = f"{function.__module__}.{function.__qualname__}"
    found[id(function), "__dict__"] = Name(OfFunction(function), "__dict__", label, path)
    for key in ("__defaults__", "__kwdefaults__"):
        defaults = getattr(function, key) or ()
        values = defaults.values() if isinstance(defaults, dict) else defaults
        if not all(isinstance(x, PLAIN) for x in values):
            found[id(function), key] = Name(OfFunction(function), key, f"{label}.{key}", path)


def _in_class(
    kind: type,
    names: Iterable[str],
    found: dict[Any, Name],
    followed: set[int],
    path: str | None,
) -> None:
    """`Tables.cosines`, `Tables.of(n)`: values and methods of a class of the user's."""
    if not _of_the_user(kind.__module__) or issubclass(kind, nn.Module):
        return
    _of_class(kind, found, path)
    for name in names:
        for inner in _functions(vars(kind).get(name)):
            _follow(inner, found, followed, path)


def _in_module(
    module: types.ModuleType,
    names: Iterable[str],
    found: dict[Any, Name],
    followed: set[int],
    path: str | None,
) -> None:
    """`settings.alpha`, `rope.table(n)`: plain values and functions of a module of the user's."""
    if not _of_the_user(module.__name__):
        return
    entries = vars(module)
    for name in names:
        value = entries.get(name)
        if isinstance(value, types.ModuleType) and id(value) not in followed:
            followed.add(id(value))
            _in_module(value, names, found, followed, path)
        functions = _functions(value)
        if functions or isinstance(value, (*PLAIN, list, dict, tuple, set)):
            found[id(entries), name] = Name(entries, name, f"{module.__name__}.{name}", path)
        _follow_all(value, found, followed, path)


def _of_the_user(module: str | None) -> bool:
    return (module or "").partition(".")[0] not in OTHERS


def _names_in(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names_in(constant)
    return names
