"""Fake tensors in place of a model's parameters and buffers, while it is recorded."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from gems.errors import TraceError
from gems.model.graph import Weight
from gems.torch.tensors.storage import storage_of
from gems.torch.tracing.held_weights import replaced


class FakeWeights:
    """Weights by their first names, and their fake doubles, shared where they are shared."""

    def __init__(self, model: nn.Module, mode: FakeTensorMode, device: torch.device) -> None:
        self.model, self.mode, self.device = model, mode, device
        self.parameters: dict[str, Weight] = {}
        self.buffers: dict[str, Weight] = {}
        self.first_names: dict[str, str] = {}  # every name -> the first one
        self.named: dict[int, str] = {}  # id of a fake -> its first name
        self.in_storage: dict[int, list[str]] = {}  # storage -> the weights in it
        self._fakes: dict[int, torch.Tensor] = {}
        self._held: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            held = (dict(module._parameters), dict(module._buffers))
            self._held.setdefault(id(module), held)
            _reject_unmade(path, held[0])
            for own, into in zip(held, (self.parameters, self.buffers), strict=True):
                for key, tensor in own.items():
                    if tensor is not None:
                        self._add(f"{path}.{key}" if path else key, tensor, into)

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The fake of a weight that was reached in another way than through its module."""
        tensor = replaced(tensor)
        return self._fakes.get(id(tensor))

    def _add(self, name: str, tensor: torch.Tensor, into: dict[str, Weight]) -> None:
        if id(tensor) not in self._fakes:
            self._fakes[id(tensor)] = fake = self._double(tensor)
            self.named[id(fake)] = name
            self.in_storage.setdefault(storage_of(fake), []).append(name)
            dtype = str(tensor.dtype).removeprefix("torch.")
            into[name] = Weight(name, tuple(tensor.shape), dtype)
        self.first_names[name] = self.named[id(self._fakes[id(tensor)])]

    def _double(self, tensor: torch.Tensor) -> torch.Tensor:
        """Made by hand: two operations for each of thousands of weights would take seconds."""
        shape = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"
        )
        fake = FakeTensor(self.mode, shape, self.device)
        if isinstance(tensor, nn.Parameter):
            fake._is_param = True  # type: ignore[attr-defined]
            fake.requires_grad_(tensor.requires_grad)
        return fake

    def names_of(self, ids: Container[int]) -> list[str]:
        """The weights that have one of these ids."""
        return [self.named[id(fake)] for i, fake in self._fakes.items() if i in ids]

    def touched(self, changed: Iterable[torch.Tensor], written: Iterable[int]) -> tuple[str, ...]:
        """The weights that see the memory of these fakes or of these storages."""
        changed = list(changed)
        names = [self.named[id(t)] for t in changed if id(t) in self.named]
        for storage in (*map(storage_of, changed), *written):
            names += self.in_storage.get(storage, ())
        return tuple(dict.fromkeys(names))

    def stand_ins(self) -> dict[int, torch.Tensor]:
        """For the weights that have no memory just now, by id: ordinary ones on the host."""
        found: dict[int, torch.Tensor] = {}
        for own in (kind for held in self._held.values() for kind in held):
            for t in own.values():
                if t is None or id(t) in found or not _without_memory(t):
                    continue
                new = torch.full(t.shape, 0.5, device="cpu").to(t.dtype)
                parameter = isinstance(t, nn.Parameter)
                found[id(t)] = nn.Parameter(new, t.requires_grad) if parameter else new
        return found

    def holder(self, name: str) -> nn.Module:
        return self.model.get_submodule(name.rpartition(".")[0])

    def reinstalled(self, root: nn.Module) -> list[torch.Tensor]:
        """The buffers of a module that its forward assigned; it has their fakes again."""
        found = []
        for module in root.modules():
            for key, tensor in self._held.get(id(module), ({}, {}))[1].items():
                if tensor is not None and module._buffers.get(key) is not self._fakes[id(tensor)]:
                    module._buffers[key] = fake = self._fakes[id(tensor)]
                    found.append(fake)
        return found

    def made(self) -> list[tuple[nn.Module, str, str]]:
        """What forward registered or replaced without an assignment: module, kind and key."""
        found = []
        for module in self.model.modules():
            own = self._held.get(id(module))
            if own is None:
                found.append((module, "module", type(module).__name__))
                continue
            kinds = ("parameter", "buffer")
            now = (module._parameters, module._buffers)
            for kind, was, current in zip(kinds, own, now, strict=True):
                for key, tensor in current.items():
                    expected = was.get(key)
                    expected = None if expected is None else self._fakes[id(expected)]
                    assigned = kind == "buffer" and expected is not None
                    if tensor is not expected and not assigned:
                        found.append((module, kind, key))
        return found

    @contextmanager
    def installed(self) -> Iterator[None]:
        """The model on fakes; its own weights are back afterwards, whatever happens."""
        try:
            self.swap(self.model, fake=True)
            yield
        finally:
            self.swap(self.model, fake=False)

    def swap(self, root: nn.Module, *, fake: bool) -> None:
        for module in root.modules():
            for own, now in zip(
                self._held.get(id(module), ({}, {})),
                (module._parameters, module._buffers),
                strict=True,
            ):
                for key in [key for key in now.keys() if key not in own]:  # noqa: SIM118 (script)
                    del now[key]
                for key, tensor in own.items():
                    given = self._fakes[id(tensor)] if fake and tensor is not None else tensor
                    now[key] = given  # type: ignore


def _without_memory(tensor: torch.Tensor) -> bool:
    """On the meta device, or sharded or offloaded: its storage was released."""
    return tensor.is_meta or tensor.untyped_storage().nbytes() < tensor.nbytes


def _reject_unmade(path: str, parameters: dict[str, Any]) -> None:
    if any(isinstance(p, nn.UninitializedParameter) for p in parameters.values()):
        raise TraceError(
            f"{path or 'the model'} is lazy: its parameters get their shape in its first forward; "
            "run the model once on a real micro-batch before giving it to GEMS"
        )
