"""Joining and dividing along dims that are not tiled."""

from __future__ import annotations

import tensorflow as tf

from gems.geometry.layout import Layout
from gems.keras.spatial.op import NotTileable, Op, moved, shape_of
from gems.keras.spatial.rule import Rule, Tile, rule
from gems.keras.tracing.subgraph import Tensor


@rule("ConcatV2")
def concat(op: Op) -> Rule:
    *xs, _ = op.inputs
    layout = op.layouts[op.tiled[0].name]
    axis = int(op.const(len(xs))) % len(layout.shape)
    out = _across(op, layout, axis)

    def write(tile: Tile) -> list[Tensor]:
        parts = [tile.read(t) if t.name in op.layouts else tile.cut(t, out) for t in xs]
        return [tf.concat(parts, axis)]

    return Rule({op.out.name: out}, {t.name: out.own for t in op.tiled}, write)


def _across(op: Op, layout: Layout, axis: int) -> Layout:
    if axis in layout.dims:
        raise NotTileable("joins along a tiled dim")
    if any(op.layouts[t.name].dims != layout.dims for t in op.tiled):
        raise NotTileable("joins tensors that are tiled along different dims")
    return moved(layout, shape_of(op.out), layout.dims)


@rule("Pack")
def stack(op: Op) -> Rule:
    layout = op.layouts[op.tiled[0].name]
    axis = op.attr("axis") % (len(layout.shape) + 1)
    if any(op.layouts[t.name].dims != layout.dims for t in op.tiled):
        raise NotTileable("joins tensors that are tiled along different dims")
    out = moved(layout, shape_of(op.out), [d + (d >= axis) for d in layout.dims])
    before = moved(layout, layout.shape, layout.dims)

    def write(tile: Tile) -> list[Tensor]:
        parts = [tile.read(t) if t.name in op.layouts else tile.cut(t, before) for t in op.inputs]
        return [tf.stack(parts, axis)]

    return Rule({op.out.name: out}, {t.name: out.own for t in op.tiled}, write)


@rule("Split", "SplitV", "Unpack")
def split(op: Op) -> Rule:
    at = {"Split": 1, "SplitV": 0, "Unpack": 0}[op.type]
    x = op.inputs[at]
    layout = op.only(x)
    if op.type == "Unpack":
        axis = op.attr("axis") % len(layout.shape)
    else:
        axis = int(op.const({"Split": 0, "SplitV": 2}[op.type])) % len(layout.shape)
    if axis in layout.dims:
        raise NotTileable("divides a tiled dim")
    gone = op.type == "Unpack"
    dims = [d - (gone and d > axis) for d in layout.dims]
    outs = {y.name: moved(layout, shape_of(y), dims) for y in op.outputs}

    def write(tile: Tile) -> list[Tensor]:
        return tile.copied([tile.read(t) for t in op.inputs])

    return Rule(outs, {x.name: layout.own}, write)
