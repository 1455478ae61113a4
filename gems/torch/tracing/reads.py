"""What a recording reads and writes of Python's state: attributes of modules, and global names."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from gems.torch.tracing.frozen import (
    MISSING,
    Difference,
    Frozen,
    difference,
    freeze,
    put_back,
)
from gems.torch.tracing.variables import ALL, INTERNAL, Name

HOOKS = tuple(name for name in vars(nn.Module()) if "_hooks" in name and name[:1] == "_")
METHODS = frozenset(vars(nn.Module)) - {"forward"}  # nobody replaces these


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
