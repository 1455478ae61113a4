"""Padding, cropping and steps: what is read is moved, and no cell is computed."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from gems.geometry.window import Slide
from gems.keras.spatial.op import NotTileable, Op, shape_of
from gems.keras.spatial.rule import Rule, Tile, one_input, rule
from gems.keras.tracing.subgraph import Tensor


@rule("Pad", "PadV2")
def pad(op: Op) -> Rule:
    x, pads = op.inputs[0], [(int(a), int(b)) for a, b in op.const(1)]
    fill = float(op.const(2)) if op.type == "PadV2" else 0.0
    layout = op.only(x)
    rest = [(0, 0) if d in layout.dims else pads[d] for d in range(len(pads))]

    def write(tile: Tile) -> list[Tensor]:
        padded_tile = tile.read(x, fill)
        if any(a or b for a, b in rest):
            padded_tile = tf.pad(
                padded_tile, rest, constant_values=tf.constant(fill, padded_tile.dtype)
            )
        return [padded_tile]

    return one_input(op, x, [Slide(padding=pads[d][0]) for d in layout.dims], write)


@rule("StridedSlice")
def strided_slice(op: Op) -> Rule:
    x = op.inputs[0]
    layout, picks = op.only(x), _picks(op, len(shape_of(x)))
    steps, at = {}, 0  # of the dims of x, where they are in the result
    places: dict[int, int] = {}
    local: list[Any] = []
    dim = 0
    for pick in picks:
        if pick is None:  # a new dim
            local.append(None)
            at += 1
            continue
        if isinstance(pick, slice):
            steps[dim] = pick.indices(layout.shape[dim])
            places[dim] = at
            at += 1
        elif dim in layout.dims:
            raise NotTileable("takes one cell of a tiled dim")
        local.append(slice(None, None, steps[dim][2]) if dim in layout.dims else pick)
        dim += 1
    if any(steps[d][2] < 0 for d in layout.dims):
        raise NotTileable("turns a tiled dim around")
    windows = [Slide(stride=steps[d][2], padding=-steps[d][0]) for d in layout.dims]

    def write(tile: Tile) -> list[Tensor]:
        return [tile.read(x, 0.0)[tuple(tf.newaxis if p is None else p for p in local)]]

    return one_input(op, x, windows, write, [places[d] for d in layout.dims])


def _picks(op: Op, rank: int) -> list[Any]:
    """What is written between the brackets: slices, indices, and None for new dims."""
    begin, end, steps = (op.const(i).reshape(-1).tolist() for i in (1, 2, 3))
    bit = lambda name, i: bool(op.attr(name, 0) >> i & 1)  # noqa: E731
    taken = [i for i in range(len(begin)) if not bit("new_axis_mask", i)]
    taken = [i for i in taken if not bit("ellipsis_mask", i)]
    found: list[Any] = []
    for i in range(len(begin)):
        if bit("ellipsis_mask", i):
            found += [slice(None)] * (rank - len(taken))
        elif bit("new_axis_mask", i):
            found.append(None)
        elif bit("shrink_axis_mask", i):
            found.append(begin[i])
        else:
            low = None if bit("begin_mask", i) else begin[i]
            high = None if bit("end_mask", i) else end[i]
            found.append(slice(low, high, steps[i]))
    return found + [slice(None)] * (rank - sum(p is not None for p in found))


@rule("Slice")
def plain_slice(op: Op) -> Rule:
    x = op.inputs[0]
    layout, begin = op.only(x), [int(n) for n in op.const(1)]
    shape = shape_of(op.out)

    def write(tile: Tile) -> list[Tensor]:
        padded_tile = tile.read(x, 0.0)
        start = [0 if d in layout.dims else begin[d] for d in range(len(begin))]
        size = [padded_tile.shape[d] if d in layout.dims else shape[d] for d in range(len(begin))]
        return [tf.slice(padded_tile, start, size)]

    return one_input(op, x, [Slide(padding=-begin[d]) for d in layout.dims], write)
