"""Calls without a layer rule: every rank of the spatial group gathers the inputs and runs all of
the call.

                    forward                                    backward
    tile ──┐                                     ┌──► own cells of the sum of all ranks' gradients
    tile ──┼─► whole input ─► call ─► whole result, or this rank's tile of it ◄── gradient
    tile ──┘   (on every rank)

Exact for any layer, at the cost of its whole memory and work on every rank. The gradient of a whole
value is the sum of parts, one on each rank. Backward of torch's own operations is linear, so weight
gradients are sums over the ranks as well. Where backward may not be linear (autograd functions, and
hooks on gradients, which may clip), each rank gets the whole gradient: see `opaque`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import nn

from gems.geometry.box import Box
from gems.geometry.layout import Layout, layout_like
from gems.model.graph import Value
from gems.torch.spatial.halo_exchange import HaloExchange
from gems.torch.spatial.op import NotTileable, Op, Run
from gems.torch.spatial.rule import OWN, Rule
from gems.torch.spatial.rules.opaque import opaque
from gems.torch.spatial.tile import Tile
from gems.torch.tensors.strides import restrided
from gems.torch.tracing.calls import Ref

Tensor = torch.Tensor


class NotGatherable(NotTileable):
    """Why a call has no exact form on gathered inputs either: it would change a copy in place."""


def gathered(op: Op, why: str) -> Rule:
    """A call on whole inputs; results as large as a tiled input are tiled like it again."""
    call = op.call
    whole_gradients = is_opaque(op)
    in_place = tuple((old, new) for old, new in call.mutates if new and old in op.layouts)
    if whole_gradients and call.mutates:
        raise NotGatherable(f"{why}, and changes a tensor in place inside of what is not recorded")
    outs = {name: x for _, name in call.outs if (x := _like(op, name)) is not None}
    outs |= {new: op.layouts[old] for old, new in in_place}
    outs |= {name: op.layouts[old] for old, name in _returned(op) if old in op.layouts}
    cells = sum(prod(op.shape(name)) for name in op.tiled)
    windows = dict.fromkeys(op.tiled, OWN)
    ranks = prod(next(iter(op.layouts.values())).grid)
    sums = max(cells // ranks, 1)

    def bind(tile: Tile) -> Run:
        return _bound(tile, whole_gradients, in_place)

    return Rule(outs, windows, bind, sums=sums, gathers=why, in_place=in_place)


def _returned(op: Op) -> Iterable[tuple[str, str]]:
    """Values that a call changed in place and returned: before, and after."""
    olds = [old for old, new in op.call.mutates if new is None]
    if not olds:
        return
    for _, name in op.call.outs:
        for old in olds:
            if op.shape(old) == op.shape(name):
                yield old, name


def _like(op: Op, name: str) -> Layout | None:
    """The layout of a result that is as large as a tiled image; None: it stays whole."""
    candidates = [op.layouts[n] for n in op.tiled] or list(reversed(op.layouts.values()))
    shape = op.shape(name)
    return layout_like(shape, candidates) if len(shape) > 2 else None


def is_opaque(op: Op) -> bool:
    """Whether a call's backward may do more than torch's own: it must see whole gradients."""
    owner = getattr(op.call.function, "__self__", None)
    if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
        return True
    if op.module is None:
        return False
    foreign = not type(op.module).__module__.startswith("torch.")
    return foreign or any(map(_hooks_gradients, op.module.modules()))


def _hooks_gradients(module: nn.Module) -> bool:
    kinds = ("_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, kind, None) for kind in kinds)


def retiled(op: Op) -> Rule | None:
    """A whole call behind one that had to be gathered: an image that it makes is tiled again."""
    outs = {name: x for _, name in op.call.outs if (x := _like(op, name)) is not None}
    if not outs or op.call.mutates or is_opaque(op):
        return None
    return Rule(outs, {}, lambda tile: _bound(tile, False))


def on_whole_values(op: Op) -> Rule:
    """A call on whole values whose backward must see whole gradients."""
    if op.call.mutates:
        raise NotGatherable("changes a tensor in place inside of what is not recorded")
    made = sum(prod(op.shape(name)) for name in op.call.writes)
    return Rule({}, {}, lambda tile: _bound(tile, True), sums=max(made, 1))


# --- what runs ------------------------------------------------------------------------------------


def _bound(tile: Tile, whole_gradients: bool, in_place: Sequence[tuple[str, str]] = ()) -> Run:
    call, draws = tile.call, tile.op.draws
    slices = {name: tile.out(name).slices() for name in tile.outs}
    paths = [(path, slices[name]) for path, name in call.outs if name in slices]
    gatherings = [_Gathering(tile, name, whole_gradients) for name in tile.windows]
    by_name = {gathering.name: gathering for gathering in gatherings}
    back = [(old, slices[new]) for old, new in in_place]

    work = opaque(tile) if whole_gradients else tile.original

    def drawing(*args: Any, **kwargs: Any) -> Any:
        with draws.call(call.name) if call.random else nullcontext():
            return work(*args, **kwargs)

    def run(*args: Any, **kwargs: Any) -> Any:
        whole: dict[str, Tensor] = {}
        local: dict[str, Tensor] = {}

        def given(x: Any) -> Callable[[Tensor], Tensor]:
            if isinstance(x, Ref) and x.name not in by_name and call.random:
                return lambda t: restrided(t, tile.op.values[x.name])
            if not isinstance(x, Ref) or x.name not in by_name:
                return lambda t: t

            def change(t: Tensor) -> Tensor:
                local[x.name] = t
                if x.name not in whole:
                    whole[x.name] = by_name[x.name](t)
                return whole[x.name]

            return change

        found = tile.mapped(drawing, given)(*args, **kwargs)
        for old, box in back:
            local[old].copy_(whole[old][box])
        for path, box in paths:
            found = _at(found, path, box)
        return found

    return run


def _at(found: Any, path: Sequence[Any], box: tuple[slice, ...]) -> Any:
    """A result of which the tensor at this path is replaced by this rank's box of it."""
    if not path:
        return found[box]
    key, *rest = path
    made = dict(found) if isinstance(found, dict) else list(found)
    made[key] = _at(made[key], rest, box)
    return made


