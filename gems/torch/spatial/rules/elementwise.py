"""Calls that treat every cell by itself, with any number of operands, and dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from gems.geometry.box import Box
from gems.geometry.layout import Layout, even
from gems.geometry.window import Same, Span, Window
from gems.torch.spatial.op import NotTileable, Op, Run
from gems.torch.spatial.rule import Rule, one_input, rule, same, unchanged
from gems.torch.spatial.tile import Tile
from gems.torch.tracing.calls import Attr, Ref, is_placeholder

Tensor = torch.Tensor


class Broadcast:
    """An operand of length 1: everybody reads its only cell."""

    def reads(self, a: int, b: int) -> Span:
        return 0, 1

    def follow(self, c: int) -> int:
        return c


def pointwise(op: Op, work: Callable[[Tile], Run] | None = None) -> Rule:
    """Operands are brought in line with the result; whole ones are tiled to this rank's box.

    `work` makes what to call on them, if it is not the recorded call itself.
    """
    if not op.call.writes:  # it changes a buffer, of which every rank has the whole
        raise NotTileable("changes a whole tensor in place by a tiled one")
    shape = op.shape(op.call.writes[0])
    leading = _leading(op, shape)
    dims = tuple(d + len(shape) - len(leading.shape) for d in leading.dims)
    windows: dict[str, tuple[Window, ...]] = {}
    for name in op.tiled:
        layout = op.layouts[name]
        offset = len(shape) - len(layout.shape)
        if tuple(d + offset for d in layout.dims) != dims:
            raise NotTileable(
                f"joins tensors that are tiled along different dims, {layout.shape} along "
                f"{layout.dims} and {leading.shape} along {leading.dims}"
            )
        windows[name] = tuple(
            Same() if layout.shape[d] == shape[d + offset] else Broadcast() for d in layout.dims
        )
    if all(leading.shape[d] == shape[o] for d, o in zip(leading.dims, dims, strict=True)):
        out = leading.follow(shape, dims, (Same(),) * len(dims))
    else:
        out = even(shape, dims, leading.grid)

    def bind(tile: Tile) -> Run:
        box = tile.out(op.call.writes[0])

        def change(place: Ref | Attr | Tensor) -> Callable[[Tensor], Tensor]:
            if isinstance(place, Ref) and place.name in windows:
                return tile.with_halo(place)
            return part_of(op.shape(place), box, dims)

        return tile.mapped(tile.original if work is None else work(tile), change)

    leaves = pytree.tree_leaves((op.call.args, op.call.kwargs), is_leaf=is_placeholder)
    whole = [x for x in leaves if is_placeholder(x) or isinstance(x, Tensor)]
    whole = [op.shape(x) for x in whole if not (isinstance(x, Ref) and x.name in windows)]
    sliced = any(n > 1 for s in whole for n in s[min(dims, default=0) - len(shape) :])
    outs = {name: _like(out, op.shape(name)) for name in op.call.writes}
    return Rule(outs, windows, bind, relative=work is None and not sliced)


def _leading(op: Op, shape: tuple[int, ...]) -> Layout:
    """Whose cut the result follows: what is changed in place, the fullest operand, or, if all of
    them are whole, some image of the same size."""
    if not op.tiled:
        return op.layout_like(shape)
    changed = [op.layouts[old] for old, _ in op.call.mutates if old in op.layouts]
    if op.call.mutates:
        if not changed:
            raise NotTileable("changes a whole tensor in place by a tiled one")
        return changed[0]
    full = [op.layouts[n] for n in op.tiled if op.layouts[n].shape == shape]
    full += [layout for layout in map(op.layouts.__getitem__, op.tiled) if _spans(layout, shape)]
    return full[0] if full else op.layouts[op.tiled[0]]


def _spans(layout: Layout, shape: tuple[int, ...]) -> bool:
    offset = len(shape) - len(layout.shape)
    return all(layout.shape[d] == shape[d + offset] for d in layout.dims)


def _like(layout: Layout, shape: tuple[int, ...]) -> Layout:
    return Layout(shape, layout.dims, layout.own, layout.have)


def part_of(whole: tuple[int, ...], box: Box, dims: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
    """This rank's part of a whole operand that is as long as the result along a tiled dim."""
    slices: list[slice] = [slice(None)] * len(whole)
    for dim in dims:
        at = dim - (len(box.start) - len(whole))
        if at >= 0 and whole[at] > 1:
            slices[at] = slice(box.start[dim], box.stop[dim])
    if all(s == slice(None) for s in slices):
        return lambda t: t
    return lambda t: t[tuple(slices)]


