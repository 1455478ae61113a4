"""What a recording depends on besides its inputs; checked before it is used again.

Attributes that forward read, variables of its functions, the hooks of the modules it went through,
the submodules themselves. A recording whose guards fail is not used, and the model is recorded
again. Weights belong to the Trainer: a parameter that was replaced is rejected.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from itertools import repeat
from operator import is_
from typing import Any

import torch
from torch import nn

from gems.errors import TraceError
from gems.torch.calls import Record
from gems.torch.frozen import MISSING, PLAIN, Difference, Frozen, difference, freeze
from gems.torch.reads import KEPT, Name, variables, variables_of_hooks

ABSENT = repeat(MISSING)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Guards:
    """The values that one recording of a model depends on, as they are now."""

    def __init__(self, model: nn.Module, record: Record) -> None:
        self.plain: list[tuple[Any, tuple[str, ...], tuple[Any, ...], str]] = []
        self.deep: list[tuple[Name, Any]] = []
        self.hooks: list[tuple[Any, tuple[Any, ...], str]] = []
        memo: dict[int, Any] = {}
        wanted: dict[str, list[str]] = {}
        for path, name in record.reads:
            wanted.setdefault(path, []).append(name)
        for path, names in wanted.items():
            self._attributes(path, model.get_submodule(path), names, memo)
        containers = {path: model.get_submodule(path) for path in record.containers}
        around = [n for n in variables(containers.values()) if not isinstance(n.mapping, KEPT)]
        around += variables_of_hooks(containers)
        self.deep += [(n, freeze(n.mapping.get(n.key, MISSING), memo)) for n in around]
        for path, module in containers.items():
            for kind in ("_modules", *HOOKS):
                hooks = vars(module)[kind]
                self.hooks.append((hooks, tuple(hooks.values()), f"{path}{kind}"))

    def _attributes(self, path: str, module: nn.Module, names: list[str], memo: Any) -> None:
        own, label = vars(module), path or type(module).__name__
        values = [freeze(own.get(name, MISSING), memo) for name in names]
        flat = {n: v for n, v in zip(names, values, strict=True) if not isinstance(v, Frozen)}
        if flat:
            self.plain.append((own, tuple(flat), tuple(flat.values()), label))
        for name, value in zip(names, values, strict=True):
            if isinstance(value, Frozen):
                self.deep.append((Name(own, name, f"{label}.{name}"), value))
            elif value is MISSING:
                self._of_class(type(module), name, label, memo)

    def _of_class(self, kind: type, name: str, label: str, memo: Any) -> None:
        for base in kind.__mro__:
            if name in vars(base):
                value = freeze(vars(base)[name], memo)
                self.deep.append((Name(vars(base), name, f"{label}.{name}"), value))
                return

    def failed(self) -> Difference | None:
        """The first value that is not what it was; None: the recording may be used."""
        for own, names, values, label in self.plain:
            if not all(map(is_, map(own.get, names, ABSENT), values)):
                now = [own.get(name, MISSING) for name in names]
                for name, value, other in zip(names, values, now, strict=True):
                    if (found := difference(value, other, f"{label}.{name}")) is not None:
                        return found
        for hooks, values, label in self.hooks:
            if not hooks and not values:
                continue
            if len(hooks) != len(values) or not all(map(is_, hooks.values(), values)):
                return Difference(label, values, tuple(hooks.values()))
        seen: set[int] = set()
        for name, value in self.deep:
            now = name.mapping.get(name.key, MISSING)
            same = now is value
            if not same and (found := difference(value, now, name.label, seen)) is not None:
                return found
        return None

    def digest(self) -> int:
        """A number of the plain values, the same on ranks whose models have the same."""
        shown = [
            (label, names, tuple(map(_text, values))) for _, names, values, label in self.plain
        ]
        return zlib.crc32(repr(shown).encode())


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
        self.rows = [
            (m._modules, tuple(m._modules.values()), m._parameters, tuple(m._parameters.values()))
            for m in self.modules
        ]
        self.parameters = list(self.model.parameters())

    def mode(self) -> int:
        """What else a recording depends on: which modules train, and which parameters."""
        self._check()
        trains = tuple([m.training for m in self.modules])
        wants = tuple([p.requires_grad for p in self.parameters])
        return hash((trains, wants, torch.is_grad_enabled()))

    def _check(self) -> None:
        """Submodules may have been replaced, but all weights must be those that are trained."""
        for modules, children, parameters, own in self.rows:
            if (
                len(modules) != len(children)
                or len(parameters) != len(own)
                or not all(map(is_, modules.values(), children))
                or not all(map(is_, parameters.values(), own))
            ):
                self._refuse_other_weights()
                self._note()
                return

    def _refuse_other_weights(self) -> None:
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
