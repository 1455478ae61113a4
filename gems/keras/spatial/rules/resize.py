"""Resizing on tiles. TensorFlow places the outputs in float32, and so does this."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from gems.geometry.window import Taps
from gems.keras.spatial.op import NotTileable, Op, shape_of
from gems.keras.spatial.rule import Rule, Tile, one_input, rule
from gems.keras.tracing.subgraph import Tensor

ROWS, COLUMNS = 1, 2


def _places(length: int, made: int, half: bool, *, nearest: bool) -> Any:
    """Where each output lies in the input."""
    scale = np.float32(length) / np.float32(made)
    outputs = np.arange(made, dtype=np.float32)
    if not half:
        return outputs * scale
    centres = (outputs + np.float32(0.5)) * scale
    return centres if nearest else centres - np.float32(0.5)


@rule("ResizeNearestNeighbor", "ResizeBilinear")
def resize(op: Op) -> Rule:
    x = op.inputs[0]
    layout, shape = op.only(x), shape_of(op.out)
    if op.attr("align_corners"):
        raise NotTileable("aligns corners")
    if not {*layout.dims} <= {ROWS, COLUMNS}:
        raise NotTileable("resizes the dims of space, and its input is tiled along others")
    nearest = op.type == "ResizeNearestNeighbor"
    taps = {}
    for dim in (ROWS, COLUMNS):
        n = layout.shape[dim]
        places = _places(n, shape[dim], op.attr("half_pixel_centers"), nearest=nearest)
        low = np.floor(places)
        first = np.clip(low, 0, n - 1).astype(int)
        last = first if nearest else np.clip(np.ceil(places), 0, n - 1).astype(int)
        taps[dim] = (first.tolist(), last.tolist(), (places - low).astype(np.float32))
    windows = [Taps(taps[d][0], taps[d][1], layout.shape[d]) for d in layout.dims]

    def write(tile: Tile) -> list[Tensor]:
        y, box = tile.read(x), tile.box(op.out)
        if box.empty:
            return [tf.zeros(box.shape, op.out.dtype)]
        y = y if nearest else tf.cast(y, op.out.dtype)
        for dim in (COLUMNS, ROWS):  # in TensorFlow's order
            here = slice(box.start[dim], box.stop[dim])
            low = 0 if dim not in layout.dims else tile.span(x, layout.dims.index(dim))[0]
            first, last, part = (row[here] for row in taps[dim])
            y = _interpolated(y, dim, [i - low for i in first], [i - low for i in last], part)
        return [y]

    return one_input(op, x, windows, write)


def _interpolated(y: Tensor, dim: int, first: list[int], last: list[int], part: Any) -> Tensor:
    a = tf.gather(y, first, axis=dim)
    if first == last:
        return a
    weights = np.where(np.array(first) == np.array(last), np.float32(0), part)
    shape = [-1 if d == dim else 1 for d in range(len(y.shape))]
    return a + (tf.gather(y, last, axis=dim) - a) * tf.constant(weights.reshape(shape), y.dtype)