rule(("fill", "zero", "copy"))(pointwise)  # in place


# Pointwise, but not to ATen, which sees a view, a copy or a composite.
@rule(
    (
        "contiguous",
        "clone",
        "detach",
        "to",
        "float",
        "double",
        "half",
        "bfloat16",
        "type",
        "type_as",
    ),
    (nn.Identity,),
)
def as_it_is(op: Op) -> Rule:
    """Another tensor may only give the dtype: its values are not read."""
    x = op.call.args[0]
    layout = op.layout(x)
    if layout is None:
        return Rule({}, {}, lambda tile: tile.original)

    def bind(tile: Tile) -> Run:
        with_halo = tile.with_halo(x)
        return tile.mapped(tile.original, lambda place: with_halo if place == x else lambda t: t)

    windows = same(layout)
    outs = {op.out: layout.follow(layout.shape, layout.dims, windows)}
    return Rule(outs, {x.name: windows}, bind, relative=True)


@rule(
    (
        "softmax", "log_softmax", "softmin", "cumsum", "normalize", "glu", "argmax", "argmin",
        "logsumexp", "prod", "any", "all",
    ),
    (nn.Softmax, nn.LogSoftmax, nn.Softmax2d, nn.GLU),
)  # fmt: skip
def along(op: Op) -> Rule:
    """Along one dim, which must not be cut."""
    if isinstance(op.module, nn.Softmax2d):
        return unchanged(op, op.call.args[0])
    args = list(op.call.args)
    x = args[0]
    layout = op.primary(x)
    dim = op.call.kwargs.get("dim", args[1] if len(args) > 1 else getattr(op.module, "dim", None))
    if op.name == "normalize" and "dim" not in op.call.kwargs:
        dim = args[2] if len(args) > 2 else 1
    if not isinstance(dim, int):
        raise NotTileable("does not say along which dim")
    dim %= len(layout.shape)
    if dim in layout.dims:
        raise NotTileable(f"looks along dim {dim}, which is tiled")
    gone = len(op.shape(op.out)) < len(layout.shape)
    return unchanged(op, x, [d - (gone and d > dim) for d in layout.dims])


@rule(("linear",), (nn.Linear,))
def linear(op: Op) -> Rule:
    x = op.call.args[0]
    layout = op.primary(x)
    if len(layout.shape) - 1 in layout.dims:
        raise NotTileable("mixes the cells of the last dim, which is tiled")
    return unchanged(op, x)


@rule((), (nn.PReLU,))
def prelu(op: Op) -> Rule:
    return unchanged(op, op.call.args[0])


def _dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> None: ...


@rule(("dropout",), (nn.Dropout,))
def dropout(op: Op) -> Rule:
    """The mask of the whole tensor, as any rank would draw it, cut to this rank's box."""
    x = op.call.args[0]
    layout = op.primary(x)
    if not op.call.random:
        return unchanged(op, x)

    def bind(tile: Tile) -> Run:
        with_halo, box = tile.with_halo(x), tile.out()

        def work(a: dict[str, Any]) -> Tensor:
            t, p = with_halo(a["input"]), a["p"]
            return op.draws.dropped(t, p, op.call.name, layout.shape, box)

        return tile.named(_dropout, work, "p")

    return one_input(op, x, bind)


@rule(
    ("dropout1d", "dropout2d", "dropout3d", "feature_dropout"),
    (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
)
def channel_dropout(op: Op) -> Rule:
    """One number per sample and channel: drawn for all samples, whatever the tile."""
    x = op.call.args[0]
    layout = op.primary(x)
    if not op.call.random:
        return unchanged(op, x)
    if 1 in layout.dims:
        raise NotTileable("drops channels, which are tiled")

    def bind(tile: Tile) -> Run:
        with_halo, box = tile.with_halo(x), tile.out()
        ones = (*layout.shape[:2], *(1,) * (len(layout.shape) - 2))

        def work(a: dict[str, Any]) -> Tensor:
            t = with_halo(a["input"])
            with op.draws.call(op.call.name):
                blank = torch.ones(ones, dtype=t.dtype, device=t.device)
                mask = torch.feature_dropout(blank, a["p"], True)
            return t * mask[box.start[0] : box.stop[0]]

        return tile.named(_dropout, work, "p")

    return one_input(op, x, bind)
