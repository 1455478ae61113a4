"""Fake tensors in place of a model's parameters and buffers, while it is recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from gems.graph import Weight
from gems.torch.meter import storage_of


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
            for own, into in zip(held, (self.parameters, self.buffers), strict=True):
                for key, tensor in own.items():
                    if tensor is not None:
                        self._add(f"{path}.{key}" if path else key, tensor, into)

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
                for key, tensor in own.items():
                    if tensor is not None:
                        now[key] = self._fakes[id(tensor)] if fake else tensor  # type: ignore
