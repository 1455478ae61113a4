"""Other forms of one tensor: dims exchanged, added, dropped, merged, divided, repeated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from math import prod

import tensorflow as tf

from gems.geometry.window import Grow, Same, Shrink, Window
from gems.keras.spatial.op import NotTileable, Op, moved, shape_of
from gems.keras.spatial.rule import Rule, Tile, one_input, rule
from gems.keras.spatial.rules.conv_pool import chain_of
from gems.keras.tracing.subgraph import Tensor


@rule("Transpose")
def transpose(op: Op) -> Rule:
    x, order = op.inputs[0], [int(d) for d in op.const(1)]
    layout = op.only(x)
    out = moved(layout, shape_of(op.out), [order.index(d) for d in layout.dims])

    def write(tile: Tile) -> list[Tensor]:
        return [tf.transpose(tile.read(x), order)]

    return Rule({op.out.name: out}, {x.name: layout.own}, write)


@rule("ExpandDims")
def expand_dims(op: Op) -> Rule:
    x = op.inputs[0]
    layout = op.only(x)
    axis = int(op.const(1)) % (len(layout.shape) + 1)
    return _reshaped(op, [d + (d >= axis) for d in layout.dims])


@rule("Squeeze")
def squeeze(op: Op) -> Rule:
    layout = op.only(op.inputs[0])
    rank = len(layout.shape)
    axes = {a % rank for a in op.attr("squeeze_dims")}
    axes = axes or {d for d in range(rank) if layout.shape[d] == 1}
    if axes & set(layout.dims):
        raise NotTileable("drops a tiled dim")
    return _reshaped(op, [d - sum(a < d for a in axes) for d in layout.dims])


def _reshaped(op: Op, dims: Sequence[int]) -> Rule:
    x = op.inputs[0]
    layout = op.only(x)

    def write(tile: Tile) -> list[Tensor]:
        return [tf.reshape(tile.read(x), tile.box(op.out).shape)]

    out = moved(layout, shape_of(op.out), dims)
    return Rule({op.out.name: out}, {x.name: layout.own}, write)


@rule("Tile")
def repeat(op: Op) -> Rule:
    x = op.inputs[0]
    layout = op.only(x)
    lengths = zip(shape_of(op.out), shape_of(x), strict=True)
    times = [made // length if length else 1 for made, length in lengths]
    if any(times[d] != 1 for d in layout.dims):
        raise NotTileable("repeats a tiled dim")

    def write(tile: Tile) -> list[Tensor]:
        return [tf.tile(tile.read(x), times)]

    out = moved(layout, shape_of(op.out), layout.dims)
    return Rule({op.out.name: out}, {x.name: layout.own}, write)


@rule("BroadcastTo")
def broadcast(op: Op) -> Rule:
    x, shape = op.inputs[0], shape_of(op.out)
    layout = op.only(x)
    lead = len(shape) - len(layout.shape)
    dims = [d + lead for d in layout.dims]
    if any(shape[d] != layout.shape[d - lead] for d in dims):
        raise NotTileable("repeats a tiled dim")
    out = moved(layout, shape, dims)

    def write(tile: Tile) -> list[Tensor]:
        return [tf.broadcast_to(tile.read(x), tile.box(op.out).shape)]

    return Rule({op.out.name: out}, {x.name: layout.own}, write)


@rule("Reshape")
def reshape(op: Op) -> Rule:
    """Dims may be merged or divided where the tiled one is the outermost of its group: nearest
    upsampling, groups of channels. A dense layer on channels runs on the rows of each tile."""
    x = op.inputs[0]
    layout, old, new = op.only(x), shape_of(op.inputs[0]), shape_of(op.out)
    if not prod(old):
        raise NotTileable("has no cells")
    if len(new) == 2 and new[1] == old[-1] and len(old) - 1 not in layout.dims:
        with suppress(NotTileable):
            return _dense(op)
    found = dict(_images(old, new, layout.dims))
    dims, windows = zip(*(found[d] for d in layout.dims), strict=True)

    def write(tile: Tile) -> list[Tensor]:
        return [tf.reshape(tile.read(x), tile.box(op.out).shape)]

    return one_input(op, x, windows, write, dims)


def _images(
    old: Sequence[int], new: Sequence[int], tiled: Sequence[int]
) -> Iterator[tuple[int, tuple[int, Window]]]:
    """For each tiled dim its place in the new shape, and what is read there."""
    for before, after in _groups(old, new):
        mine = [d for d in before if d in tiled]
        if not mine:
            continue
        long, made = [d for d in before if old[d] > 1], [d for d in after if new[d] > 1]
        if len(mine) > 1 or long[:1] != mine or not made:
            raise NotTileable("merges a tiled dim with others before it")
        dim, at = mine[0], made[0]
        if old[dim] == new[at]:
            yield dim, (at, Same())
        elif new[at] % old[dim] == 0:
            yield dim, (at, Grow(new[at] // old[dim]))
        elif old[dim] % new[at] == 0:
            yield dim, (at, Shrink(old[dim] // new[at]))
        else:
            raise NotTileable("divides a tiled dim unevenly")


def _groups(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Runs of dims before and after that have the same number of cells, as small as can be."""
    i = j = 0
    while i < len(old) or j < len(new):
        before, after, a, b = [], [], 1, 1
        while not before or not after or a != b:
            if (a <= b and i < len(old)) or j == len(new):
                if i == len(old):
                    break
                before.append(i)
                a *= old[i]
                i += 1
            else:
                after.append(j)
                b *= new[j]
                j += 1
        yield before, after


def _dense(op: Op) -> Rule:
    """Cells as rows of a matrix, a product with weights, and back: every tile has its own rows."""
    x = op.inputs[0]
    layout = op.only(x)
    chain = chain_of(op, {"MatMul"}, "Reshape")
    if len(chain) != 2 or chain[0].attr("transpose_a") or chain[0].inputs[1].name in op.layouts:
        raise NotTileable("merges tiled dims")
    product, last = chain
    weights, shape = product.inputs[1], shape_of(last.out)
    if shape[:-1] != layout.shape[:-1]:
        raise NotTileable("merges tiled dims")
    flips = product.attr("transpose_b")
    out = moved(layout, shape, layout.dims)

    def write(tile: Tile) -> list[Tensor]:
        rows = tf.reshape(tile.read(x), [prod(tile.read(x).shape[:-1]), layout.shape[-1]])
        y = tf.matmul(rows, tile.read(weights), transpose_b=flips)
        return [tf.reshape(y, tile.box(last.out).shape)]

    covers = tuple(one.op.name for one in chain)
    return Rule({last.out.name: out}, {x.name: layout.own}, write, covers=covers)
