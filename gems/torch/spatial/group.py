"""The ranks that share a stage, and the one thing they do with each other: exchange boxes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F

from gems.geometry.box import Box, Move, moves
from gems.geometry.layout import place
from gems.transport.protocol import Transport, Work

Tensor = torch.Tensor
CHANNEL = 1  # of the transport: what is exchanged inside a stage never mixes with stages' messages


@dataclass
class Traffic:
    """What this rank has sent inside stages since the counters were last cleared."""

    messages: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class SpatialGroup:
    """The ranks of one stage, in the order of the grid's cells; this rank is number `me`."""

    grid: tuple[int, ...]
    ranks: tuple[int, ...]
    me: int
    transport: Transport
    traffic: Traffic = field(default_factory=Traffic)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @cached_property
    def place(self) -> tuple[int, ...]:
        return place(self.grid, self.me)

    def post(self, member: int, like: Tensor, count: int) -> tuple[Tensor, Work]:
        """Expect `count` numbers from a member."""
        buffer = torch.empty(count * like.element_size(), dtype=torch.uint8, device=like.device)
        handle = self.transport.irecv(buffer, self.ranks[member], CHANNEL)
        return buffer.view(like.dtype), handle

    def send(self, member: int, parts: Sequence[Tensor]) -> Work:
        """Send some tensors to a member, flat and in one message."""
        flat = (
            parts[0].reshape(-1) if len(parts) == 1 else torch.cat([p.reshape(-1) for p in parts])
        )
        flat = flat.contiguous().view(torch.uint8)
        self.traffic.messages += 1
        self.traffic.bytes += flat.numel()
        return self.transport.isend(flat, self.ranks[member], CHANNEL)

    def rows(self, mine: Tensor) -> list[Tensor]:
        """Everybody's tensor of this shape, in the order of members: the same bits everywhere."""
        others = [m for m in range(self.size) if m != self.me]
        arriving = {m: self.post(m, mine, mine.numel()) for m in others}
        sending = [self.send(m, [mine]) for m in others]
        for _, handle in arriving.values():
            handle.wait()
        for handle in sending:
            handle.wait()
        return [mine if m == self.me else arriving[m][0].view(mine.shape) for m in range(self.size)]

    def total(self, mine: Tensor) -> Tensor:
        """The sum over the team, without a gradient."""
        rows = self.rows(mine.contiguous())
        found = rows[0].clone()
        for row in rows[1:]:
            found += row
        return found


