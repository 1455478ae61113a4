"""What lies beyond the border of an image: a constant, its reflection, its edge, its far end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from gems.geometry.box import Box
from gems.geometry.layout import Span, around
from gems.geometry.window import Slide
from gems.torch.spatial.group import Exchange, Fetch
from gems.torch.spatial.rule import Site
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
        """The cell of the image that stands at this place."""
        last = self.length - 1
        if self.mode == "replicate":
            return min(max(cell, 0), last)
        return -cell if cell < 0 else 2 * last - cell if cell > last else cell

    def follow(self, c: int) -> int:
        return self.slide.follow(c)


def bordered(site: Site, x: Ref, mode: str, value: float = 0.0) -> Callable[[Tensor], Tensor]:
    """Brings an input to what this rank reads of it, with the border that `mode` says."""
    if mode == "constant":
        return site.fetch(x, value)
    if mode == "circular":
        return _around(site, x)
    return _bent(site, x)


def _bent(site: Site, x: Ref) -> Callable[[Tensor], Tensor]:
    layout = site.layouts[x.name]
    fetch = site.fetch(x, None)
    out = site.layouts[next(iter(site.rule.outs))].have
    places: list[tuple[int, Tensor]] = []
    for axis, window in enumerate(site.rule.windows[x.name]):
        a, b = out[axis][site.team.place[axis]]
        if isinstance(window, Bent) and b > a:
            cells = [window.source(c) for c in range(*window.slide.reads(a, b))]
            first = site.slab_span(x.name, axis)[0]
            if cells != list(range(cells[0], cells[0] + len(cells))):
                places.append((layout.dims[axis], torch.tensor(cells) - first))

    def bring(t: Tensor) -> Tensor:
        t = fetch(t)
        for dim, cells in places:
            t = t.index_select(dim, cells.to(t.device))
        return t

    return bring if not site.out().empty else fetch


def _around(site: Site, x: Ref) -> Callable[[Tensor], Tensor]:
    """A circular border: what leaves the image at one end is read at the other."""
    layout = site.layouts[x.name]
    wants, me = site.wants[x.name], site.team.place
    pieces, at = [], []
    for moved, boxes in around(layout, wants):
        pieces.append(boxes)
        mine = boxes[site.team.me]
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
    exchange = Exchange(site.team, layout.boxes(), pieces, at, frame)
    return lambda t: Fetch.apply(t, exchange, site.memory.now)  # type: ignore[no-any-return]