class _Gathering:
    """Brings every rank all of one tiled value, with the strides that were recorded."""

    def __init__(self, tile: Tile, name: str, full: bool) -> None:
        self.name, self.full = name, full
        layout, self.group = tile.layouts[name], tile.group
        self.have, self.own = layout.boxes()[self.group.me], layout.own_boxes()[self.group.me]
        self.value: Value = tile.op.values[name]
        self.boxes, self.shape = layout.own_boxes(), layout.shape

    @cached_property
    def exchange(self) -> HaloExchange:
        whole = Box.whole(self.shape)
        want = [[whole] * self.group.size]
        return HaloExchange(self.group, self.boxes, want, [whole], self.shape)

    def __call__(self, x: Tensor) -> Tensor:
        if self.own.empty:
            x = x.new_zeros(self.own.shape) + 0 * x.sum()
        elif self.own != self.have:
            x = x[self.own.relative_to(self.have).slices()]
        return restrided(_Gather.apply(x, self.exchange, self.own, self.full), self.value)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: HaloExchange, own: Box, full: bool) -> Tensor:
        ctx.exchange, ctx.own, ctx.full = exchange, own, full
        ctx.set_materialize_grads(False)
        return exchange.assemble(x, exchange.start(x).wait())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # type: ignore[override]
        (gradient,) = gradients
        if gradient is None:
            return None, None, None, None
        if ctx.full:  # all ranks have all of it
            return gradient[ctx.own.slices()].contiguous(), None, None, None
        return ctx.exchange.adjoint(gradient), None, None, None
