"""Sums, means and extremes: over channels on each tile, over the image over the spatial group."""

from __future__ import annotations

from math import prod

import tensorflow as tf

from gems.geometry.layout import Layout
from gems.keras.spatial.op import NotTileable, Op, moved, shape_of
from gems.keras.spatial.rule import Rule, Tile, rule
from gems.keras.tracing.subgraph import Tensor


@rule("Mean", "Sum", "Max", "Min", "Prod", "All", "Any", "ArgMax", "ArgMin", "EuclideanNorm")
def reduce(op: Op) -> Rule:
    x = op.inputs[0]
    layout = op.only(x)
    axes = {int(a) % len(layout.shape) for a in op.const(1).reshape(-1)}
    if not axes & set(layout.dims):
        return _inside(op, layout, axes)
    if not set(layout.dims) <= axes:
        raise NotTileable("reduces some of the tiled dims, but not all")
    if op.type in ("Mean", "Sum"):
        return _summed(op, layout, axes)
    if op.type in ("Max", "Min"):
        return _extreme(op, layout, axes)
    raise NotTileable("has no exact form over a tiled dim that is known")


def _inside(op: Op, layout: Layout, axes: set[int]) -> Rule:
    """Over dims that are not tiled: by every rank on its tile."""
    keeps = bool(op.attr("keep_dims"))
    gone = 0 if keeps else 1
    dims = [d - gone * sum(a < d for a in axes) for d in layout.dims]

    def write(tile: Tile) -> list[Tensor]:
        return tile.copied([tile.read(t) for t in op.inputs])

    out = moved(layout, shape_of(op.out), dims)
    return Rule({op.out.name: out}, {op.inputs[0].name: layout.own}, write)


def _summed(op: Op, layout: Layout, axes: set[int]) -> Rule:
    x, keeps = op.inputs[0], bool(op.attr("keep_dims"))
    count = prod(layout.shape[a] for a in axes) if op.type == "Mean" else 1

    def write(tile: Tile) -> list[Tensor]:
        found = tile.all_reduce(tf.reduce_sum(tile.read(x), sorted(axes), keepdims=keeps))
        return [found / tf.constant(count, found.dtype) if count != 1 else found]

    sums = prod(shape_of(op.out))
    return Rule({}, {x.name: layout.own}, write, sums=sums, totals=1)


def _extreme(op: Op, layout: Layout, axes: set[int]) -> Rule:
    """The extreme of the ranks' own. As TensorFlow's, its gradient goes to the cells that have it,
    in equal parts, and so they are counted over the group."""
    x = op.inputs[0]
    take = tf.reduce_max if op.type == "Max" else tf.reduce_min
    if not x.dtype.is_floating:
        raise NotTileable("compares whole numbers over a tiled dim")

    def write(tile: Tile) -> list[Tensor]:
        y, over = tile.read(x), sorted(axes)
        own = take(tf.stop_gradient(y), over, keepdims=True)
        found = take(tile.all_gather(own), 0)
        has = tf.cast(y == found, y.dtype)
        count = tile.all_reduce(tf.stop_gradient(tf.reduce_sum(has, over, keepdims=True)))
        # Without the value, which is there, a sum whose gradient is the share of each cell.
        shares = tf.where(y == found, y - tf.stop_gradient(y), tf.zeros_like(y))
        moves = tile.all_reduce(tf.reduce_sum(shares, over, keepdims=True)) / count
        return [tf.reshape(found + moves, op.out.shape)]

    sums = 3 * prod(shape_of(op.out))
    return Rule({}, {x.name: layout.own}, write, sums=sums, totals=3)
