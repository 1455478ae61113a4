"""What lies beyond the border of an image: a constant, its reflection, its edge, its far end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from gems.geometry.box import Box
from gems.geometry.layout import Span, around
from gems.geometry.window import Slide
from gems.torch.spatial.halo_exchange import HaloExchange
from gems.torch.spatial.tile import Tile
from gems.torch.tracing.calls import Ref

Tensor = torch.Tensor


@dataclass(frozen=True)
class Bent:
    """A window over an image whose border repeats what is near it: it reads only the image."""

    slide: Slide
    length: int
    mode: str  # "reflect" or "replicate"

    def reads(self, a: int, b: int) -> Span:
        low, high = self.slide.reads(a, b)
        cells = [self.source(low), self.source(high - 1)]
        cells += [self.source(c) for c in (0, self.length - 1) if low <= c < high]
        return min(cells), max(cells) + 1

    def source(self, cell: int) -> int:
        """The cell of the image that a cell of the border repeats."""
        last = self.length - 1
        if self.mode == "replicate":
            return min(max(cell, 0), last)
        return -cell if cell < 0 else 2 * last - cell if cell > last else cell

    def follow(self, c: int) -> int:
        return self.slide.follow(c)


def bordered(tile: Tile, x: Ref, mode: str, value: float = 0.0) -> Callable[[Tensor], Tensor]:
    """What brings an input to the box that this rank reads of it, with the border of `mode`."""
    if mode == "constant":
        return tile.with_halo(x, value)
    if mode == "circular":
        return _around(tile, x)
    return _bent(tile, x)


def _bent(tile: Tile, x: Ref) -> Callable[[Tensor], Tensor]:
    layout = tile.layouts[x.name]
    with_halo = tile.with_halo(x)
    out = tile.layouts[tile.outs[0]].have
    sources: list[tuple[int, Tensor]] = []
    for axis, window in enumerate(tile.windows[x.name]):
        a, b = out[axis][tile.group.coordinate[axis]]
        if isinstance(window, Bent) and b > a:
            cells = [window.source(c) for c in range(*window.slide.reads(a, b))]
            first = tile.padded_span(x.name, axis)[0]
            if cells != list(range(cells[0], cells[0] + len(cells))):
                sources.append((layout.dims[axis], torch.tensor(cells) - first))

    def bring(t: Tensor) -> Tensor:
        t = with_halo(t)
        for dim, cells in sources:
            t = t.index_select(dim, cells.to(t.device))
        return t

    return bring if not tile.out().empty else with_halo


def _around(tile: Tile, x: Ref) -> Callable[[Tensor], Tensor]:
    """A circular border: what leaves the image at one end is read at the other."""
    layout = tile.layouts[x.name]
    wants, me = tile.wants[x.name], tile.group.coordinate
    wanted, at = [], []
    for moved, boxes in around(layout, wants):
        wanted.append(boxes)
        mine = boxes[tile.group.me]
        start = [0] * len(layout.shape)
        for axis, dim in enumerate(layout.dims):
            start[dim] = mine.start[dim] - moved[axis] - wants[axis][me[axis]][0]
        if mine.empty:
            start = [0] * len(start)
        stop = tuple(a + n for a, n in zip(start, mine.shape, strict=True))
        at.append(Box(tuple(start), stop))
    frame = list(layout.shape)
    for axis, dim in enumerate(layout.dims):
        low, high = wants[axis][me[axis]]
        frame[dim] = high - low
    exchange = HaloExchange(tile.group, layout.boxes(), wanted, at, frame)
    return tile.exchanged(exchange)
