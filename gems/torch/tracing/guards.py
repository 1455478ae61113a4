"""What a recording depends on besides its inputs; checked before it is used again.

Attributes that forward read, variables of its functions, the hooks of the modules it went through,
the submodules themselves. A recording whose guards fail is not used, and the model is recorded
again. Weights belong to the Trainer: a parameter that was replaced is rejected.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from itertools import chain, repeat
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from gems.errors import TraceError
from gems.torch.tracing.calls import Record
from gems.torch.tracing.frozen import (
    MISSING,
    PLAIN,
    Difference,
    Frozen,
    as_it_was,
    difference,
    freeze,
    thing_of,
    within,
)
from gems.torch.tracing.identity import Identities
from gems.torch.tracing.variables import Name, of_class, variables, variables_of_hooks

ABSENT = repeat(MISSING)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
GLOBAL_HOOKS = tuple(f"_global{kind}" for kind in HOOKS)


class Guards:
    """The values that one recording of a model depends on, as they are now.

    `failed` compares identities first, all of them in C. Only if one differs does it look for what
    is not equal, by Python.
    """

    def __init__(self, model: nn.Module, record: Record) -> None:
        memo: dict[int, Any] = {}
        names = list(_attributes(model, record.reads))
        self.attributes = len(names)
        containers = {path: model.get_submodule(path) for path in record.containers}
        around = [*variables(containers.values()), *variables_of_hooks(containers)]
        names += [n for n in around if not n.kept]
        self.names = sorted(names, key=lambda n: type(n.mapping) is not dict)
        self.frozen = [freeze(n.now(), memo) for n in self.names]
        self.own = {id(n): None for n in names[: self.attributes]}
        self.hooks = list(_hooks(containers))
        self.held = Identities(mapping for mapping, _, _ in self.hooks)
        self._flatten()

    def _flatten(self) -> None:
        """Have what `_identical` compares, as the frozen values are."""
        count = sum(type(n.mapping) is dict for n in self.names)
        self.mappings = [n.mapping for n in self.names[:count]]
        self.keys = [n.key for n in self.names[:count]]
        self.elsewhere = self.names[count:]
        self.things = list(map(thing_of, self.frozen))
        inside = within(x for x in self.frozen if isinstance(x, Frozen))
        self.objects = [x.thing for x in inside if x.kind == "object"]
        self.dicts = list(map(vars, self.objects))
        containers = [x.thing for x in inside if x.kind in ("list", "dict", "deque")]
        self.inside = Identities((*self.dicts, *containers))
        self.others = [x for x in inside if x.kind not in ("object", "list", "dict", "deque")]

    def _identical(self) -> bool:
        now = chain(
            map(dict.get, self.mappings, self.keys, ABSENT), [n.now() for n in self.elsewhere]
        )
        return (
            all(map(is_, now, self.things))
            and self.held.hold()
            and all(map(is_, map(vars, self.objects), self.dicts))
            and self.inside.hold()
            and all(map(as_it_was, self.others))
        )

    def failed(self) -> Difference | None:
        """The first value that is not what it was; None: the recording may be used."""
        if self._identical():
            return None
        seen: set[int] = set()
        for name, value in zip(self.names, self.frozen, strict=True):
            now = name.now()
            if now is not value and (found := difference(value, now, name.label, seen)) is not None:
                return found
        for mapping, values, label in self.hooks:
            if len(mapping) != len(values) or not all(map(is_, mapping.values(), values)):
                return Difference(label, values, tuple(mapping.values()))
        self._renew()
        return None

    def _renew(self) -> None:
        """Values are equal, but not the same objects: the next comparison is with these."""
        memo: dict[int, Any] = {}
        for i, (name, value) in enumerate(zip(self.names, self.frozen, strict=True)):
            if isinstance(value, Frozen) or name.now() is not value:
                self.frozen[i] = freeze(name.now(), memo)
        self.held = Identities(mapping for mapping, _, _ in self.hooks)
        self._flatten()

    def digest(self) -> int:
        """A number of the plain values, the same on ranks whose models have the same."""
        shown = [
            (name.label, _text(value))
            for name, value in zip(self.names, self.frozen, strict=True)
            if id(name) in self.own and not isinstance(value, Frozen)
        ]
        return zlib.crc32(repr(shown).encode())


def _attributes(model: nn.Module, reads: Iterable[tuple[str, str]]) -> Iterator[Name]:
    """Attributes of modules; if one has none of its own, that of its class as well."""
    modules = dict(model.named_modules(remove_duplicate=False))
    classes: set[tuple[type, str]] = set()
    for path, key in reads:
        module = modules[path]
        kind, own = type(module), vars(module)
        label = f"{path or kind.__name__}.{key}"
        yield Name(own, key, label)
        if key not in own and (kind, key) not in classes:
            classes.add((kind, key))
            yield from of_class(kind, key, label)


def _hooks(containers: dict[str, nn.Module]) -> Iterator[tuple[Any, tuple[Any, ...], str]]:
    """Hooks and submodules: where they are held, what they are, and what to call them in errors."""
    for path, module in containers.items():
        for kind in ("_modules", *HOOKS):
            found = vars(module)[kind]
            yield found, tuple(found.values()), f"{path}{kind}"
    for kind in GLOBAL_HOOKS:
        found = vars(torch_module)[kind]
        yield found, tuple(found.values()), kind


def _text(value: Any) -> str:
    return repr(value) if isinstance(value, PLAIN) else type(value).__name__


class Structure:
    """The modules of a model and their weights, as the Trainer took them."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.names = dict(_weights(model))
        self._note()

    def _note(self) -> None:
        self.modules = list(self.model.modules())
        kinds = ("_modules", "_parameters")
        self.held = Identities(vars(m)[kind] for m in self.modules for kind in kinds)
        self.parameters = list(self.model.parameters())
        self.last = 0  # what `mode` gave last

    def mode(self) -> int:
        """What else a recording depends on: which modules train, and which parameters."""
        self._check()
        trains = tuple([m.training for m in self.modules])
        wants = tuple([p.requires_grad for p in self.parameters])
        self.last = hash((trains, wants, torch.is_grad_enabled()))
        return self.last

    def _check(self) -> None:
        """Submodules may have been replaced, but all weights must be those that are trained."""
        if not self.held.hold():
            self._reject_other_weights()
            self._note()

    def _reject_other_weights(self) -> None:
        now = dict(_weights(self.model))
        for name in (*self.names, *now):
            if now.get(name) is not self.names.get(name):
                what = "was replaced" if name in now and name in self.names else (
                    "was added" if name in now else "was removed"
                )  # fmt: skip
                raise TraceError(
                    f"the parameter {name} {what} after the Trainer took the model, so it would "
                    "not be trained; change parameters in place (with torch.no_grad(): p.copy_(...)"
                    "), or make a new Trainer"
                )


def _weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return model.named_parameters(remove_duplicate=False)


def apply_assigned(model: nn.Module, record: Record) -> None:
    """Leave on the modules the plain values that forward leaves there."""
    for path, name, value in record.assigned:
        vars(model.get_submodule(path))[name] = value
