"""A convolution of a tile that overlaps with the exchange of its halos.

A convolution is linear: its result on a padded tile is its result on the tile alone, with zeros
around it, plus its result on the halos, with zeros where the tile is.

    ┌──────────┐   1. start the halo exchange
    │   tile   │   2. convolve the tile, with zeros around it, while the halos are in flight
    ├──────────┤   3. add the convolution of the halos, at the outputs that read them
    └╌╌ halo ╌╌┘

No padded copy of the tile is made. Backward is the reverse: the gradients of the halos first, which
are in flight while those of the tile are computed; then what the neighbours sent is added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from gems.geometry.box import Box
from gems.geometry.layout import Layout, clipped
from gems.geometry.window import Slide, Window
from gems.torch.autograd.saved_tensors import PackedTensor
from gems.torch.autograd.split_backward import WeightGrad, accumulate, watched
from gems.torch.spatial.halo_exchange import HaloExchange
from gems.torch.spatial.tile import ForwardContext, Tile
from gems.torch.tensors.strides import dense_like

Tensor = torch.Tensor


@dataclass(frozen=True)
class Kernel:
    """The settings of a convolution."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        none = (0,) * len(self.stride)
        return torch.ops.aten.convolution(
            x, weight, bias, self.stride, self.padding, self.dilation, False, none, self.groups
        )

    def backward(self, gradient: Tensor, x: Tensor, weight: Tensor, wants: Sequence[bool]) -> Any:
        """Gradients of input, weight and bias, as wanted."""
        none = (0,) * len(self.stride)
        return torch.ops.aten.convolution_backward(
            gradient, x, weight, [weight.shape[0]] if wants[2] else None, self.stride,
            self.padding, self.dilation, False, none, self.groups, wants,
        )  # fmt: skip


@dataclass(frozen=True)
class EdgeOutputs:
    """Some outputs that read halos: their slices, the shape they read, and what of which halo.

    `parts` lists (number of the halo, slices of it, slices of what is read).
    """

    out: tuple[slice, ...]
    shape: tuple[int, ...]
    parts: tuple[tuple[int, tuple[slice, ...], tuple[slice, ...]], ...]

    def read(self, halos: Sequence[Tensor], weight: Tensor) -> Tensor:
        """The halos, and zeros where the tile is or the image ends, in the weight's format."""
        padded = dense_like(self.shape, weight).to(halos[0].dtype).zero_()
        for halo, cells, there in self.parts:
            padded[there] = halos[halo][cells]
        return padded

    def add_gradient(self, gradient: Tensor, halos: Sequence[Tensor]) -> None:
        """Add the gradient of what was read to the halos'."""
        for halo, cells, there in self.parts:
            halos[halo][cells] += gradient[there]


@dataclass(frozen=True)
class OverlapPlan:
    """The convolution of a tile, and of the halos that its edges read."""

    exchange: HaloExchange
    whole: Kernel  # on the tile
    narrow: Kernel  # on what an edge reads, which has its border along the tiled dims
    edges: tuple[EdgeOutputs, ...]
    context: ForwardContext = field(compare=False)


