"""A recorded call seen by its layer rule: its arguments, and how its inputs are tiled."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from gems.geometry.layout import Layout, layout_like
from gems.model.graph import Value, Weight
from gems.torch.spatial.computed_weights import shown
from gems.torch.tensors.rng import Draws
from gems.torch.tracing.calls import Attr, Call, Ref, name_of

Tensor = torch.Tensor
Run = Callable[..., Any]
FIRST = ("input", "tensors")  # torch's names for the first argument of the functions with a rule


class NotTileable(Exception):
    """Why a call has no exact form on tiles."""


@dataclass
class Op:
    """One call, and what is known before it."""

    call: Call
    model: nn.Module
    values: Mapping[str, Value]
    layouts: dict[str, Layout]  # of the tiled values so far
    weights: Mapping[str, Weight]
    producers: Mapping[str, Call]  # of every value
    draws: Draws
    must_copy: bool = False  # its result must not share memory with what it reads, as views might
    by_name: str | None = None  # the input, if the model gives it by name only

    def input_first(self) -> Op:
        """The same, with its input in front also where the model gives it by name."""
        name = next((name for name in FIRST if name in self.call.kwargs), None)
        if self.call.args or name is None:
            return self
        rest = dict(self.call.kwargs)
        call = replace(self.call, args=(rest.pop(name),), kwargs=rest)
        return replace(self, call=call, by_name=name)

    @cached_property
    def module(self) -> nn.Module | None:
        return None if self.call.module is None else self.model.get_submodule(self.call.module)

    def producer(self, name: str) -> Op | None:
        """The op that makes a value, in whatever stage."""
        return replace(self, call=self.producers[name]) if name in self.producers else None

    @property
    def name(self) -> str:
        """The name of the function, or of the module's class."""
        return name_of(self.call.function) if self.module is None else type(self.module).__name__

    @cached_property
    def tiled(self) -> list[str]:
        """The inputs that are tiled, in the order in which they are read."""
        return [name for name in self.call.reads if name in self.layouts]

    @property
    def out(self) -> str:
        """The call's only result."""
        if len(self.call.writes) != 1:
            raise NotTileable(f"gives {len(self.call.writes)} results")
        return self.call.writes[0]

    def shape(self, x: str | Ref | Attr | Tensor) -> tuple[int, ...]:
        """The shape of all of a value, of a weight, or of a constant."""
        if isinstance(x, str | Ref):
            return self.values[x.name if isinstance(x, Ref) else x].shape
        return tuple(self.weights[x.name].shape if isinstance(x, Attr) else x.shape)

    def layout(self, x: Any) -> Layout | None:
        return self.layouts.get(x.name) if isinstance(x, Ref) else None

    def layout_like(self, shape: Sequence[int]) -> Layout:
        """The layout of an image of this size: a tensor that is made so large may be tiled so."""
        found = layout_like(shape, reversed(self.layouts.values()))
        if found is None:
            raise NotTileable(f"makes {tuple(shape)}, and no such image is tiled")
        return found

    def named(self, stub: Run, attributes: Sequence[str] = ()) -> dict[str, Any]:
        """The recorded arguments by name: of a function, or of a module's input and settings."""
        return named(stub, self.module, attributes, self.call.args, self.call.kwargs, shown)

    def primary(self, x: Any) -> Layout:
        """The layout of the input that matters, which must be the only tiled one."""
        layout = self.primary_of(x)
        if len(self.tiled) > 1:
            raise NotTileable("reads several tiled tensors")
        return layout

    def primary_of(self, x: Any) -> Layout:
        layout = self.layout(x)
        if layout is None:
            raise NotTileable("reads a tiled tensor where it takes a whole one")
        return layout


def named(
    stub: Run,
    module: nn.Module | None,
    attributes: Sequence[str],
    args: Any,
    kwargs: Any,
    get: Callable[[nn.Module, str], Any] = getattr,
) -> dict[str, Any]:
    """Arguments by the names in the signature of `stub`; settings of a module by `attributes`."""
    if module is not None:
        found = {name: get(module, name) for name in attributes if _has(module, name)}
        inputs = (name for name in _signature(stub).parameters if name not in found)
        return found | dict(zip(inputs, args, strict=False)) | kwargs
    try:
        bound = _signature(stub).bind(*args, **kwargs)
    except TypeError as error:
        raise NotTileable(f"is called in a way that is not known here ({error})") from error
    bound.apply_defaults()
    return dict(bound.arguments)


_signature = cache(inspect.signature)


def _has(module: nn.Module, name: str) -> bool:
    """Whether a module has a setting, found without computing it."""
    return is_parametrized(module, name) or hasattr(module, name)
