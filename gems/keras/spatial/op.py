"""A recorded op seen by its layer rule: its inputs and attributes, and how the inputs are tiled."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from gems.geometry.layout import Layout
from gems.keras.tracing.subgraph import Tensor, is_shape


class NotTileable(Exception):
    """Why an op has no exact form on tiles."""


@dataclass(frozen=True)
class Op:
    """One op of the recorded graph, and the layouts of the tiled values before it."""

    op: Any
    layouts: Mapping[str, Layout]
    forward: Collection[str]  # the ops of the model, which gradients were added behind

    @property
    def type(self) -> str:
        return self.op.type

    @property
    def inputs(self) -> list[Tensor]:
        return list(self.op.inputs)

    @property
    def outputs(self) -> list[Tensor]:
        return list(self.op.outputs)

    @property
    def out(self) -> Tensor:
        """The only result."""
        if len(self.op.outputs) != 1:
            raise NotTileable(f"gives {len(self.op.outputs)} results")
        return self.op.outputs[0]

    @property
    def tiled(self) -> list[Tensor]:
        """The inputs that are tiled, each once."""
        return list({t.name: t for t in self.op.inputs if t.name in self.layouts}.values())

    def layout(self, t: Tensor) -> Layout | None:
        return self.layouts.get(t.name)

    def only(self, t: Tensor) -> Layout:
        """The layout of the input that matters, which must be the only tiled one."""
        layout = self.layouts.get(t.name)
        if layout is None or len(self.tiled) > 1:
            raise NotTileable("reads a tiled tensor where it takes a whole one")
        return layout

    def attr(self, name: str, default: Any = None) -> Any:
        if name not in self.op.node_def.attr:
            return default
        found = self.op.get_attr(name)
        return found.decode() if isinstance(found, bytes) else found

    def const(self, at: int) -> Any:
        """An input that is known before anything runs, as an array."""
        found = tf.get_static_value(self.op.inputs[at])
        if found is None:
            raise NotTileable("takes a size or an axis that depends on values")
        return found

    def readers(self, t: Tensor) -> list[Any]:
        """The ops of the model that read the numbers of a tensor."""
        return [op for op in t.consumers() if op.name in self.forward and not is_shape(op)]


def shape_of(t: Tensor) -> tuple[int, ...]:
    if not t.shape.is_fully_defined():
        raise NotTileable(f"makes {t.shape}, which depends on values")
    return tuple(t.shape.as_list())


def moved(layout: Layout, shape: Sequence[int], dims: Sequence[int]) -> Layout:
    """The same tiles along other dims of a tensor, whose lengths there are the same."""
    return Layout(tuple(shape), tuple(dims), layout.own, layout.own)
