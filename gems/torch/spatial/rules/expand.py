"""Tensors that are made as large as a tiled one: expanded, repeated, or filled with a number.

A whole tensor that is expanded to the size of a tiled image is tiled like it from there on.
"""

from __future__ import annotations

from typing import Any

import torch

from gems.torch.spatial.op import NotTileable, Op, Run
from gems.torch.spatial.rule import Rule, rule, same
from gems.torch.spatial.rules.elementwise import pointwise
from gems.torch.spatial.tile import Tile
from gems.torch.tracing.calls import leaves_of

Tensor = torch.Tensor


@rule(("expand", "expand_as", "broadcast_to"), from_whole=True)
def expanded(op: Op) -> Rule:
    def work(tile: Tile) -> Run:
        shape = tile.out().shape
        return lambda t, *_, **__: t.expand(shape)

    return pointwise(op, work)


@rule(("broadcast_tensors",))
def broadcast(op: Op) -> Rule:
    def work(tile: Tile) -> Run:
        shape = tile.out().shape
        return lambda *tensors: [t.expand(shape) for t in tensors]

    return pointwise(op, work)


@rule(("repeat", "tile"), from_whole=True)
def repeated(op: Op) -> Rule:
    """Along dims that are not tiled, and along those in which there is one cell to repeat."""
    before, after = op.shape(op.call.args[0]), op.shape(op.out)
    lead = len(after) - len(before)

    def work(tile: Tile) -> Run:
        shape = tile.out().shape

        def run(t: Tensor, *_: Any, **__: Any) -> Tensor:
            lengths = (1,) * lead + tuple(t.shape)
            return t.repeat([m // n if n else 1 for m, n in zip(shape, lengths, strict=True)])

        return run

    found = pointwise(op, work)
    for dim in found.outs[op.out].dims:
        if dim >= lead and before[dim - lead] not in (1, after[dim]):
            raise NotTileable(f"repeats the cells of dim {dim}, which is tiled")
    return found


@rule(("zeros_like", "ones_like", "full_like", "empty_like"))
def filled_like(op: Op) -> Rule:
    """Of the tensor itself nothing is read."""
    layout = op.primary(op.call.args[0])

    def bind(tile: Tile) -> Run:
        shape, make = tile.out().shape, tile.original
        return lambda t, *args, **kwargs: make(t.new_empty(shape), *args, **kwargs)

    return Rule({op.out: layout.follow(layout.shape, layout.dims, same(layout))}, {}, bind)


@rule(("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor"))
def filled(op: Op) -> Rule:
    """A whole tensor, for which a tiled one lends its type."""
    if any(op.layout(x) for x in leaves_of((op.call.args[1:], op.call.kwargs))):
        raise NotTileable("copies a tiled tensor; use clone")
    return Rule({}, {}, lambda tile: tile.original)
