"""Tensors side by side: concatenation and stacking, and taking apart again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from gems.geometry.layout import Layout
from gems.torch.spatial.op import NotTileable, Op, Run
from gems.torch.spatial.rule import Rule, rule, same, unchanged
from gems.torch.spatial.tile import Tile
from gems.torch.tracing.calls import Ref, is_placeholder

Tensor = torch.Tensor


def _cat(tensors: Any, dim: int = 0, axis: Any = None) -> None: ...


@rule(("cat", "concat", "concatenate"))
def concatenate(op: Op) -> Rule:
    """Along a dim that is not tiled; parts that are tiled differently are brought in line first."""
    a = op.named(_cat)
    dim = (a["dim"] if a["axis"] is None else a["axis"]) % len(op.shape(op.out))
    first = _alike(op, a["tensors"])
    if dim in first.dims:
        raise NotTileable(f"joins tensors along dim {dim}, which is tiled")
    return _joined_along(op, first, first.dims)


@rule(("stack",))
def stack(op: Op) -> Rule:
    a = op.named(_cat)
    shape = op.shape(op.out)
    dim = (a["dim"] if a["axis"] is None else a["axis"]) % len(shape)
    first = _alike(op, a["tensors"])
    return _joined_along(op, first, [d + (d >= dim) for d in first.dims])


def _alike(op: Op, tensors: Any) -> Layout:
    """The first tiled one of some tensors; all that are tiled must be so along the same dims."""
    first = op.layouts[op.tiled[0]]
    for place in pytree.tree_leaves(tensors, is_leaf=is_placeholder):
        layout = op.layout(place)
        if layout is not None and layout.dims != first.dims:
            raise NotTileable(
                f"joins tensors that are tiled along different dims, {layout.shape} along "
                f"{layout.dims} and {first.shape} along {first.dims}"
            )
        if layout is None and len(op.shape(place)) != len(first.shape):
            raise NotTileable(f"joins {first.shape} with {op.shape(place)}, which has other dims")
    return first


def _joined_along(op: Op, first: Layout, dims: Sequence[int]) -> Rule:
    windows = same(first)

    def bind(tile: Tile) -> Run:
        out = tile.out()
        here = {d: slice(out.start[o], out.stop[o]) for d, o in zip(first.dims, dims, strict=True)}

        def change(place: Any) -> Callable[[Tensor], Tensor]:
            if isinstance(place, Ref) and place.name in op.tiled:
                return tile.with_halo(place)
            box = tuple(here.get(d, slice(None)) for d in range(len(first.shape)))
            return lambda t: t[box]

        return tile.mapped(tile.original, change)

    outs = {op.out: first.follow(op.shape(op.out), dims, windows)}
    tiled = set(op.call.reads) == set(op.tiled)
    return Rule(outs, dict.fromkeys(op.tiled, windows), bind, relative=tiled)


def _pieces(input: Any, count: Any = None, dim: int = 0, **kwargs: Any) -> None: ...


@rule(("chunk", "split", "split_with_sizes", "tensor_split", "unbind"))
def pieces(op: Op) -> Rule:
    """Apart again, along a dim that is not tiled."""
    if op.name == "unbind":
        args = (*op.call.args, *op.call.kwargs.values())
        x, dim = args[0], args[1] if len(args) > 1 else 0
    else:
        a = op.named(_pieces)
        x, dim = a["input"], a["dim"]
    layout = op.primary(x)
    dim %= len(layout.shape)
    if dim in layout.dims:
        raise NotTileable(f"takes a tensor apart along dim {dim}, which is tiled")
    gone = op.name == "unbind"
    return unchanged(op, x, [d - (gone and d > dim) for d in layout.dims])
