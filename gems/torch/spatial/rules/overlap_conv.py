"""A convolution of a tile where it lies, and of its neighbours' strips by themselves.

A convolution is linear: what it makes of a tile with strips around it is what it makes of the tile
with nothing around it, plus what it makes of the strips with nothing where the tile is.

    ┌──────────┐   1. send the edges of the tile, expect strips
    │   tile   │   2. the layer itself on the tile, with zeros beyond it, while the strips travel
    ├──────────┤   3. add what the strips make, at the outputs that read them
    └╌╌strip╌╌╌┘

No slab is laid out for the whole tile. Backward is the same the other way: the strips' gradients
first, which travel while the tile's are computed, then what the neighbours send is added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from gems.geometry.box import Box
from gems.geometry.layout import Layout, clipped
from gems.geometry.window import Slide, Window
from gems.torch.runtime.split_backward import Settle, accumulate, watched
from gems.torch.spatial.group import Exchange
from gems.torch.spatial.rule import Notes, Site

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
class Piece:
    """Some outputs that read strips: where they are, the shape they read, and what of which strip.

    `parts` lists (strip, its cells, their place in what is read).
    """

    out: tuple[slice, ...]
    shape: tuple[int, ...]
    parts: tuple[tuple[int, tuple[slice, ...], tuple[slice, ...]], ...]

    def read(self, strips: Sequence[Tensor]) -> Tensor:
        """The strips, and nothing where the tile is or the image ends."""
        slab = strips[0].new_zeros(self.shape)
        for strip, cells, there in self.parts:
            slab[there] = strips[strip][cells]
        return slab

    def give(self, gradient: Tensor, strips: Sequence[Tensor]) -> None:
        """Add the gradient of what was read to the strips'."""
        for strip, cells, there in self.parts:
            strips[strip][cells] += gradient[there]


@dataclass(frozen=True)
class Edges:
    """Where a tile's convolution meets its neighbours."""

    exchange: Exchange
    whole: Kernel  # on the tile
    narrow: Kernel  # on a piece, which brings its border along the cut dims
    pieces: tuple[Piece, ...]
    memory: Notes = field(compare=False)


class Apart(torch.autograd.Function):
    """The convolution, by tile and strips."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, edges: Edges) -> Tensor:
        ctx.set_materialize_grads(False)  # [Note: no gradient on tiles]
        trade = edges.exchange.post(x)
        y = edges.whole.forward(x, weight, bias)
        strips = trade.parts()
        for piece in edges.pieces:
            y[piece.out] += edges.narrow.forward(piece.read(strips), weight, None)
        page = edges.memory.page
        ctx.page = page if _deferrable(weight) and (bias is None or _deferrable(bias)) else None
        ctx.edges, ctx.parameters = edges, None if ctx.page is None else (weight, bias)
        ctx.save_for_backward(x, weight, *strips)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # type: ignore[override]
        edges, g = ctx.edges, gradients[0]
        if g is None:
            return None, None, None, None
        x, weight, *strips = ctx.saved_tensors
        image, *learns = ctx.needs_input_grad[:3]
        now = learns if ctx.page is None else (False, False)
        asked, dw = _strip_gradients(edges, g, strips, weight, (image, now[0], False))
        trade = edges.exchange.post_back(x, asked) if image else None
        dx, tile, db = edges.whole.backward(g, x, weight, (image, *now))
        if trade is not None:
            trade.add_to(dx)
        if ctx.page is not None and any(learns):
            settle = _settling(edges, ctx.parameters, strips, tuple(learns))
            ctx.page.append((settle, x, x._version, g))
        return dx, _sum(tile, dw), db, None


def _strip_gradients(
    edges: Edges, g: Tensor, strips: Sequence[Tensor], weight: Tensor, wants: Sequence[bool]
) -> tuple[list[Tensor], Tensor | None]:
    """What the strips' gradients are, and what the strips add to the weight's."""
    asked, dw = [torch.zeros_like(strip) for strip in strips] if wants[0] else [], None
    for piece in edges.pieces if any(wants) else ():
        slab = piece.read(strips)
        read, added, _ = edges.narrow.backward(g[piece.out], slab, weight, wants)
        if wants[0]:
            piece.give(read, asked)
        dw = _sum(added, dw)
    return asked, dw


def _settling(
    edges: Edges, parameters: Any, strips: Sequence[Tensor], learns: tuple[bool, bool]
) -> Settle:
    """The weight gradient, put off."""
    weight, bias = parameters

    def settle(x: Tensor, g: Tensor) -> None:
        held = weight.detach()
        _, dw = _strip_gradients(edges, g, strips, held, (False, learns[0], False))
        _, tile, db = edges.whole.backward(g, x, held, (False, *learns))
        accumulate(weight, _sum(tile, dw))
        accumulate(bias, db)

    return settle


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return a if b is None else b if a is None else a.add_(b)


def _deferrable(parameter: Tensor) -> bool:
    """Whether its gradient may come outside of backward."""
    return parameter.is_leaf and not watched(parameter)


def apart(
    site: Site, name: str, windows: Sequence[Window], kernel: Kernel
) -> Callable[[Tensor, Tensor, Tensor | None], Tensor] | None:
    """The convolution of `name` by tile and strips; None where a slab serves better.

    `kernel` pads only the dims that are not cut. On those that are, the tile must give this rank's
    outputs, no more and no fewer, if it is padded alike on both sides.
    """
    layout, out = site.layouts[name], site.out()
    have, want = layout.boxes(), layout.boxes(clipped(site.wants[name], layout))
    own, mine = have[site.team.me], want[site.team.me]
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
    exchange = Exchange(site.team, have, [want], [Box.whole(mine.shape)], mine.shape)
    boxes = [box.shift(mine.start) for box in exchange.received]
    pieces = [_piece(box, _reads(layout, windows, box), boxes, out) for box in out.without(inside)]
    whole = replace(kernel, padding=tuple(padding))
    edges = Edges(exchange, whole, kernel, tuple(p for p in pieces if p.parts), site.memory)
    return lambda x, weight, bias: Apart.apply(*cast(x, weight, bias), edges)  # type: ignore


def _piece(box: Box, reads: Box, strips: Sequence[Box], out: Box) -> Piece:
    parts = []
    for k, strip in enumerate(strips):
        if reads.meets(strip):
            both = reads.intersect(strip)
            cells, there = both.relative_to(strip), both.relative_to(reads)
            parts.append((k, cells.slices(), there.slices()))
    return Piece(box.relative_to(out).slices(), reads.shape, tuple(parts))


def cast(x: Tensor, *weights: Tensor | None) -> list[Tensor | None]:
    """What autocast would make of a convolution's arguments."""
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
