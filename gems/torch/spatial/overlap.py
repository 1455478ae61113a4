"""A convolution that computes its interior while the strips of its neighbours travel.

    ┌───────────────┐     outputs that read only own cells: the interior, computed first
    │   ┌───────┐   │     the pieces around it wait for the strips
    │   │inside │   │     backward goes the other way round: the pieces first, whose gradients
    │   └───────┘   │     travel while the interior's are computed
    └───────────────┘

Posting and waiting are two nodes of the autograd graph, with the interior between them. Autograd
runs nodes in the reverse of the order in which they were made, so backward overlaps as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gems.geometry import Box, moves
from gems.layout import Layout, clipped
from gems.torch.spatial.rule import Site
from gems.torch.spatial.team import Exchange, Fetch, Team
from gems.transport.core import Handle
from gems.windows import Slide, Window

Tensor = torch.Tensor


@dataclass
class Crossing:
    """One exchange under way: posted by one node, awaited by another."""

    team: Team
    have: Box
    sends: dict[int, list[Box]]  # to a member: boxes in global coordinates
    receives: dict[int, list[Box]]
    arriving: list[tuple[list[Box], Tensor, Handle]] = field(default_factory=list)
    sending: list[Handle] = field(default_factory=list)
    returned: bool = False  # gradients are on their way back

    def post(self, x: Tensor) -> None:
        """Expect what the others send; send them what they want."""
        self._expect(self.receives, x)
        for member, boxes in sorted(self.sends.items()):
            parts = [x[box.relative_to(self.have).slices()] for box in boxes]
            self.sending.append(self.team.send(member, parts))

    def strips(self, like: Tensor) -> dict[Box, Tensor]:
        """Zeros for what was received."""
        boxes = (box for group in self.receives.values() for box in group)
        return {box: like.new_zeros(box.shape) for box in boxes}

    def post_back(self, like: Tensor, strips: dict[Box, Tensor]) -> None:
        """The same for gradients, the other way."""
        self.returned = True
        self._expect(self.sends, like)
        for member, boxes in sorted(self.receives.items()):
            self.sending.append(self.team.send(member, [strips[box] for box in boxes]))

    def _expect(self, boxes_of: dict[int, list[Box]], like: Tensor) -> None:
        for member, boxes in sorted(boxes_of.items()):
            count = sum(box.size for box in boxes)
            self.arriving.append((boxes, *self.team.post(member, like, count)))

    def arrived(self) -> list[tuple[Box, Tensor]]:
        """Wait for all of it."""
        found = []
        for boxes, buffer, handle in self.arriving:
            handle.wait()
            parts = buffer.split([box.size for box in boxes])
            found += [(b, part.view(b.shape)) for b, part in zip(boxes, parts, strict=True)]
        for handle in self.sending:
            handle.wait()
        self.arriving, self.sending = [], []
        return found


class Begin(torch.autograd.Function):
    """Post the exchange; in backward, wait for what the neighbours' gradients add."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, crossing: Crossing) -> Tensor:
        ctx.crossing = crossing
        crossing.post(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # type: ignore[override]
        found = gradients[0].clone(memory_format=torch.contiguous_format)
        if not ctx.crossing.returned:  # nothing here read a strip
            ctx.crossing.post_back(found, ctx.crossing.strips(found))
        for box, part in ctx.crossing.arrived():
            found[box.relative_to(ctx.crossing.have).slices()] += part
        return found, None


class Finish(torch.autograd.Function):
    """Wait for the strips and lay out what each piece reads; in backward, send gradients on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, crossing: Crossing, reads: Sequence[Box]) -> Any:
        ctx.crossing, ctx.reads, ctx.shape = crossing, reads, x.shape
        parts = [(crossing.have, x), *crossing.arrived()]
        found = []
        for read in reads:
            piece = x.new_zeros(read.shape)  # the border of the image is zero
            for box, part in parts:
                if read.meets(box):
                    both = read.intersect(box)
                    source = part[both.relative_to(box).slices()]
                    piece[both.relative_to(read).slices()] = source
            found.append(piece)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # type: ignore[override]
        crossing = ctx.crossing
        like = gradients[0]
        strips = crossing.strips(like)
        own = like.new_zeros(ctx.shape)
        for read, gradient in zip(ctx.reads, gradients, strict=True):
            for box, target in ((crossing.have, own), *strips.items()):
                if read.meets(box):
                    both = read.intersect(box)
                    here = target[both.relative_to(box).slices()]
                    here += gradient[both.relative_to(read).slices()]
        crossing.post_back(like, strips)
        return own, None, None


def overlapped(
    site: Site, name: str, windows: Sequence[Window], run: Callable[[Tensor, Any], Tensor]
) -> Callable[[Tensor, Any], Tensor] | None:
    """`run(slab, arguments)` piece by piece, the interior first; None if nothing is to be had."""
    layout, out = site.layouts[name], site.out()
    want = layout.boxes(clipped(site.wants[name], layout))
    have = layout.boxes()
    if all(w in h for w, h in zip(want, have, strict=True)) or out.empty:
        return None
    if not all(isinstance(w, Slide) for w in windows):
        return None
    me, mine = site.team.me, have[site.team.me]
    inside = _interior(layout, windows, mine, out)
    if inside is None:
        return None
    sends, receives = _parts(site.team, have, want)
    pieces = out.without(inside)
    reads = [_reads(layout, windows, piece) for piece in pieces]
    near = _reads(layout, windows, inside)
    frame = Exchange(
        site.team, [mine if m == me else _nothing(mine) for m in range(site.team.size)],
        [[near.intersect(mine) if m == me else _nothing(mine) for m in range(site.team.size)]],
        [near.intersect(mine).relative_to(near)], near.shape,
    )  # fmt: skip

    def work(x: Tensor, a: Any) -> Tensor:
        crossing = Crossing(site.team, mine, sends, receives)
        x = Begin.apply(x, crossing)  # type: ignore[assignment]
        slab = x if near == mine else Fetch.apply(x, frame, site.memory.now)
        found = [(inside, run(slab, a))]  # type: ignore[arg-type]
        if site.memory.now is not None:
            site.memory.now.forget()
        if not pieces:
            crossing.arrived()
            return found[0][1]
        for piece, slab in zip(pieces, Finish.apply(x, crossing, reads), strict=True):  # type: ignore[arg-type]
            found.append((piece, run(slab, a)))
        return _assembled(found, out)

    return work


def _nothing(like: Box) -> Box:
    return Box((0,) * len(like.start), (0,) * len(like.start))


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


def _parts(
    team: Team, have: Sequence[Box], want: Sequence[Box]
) -> tuple[dict[int, list[Box]], dict[int, list[Box]]]:
    sends: dict[int, list[Box]] = {}
    receives: dict[int, list[Box]] = {}
    for move in moves(have, want):
        if move.source == team.me != move.target:
            sends.setdefault(move.target, []).append(move.box)
        elif move.target == team.me != move.source:
            receives.setdefault(move.source, []).append(move.box)
    return sends, receives


def _assembled(found: Sequence[tuple[Box, Tensor]], out: Box) -> Tensor:
    """The results of all pieces as one tensor, pasted along one dim after the other."""
    pieces = list(found)
    for dim in reversed(range(2, len(out.start))):
        rows: dict[Any, list[tuple[Box, Tensor]]] = {}
        for box, part in pieces:
            key = (box.start[:dim] + box.start[dim + 1 :], box.stop[:dim] + box.stop[dim + 1 :])
            rows.setdefault(key, []).append((box, part))
        pieces = [_pasted(row, dim) for row in rows.values()]
    ((_, whole),) = pieces
    return whole


def _pasted(row: list[tuple[Box, Tensor]], dim: int) -> tuple[Box, Tensor]:
    row = sorted(row, key=lambda pair: pair[0].start[dim])
    if len(row) == 1:
        return row[0]
    first, last = row[0][0], row[-1][0]
    stop = (*first.stop[:dim], last.stop[dim], *first.stop[dim + 1 :])
    return Box(first.start, stop), torch.cat([part for _, part in row], dim)
