"""The tensors of one recording, by name."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from gems.errors import TraceError
from gems.model.graph import Value
from gems.torch.tensors.storage import storage_of
from gems.torch.tracing.calls import Attr, Ref
from gems.torch.tracing.unrecordable import REMEDY


class Values:
    """`weights` are the names of fake weights by id; `earlier` are tensors of an earlier run."""

    def __init__(
        self, weights: Mapping[int, str], device: torch.device, earlier: Values | None
    ) -> None:
        self.weights, self.device = weights, device
        self.named: dict[str, Value] = {}
        self.known: dict[int, tuple[str, torch.Tensor]] = {}  # id of a tensor -> its value
        self.earlier = dict(earlier.known) if earlier else {}
        self.given: dict[int, torch.Tensor] = {}  # what the model was given, by the fake's id
        self.seen_in: dict[int, list[int]] = {}  # storage -> ids of the tensors that see it
        self.names_in: dict[int, list[str]] = {}  # storage -> all values that ever saw it
        self.kept: list[Any] = []  # keeps ids of tensors and storages unique
        self.counts: dict[str, int] = {}

    def fake(self, x: Any) -> Any:
        """A fake tensor like `x`, under the fake mode of the recording."""
        if not isinstance(x, torch.Tensor):
            return x
        y = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=self.device)
        self.given[id(y)] = x
        self.kept.append(y)
        return y.requires_grad_(x.requires_grad)

    def add(self, tensor: torch.Tensor, name: str) -> str:
        dtype = str(tensor.dtype).removeprefix("torch.")
        self.named[name] = Value(
            name, tuple(tensor.shape), tuple(tensor.stride()), dtype, tensor.requires_grad
        )
        storage = storage_of(tensor)
        if id(tensor) not in self.known:
            self.seen_in.setdefault(storage, []).append(id(tensor))
        self.known[id(tensor)] = (name, tensor)
        self.names_in.setdefault(storage, []).append(name)
        self.kept.append(tensor)
        return name

    def unique(self, name: str, mark: str = ":") -> str:
        """`relu`, `relu:2`; results `relu`, `relu#1`; versions after changes in place `relu~1`."""
        key = name + mark
        number = self.counts[key] = self.counts.get(key, 0) + 1
        if mark == "#":
            return name if number == 1 else f"{name}#{number - 1}"
        return f"{name}{mark}{number}" if number > 1 or mark == "~" else name

    def names(self, tensors: list[torch.Tensor]) -> tuple[str, ...]:
        """The values among these tensors, each once."""
        return tuple(dict.fromkeys(self.known[id(t)][0] for t in tensors if id(t) in self.known))

    def placeholder(self, x: Any) -> Any:
        """What a recorded call has in place of a tensor."""
        if not isinstance(x, torch.Tensor):
            return x
        if id(x) in self.weights:
            return Attr(self.weights[id(x)])
        return Ref(self.known[id(x)][0]) if id(x) in self.known else x

    def inputs(self, args: Any, kwargs: Any) -> tuple[str, ...]:
        found = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        return tuple(self.add(x, f"input{i}" if i else "input") for i, x in enumerate(found))

    def outputs(self, result: Any, model: str) -> tuple[Any, tuple[str, ...]]:
        """The model's output with `Ref` in place of tensors, and the names of these."""
        for x in pytree.tree_leaves(result):
            if isinstance(x, torch.Tensor) and id(x) not in self.known:
                raise TraceError(
                    f"{model}.forward returns a tensor that no recorded call made (shape "
                    f"{tuple(x.shape)}). {REMEDY}"
                )
        output = pytree.tree_map(self.placeholder, result)
        names = self.names(pytree.tree_leaves(result))
        if not names:
            raise TraceError(
                f"{model}.forward returns {type(result).__name__}, in which no tensor was found; "
                "return a tensor, or tuples, lists or dicts of them"
            )
        return output, names

    def storages(self) -> dict[str, int]:
        return {name: storage for storage, names in self.names_in.items() for name in names}

    def forget(self) -> list[weakref.ref[torch.Tensor]]:
        """Drop all tensors; weak references to those that have a name."""
        made = [weakref.ref(tensor) for _, tensor in self.known.values()]
        for held in (self.known, self.earlier, self.seen_in, self.kept, self.given):
            held.clear()
        return made