class OverlapConv(torch.autograd.Function):
    """The convolution of a tile and, apart from it, of its halos."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: OverlapPlan
    ) -> Tensor:
        ctx.set_materialize_grads(False)  # [Note: no gradient on tiles]
        pending = plan.exchange.start(x)
        y = plan.whole.forward(x, weight, bias)
        halos = pending.wait()
        for edge in plan.edges:
            y[edge.out] += plan.narrow.forward(edge.read(halos, weight), weight, None)
        deferrable = _deferrable(weight) and (bias is None or _deferrable(bias))
        ctx.deferred = plan.context.deferred if deferrable else None
        ctx.plan, ctx.parameters = plan, None if ctx.deferred is None else (weight, bias)
        ctx.save_for_backward(x, weight, *halos)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # type: ignore[override]
        plan, g = ctx.plan, gradients[0]
        if g is None:
            return None, None, None, None
        x, weight, *halos = ctx.saved_tensors
        image, *learns = ctx.needs_input_grad[:3]
        now = learns if ctx.deferred is None else (False, False)
        asked, dw = _halo_gradients(plan, g, halos, weight, (image, now[0], False))
        pending = plan.exchange.start_backward(x, asked) if image else None
        dx, tile, db = plan.whole.backward(g, x, weight, (image, *now))
        if pending is not None:
            pending.add_to(dx)
        if ctx.deferred is not None and any(learns):
            weight_grad = _deferred(plan, ctx.parameters, halos, tuple(learns))
            ctx.deferred.append((weight_grad, PackedTensor(x, x._version), g))
        return dx, _sum(tile, dw), db, None


def _halo_gradients(
    plan: OverlapPlan, g: Tensor, halos: Sequence[Tensor], weight: Tensor, wants: Sequence[bool]
) -> tuple[list[Tensor], Tensor | None]:
    """The gradients of the halos, and what the halos add to the gradient of the weight."""
    asked, dw = [torch.zeros_like(halo) for halo in halos] if wants[0] else [], None
    for edge in plan.edges if any(wants) else ():
        padded = edge.read(halos, weight)
        read, added, _ = plan.narrow.backward(g[edge.out], padded, weight, wants)
        if wants[0]:
            edge.add_gradient(read, asked)
        dw = _sum(added, dw)
    return asked, dw


def _deferred(
    plan: OverlapPlan, parameters: Any, halos: Sequence[Tensor], learns: tuple[bool, bool]
) -> WeightGrad:
    """The weight gradient, deferred."""
    weight, bias = parameters

    def weight_grad(x: Tensor, g: Tensor) -> None:
        held = weight.detach()
        _, dw = _halo_gradients(plan, g, halos, held, (False, learns[0], False))
        _, tile, db = plan.whole.backward(g, x, held, (False, *learns))
        accumulate(weight, _sum(tile, dw))
        accumulate(bias, db)

    return weight_grad


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return a if b is None else b if a is None else a.add_(b)


def _deferrable(parameter: Tensor) -> bool:
    """Whether its gradient may come outside of backward."""
    return parameter.is_leaf and not watched(parameter)


def overlapped(
    tile: Tile, name: str, windows: Sequence[Window], kernel: Kernel
) -> Callable[[Tensor, Tensor, Tensor | None], Tensor] | None:
    """The convolution of the input `name`, overlapped; None where a padded tile serves better.

    `kernel` pads only the dims that are not tiled. On the tiled ones, the tile must give exactly
    this rank's outputs when it is padded alike on both sides.
    """
    layout, out = tile.layouts[name], tile.out()
    have, want = layout.boxes(), layout.boxes(clipped(tile.wants[name], layout))
    own, mine = have[tile.group.me], want[tile.group.me]
    if own.empty or out.empty or all(w in h for w, h in zip(want, have, strict=True)):
        return None
    padding = list(kernel.padding)
    for window, dim in zip(windows, layout.dims, strict=True):
        if dim < 2 or not isinstance(window, Slide):
            return None
        pad = own.start[dim] - window.reads(out.start[dim], out.stop[dim])[0]
        count = (own.shape[dim] + 2 * pad - window.reach - 1) // window.stride + 1
        if pad < 0 or count != out.shape[dim]:
            return None
        padding[dim - 2] = pad
    inside = _interior(layout, windows, own, out)
    if inside is None:
        return None
    exchange = HaloExchange(tile.channel(name), have, [want], [Box.whole(mine.shape)], mine.shape)
    boxes = [box.shift(mine.start) for box in exchange.received]
    rest = out.without(inside)
    edges = [_edge_outputs(box, _reads(layout, windows, box), boxes, out) for box in rest]
    whole = replace(kernel, padding=tuple(padding))
    plan = OverlapPlan(exchange, whole, kernel, tuple(e for e in edges if e.parts), tile.context)
    return lambda x, weight, bias: OverlapConv.apply(*cast(x, weight, bias), plan)  # type: ignore


def _edge_outputs(box: Box, reads: Box, halos: Sequence[Box], out: Box) -> EdgeOutputs:
    parts = []
    for k, halo in enumerate(halos):
        if reads.meets(halo):
            both = reads.intersect(halo)
            cells, there = both.relative_to(halo), both.relative_to(reads)
            parts.append((k, cells.slices(), there.slices()))
    return EdgeOutputs(box.relative_to(out).slices(), reads.shape, tuple(parts))


def cast(x: Tensor, *weights: Tensor | None) -> list[Tensor | None]:
    """The arguments of a convolution as autocast casts them."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or x.dtype == torch.float64:
        return [x, *weights]
    dtype = torch.get_autocast_dtype(kind)
    return [t if t is None else t.to(dtype) for t in (x, *weights)]


def _interior(layout: Layout, windows: Sequence[Window], own: Box, out: Box) -> Box | None:
    """The outputs that read nothing but own cells and the border of the image."""
    start, stop = list(out.start), list(out.stop)
    for window, dim in zip(windows, layout.dims, strict=True):
        assert isinstance(window, Slide)
        s, p, reach = window.stride, window.padding, window.reach
        if own.start[dim] > 0:
            start[dim] = max(start[dim], -(-(own.start[dim] + p) // s))
        if own.stop[dim] < layout.shape[dim]:
            stop[dim] = min(stop[dim], (own.stop[dim] - 1 + p - reach) // s + 1)
    if any(b <= a for a, b in zip(start, stop, strict=True)):
        return None
    return Box(tuple(start), tuple(stop))


def _reads(layout: Layout, windows: Sequence[Window], out: Box) -> Box:
    """What some outputs read, border and all."""
    start, stop = [0] * len(layout.shape), list(layout.shape)
    for window, dim in zip(windows, layout.dims, strict=True):
        start[dim], stop[dim] = window.reads(out.start[dim], out.stop[dim])
    return Box(tuple(start), tuple(stop))
