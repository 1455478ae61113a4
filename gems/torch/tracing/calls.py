"""What a recording is made of: calls with places for tensors, as plain as can be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from gems.model.graph import Value, Weight


@dataclass(frozen=True)
class Ref:
    """A value, by name, where a call had a tensor."""

    name: str


@dataclass(frozen=True)
class Attr:
    """A parameter or buffer, by its first name in the model, where a call had a tensor."""

    name: str


def is_placeholder(x: Any) -> bool:
    """Whether something stands where a call had a tensor."""
    return isinstance(x, (Ref, Attr))


@dataclass
class Call:
    """One recorded call. `args` and `kwargs` have `Ref` and `Attr` in place of tensors.

    `outs` are the values it gives, with the path to each inside its result. `mutates` are pairs
    (value before, value after) of values that it changed in place, where the value after is None
    if the call also returns it; `overwrites` are all values that ever saw that memory. `touches`
    are weights that it changed, `norms` the layers with running statistics that it ran.
    """

    name: str
    layer: str
    module: str | None
    function: Callable[..., Any] | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: tuple[str, ...]
    attrs: tuple[str, ...]
    outs: list[tuple[tuple[Any, ...], str]] = field(default_factory=list)
    mutates: list[tuple[str, str | None]] = field(default_factory=list)
    overwrites: tuple[str, ...] = ()
    touches: tuple[str, ...] = ()
    norms: tuple[str, ...] = ()
    grad: bool = True
    autocast: tuple[bool, torch.dtype] | None = None
    random: bool = False
    pointwise: bool = False  # every cell by itself
    region: int | None = None
    saves: dict[int, int] = field(default_factory=dict)
    flops: int = 0
    moved: int = 0

    @property
    def writes(self) -> tuple[str, ...]:
        return (*(name for _, name in self.outs), *(new for _, new in self.mutates if new))


@dataclass
class Record:
    """All calls of one forward, for one input signature."""

    calls: list[Call]
    values: dict[str, Value]
    inputs: tuple[str, ...]
    output: Any  # the model's output, with Ref in place of tensors
    outputs: tuple[str, ...]
    parameters: dict[str, Weight]
    buffers: dict[str, Weight]
    names: dict[str, str]  # every name of a parameter or buffer -> its first name
    atomic: list[tuple[int, int]]  # first and last call of runs that stay on one stage
    device: str  # kind of device that it was recorded for
    leaves: tuple[str, ...]  # modules that had to be taken whole
    storages: dict[str, int] = field(default_factory=dict)  # the memory of each value, as in saves
    reads: tuple[tuple[str, str], ...] = ()  # attributes that it depends on: module, name
    containers: tuple[str, ...] = ()  # modules that were recorded inside
    assigned: list[tuple[str, str, Any]] = field(default_factory=list)  # what forward left there
    free: set[str] | None = (
        None  # buffers that no sample changes (sampleless_buffers.py), once asked for
    )
    impure: list[tuple[str, str]] = field(default_factory=list)  # leaves with Python state, what


def tensors_in(result: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The tensors of a call's result, with the keys that lead to each."""
    if isinstance(result, torch.Tensor):
        yield path, result
    elif isinstance(result, dict):
        for key, item in result.items():
            yield from tensors_in(item, (*path, key))
    elif isinstance(result, (tuple, list)):
        for key, item in enumerate(result):
            yield from tensors_in(item, (*path, key))


def leaves_of(output: Any) -> list[Ref]:
    """The values in a model's output, in order."""
    leaves = pytree.tree_leaves(output, is_leaf=is_placeholder)
    return [x for x in leaves if isinstance(x, Ref)]


def name_of(func: Any) -> str:
    """What a recorded function is called."""
    if isinstance(func, torch.jit.ScriptFunction):
        return str(func.qualified_name).rpartition(".")[2]
    owner = getattr(func, "__self__", None)
    name = getattr(func, "__name__", type(func).__name__)
    if name == "__get__" or name == "apply":
        name = getattr(owner, "__name__", name)
    return name.strip("_") or name