class Total(torch.autograd.Function):
    """A sum over the team that every member gets; so does the gradient, by the same sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, team: SpatialGroup) -> Tensor:
        ctx.team = team
        ctx.set_materialize_grads(False)
        return team.total(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # type: ignore[override]
        (g,) = gradients
        return None if g is None else ctx.team.total(g), None


@dataclass(frozen=True)
class Trade:
    """An exchange under way: boxes that arrive, in whose message, and what is being sent."""

    arriving: list[tuple[list[Box], Tensor, Work]]
    sending: list[Work]

    def parts(self) -> list[Tensor]:
        """Wait for all of it; what arrived, box by box."""
        for handle in (*(handle for _, _, handle in self.arriving), *self.sending):
            handle.wait()
        return [
            part.view(box.shape)
            for boxes, buffer, _ in self.arriving
            for box, part in zip(boxes, buffer.split([b.size for b in boxes]), strict=True)
        ]

    def add_to(self, x: Tensor) -> Tensor:
        """Wait, and add what arrived at its place."""
        boxes = [box for group, _, _ in self.arriving for box in group]
        for box, part in zip(boxes, self.parts(), strict=True):
            x[box.slices()] += part
        return x


class Exchange:
    """Bring every member the box it wants of a tensor of which each member has a box.

    `have` and `want` list one box per member, in global coordinates. The result is a slab: the
    wanted box inside `frame`, which may be larger; what lies around it is filled with `fill`.

        have        want + fill            slab of member 0:   fill fill fill
        ┌───┐       ┌──────┐                                   fill own  strip
        │ 0 │  1    │ 0   ┊│                                   fill strip strip
        └───┘       └──────┘

    `want` may come in several pieces per member (a circular border reads the other end of the
    image); piece k of all members is `want[k]`, and lands at `at[k]` of the slab.
    """

    def __init__(
        self,
        team: SpatialGroup,
        have: Sequence[Box],
        want: Sequence[Sequence[Box]],
        at: Sequence[Box],
        frame: Sequence[int],
        fill: float = 0.0,
    ) -> None:
        self.team, self.fill = team, fill
        self.have, self.frame = have[team.me], tuple(frame)
        self.at = list(at)
        found = [(k, move) for k, boxes in enumerate(want) for move in moves(have, boxes)]
        me = team.me
        self.sends: dict[int, list[Box]] = {}
        self.receives: dict[int, list[Box]] = {}
        self.copies: list[tuple[Box, Box]] = []
        for k, move in found:
            if move.source == me == move.target:
                self.copies.append((self._here(move), self._there(k, move, want)))
            elif move.source == me:
                self.sends.setdefault(move.target, []).append(self._here(move))
            elif move.target == me:
                self.receives.setdefault(move.source, []).append(self._there(k, move, want))
        inside = sum(box.size for box in self.at)
        self.bare = inside < _size(self.frame)  # part of the slab is nobody's

    def _here(self, move: Move) -> Box:
        return move.box.relative_to(self.have)

    def _there(self, k: int, move: Move, want: Sequence[Sequence[Box]]) -> Box:
        return move.box.relative_to(want[k][self.team.me]).shift(self.at[k].start)

    # --- messages -------------------------------------------------------------------------------

    @property
    def received(self) -> list[Box]:
        """All that comes from others, in the order of members."""
        return [box for _, boxes in sorted(self.receives.items()) for box in boxes]

    def post(self, x: Tensor) -> Trade:
        """Expect what this rank wants of the others' tensors, and send them what they want."""
        given = {m: [x[box.slices()] for box in boxes] for m, boxes in self.sends.items()}
        return self._trade(x, self.receives, given)

    def post_back(self, like: Tensor, received: Sequence[Tensor]) -> Trade:
        """The same for gradients, the other way: those of all that was received go back."""
        rest, given = list(received), {}
        for member, boxes in sorted(self.receives.items()):
            given[member], rest = rest[: len(boxes)], rest[len(boxes) :]
        return self._trade(like, self.sends, given)

    def _trade(
        self, like: Tensor, expected: dict[int, list[Box]], given: dict[int, list[Tensor]]
    ) -> Trade:
        arriving = [
            (boxes, *self.team.post(member, like, sum(b.size for b in boxes)))
            for member, boxes in sorted(expected.items())
        ]
        return Trade(arriving, [self.team.send(m, parts) for m, parts in sorted(given.items())])

    # --- slabs ----------------------------------------------------------------------------------

    def slab(self, x: Tensor, strips: Sequence[Tensor]) -> Tensor:
        make = torch.full if self.bare else torch.empty
        fill = (self.fill,) if self.bare else ()
        slab = make(self.frame, *fill, dtype=x.dtype, device=x.device)  # type: ignore[operator]
        for here, there in self.copies:
            slab[there.slices()] = x[here.slices()]
        for box, part in zip(self.received, strips, strict=True):
            slab[box.slices()] = part
        return slab

    def adjoint(self, gradient: Tensor) -> Tensor:
        """The gradient of what this rank has: its own part, and what the others send back."""
        trade = self.post_back(gradient, [gradient[box.slices()] for box in self.received])
        return trade.add_to(self._own(gradient))

    def _own(self, gradient: Tensor) -> Tensor:
        if len(self.copies) == 1 and self.copies[0][0].shape == self.have.shape:
            return gradient[self.copies[0][1].slices()].clone(memory_format=torch.contiguous_format)
        found = gradient.new_zeros(self.have.shape)
        for here, there in self.copies:
            found[here.slices()] += gradient[there.slices()]
        return found


def _size(shape: Sequence[int]) -> int:
    return Box.whole(shape).size


class Fetch(torch.autograd.Function):
    """An exchange that autograd sees."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange, slabs: Any) -> Tensor:
        ctx.exchange = exchange
        ctx.set_materialize_grads(False)
        strips = exchange.post(x).parts()
        slab = exchange.slab(x, strips)
        if slabs is not None:
            slabs.note(slab, x, exchange, strips)
        return slab

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # type: ignore[override]
        (g,) = gradients
        return None if g is None else ctx.exchange.adjoint(g), None, None


class Framed(torch.autograd.Function):
    """A tensor inside a border of a constant; the border's gradient goes nowhere."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pads: list[int], fill: float, slabs: Any) -> Tensor:
        ctx.pads = pads
        ctx.set_materialize_grads(False)
        slab = F.pad(x, pads, value=fill)
        if slabs is not None:
            slabs.note_framed(slab, x, pads, fill)
        return slab

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # type: ignore[override]
        (g,) = gradients
        return None if g is None else F.pad(g, [-p for p in ctx.pads]), None, None, None
