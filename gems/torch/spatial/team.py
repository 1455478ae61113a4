"""The ranks that share a stage, and the one thing they do with each other: exchange boxes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F

from gems.geometry import Box, Move, moves
from gems.layout import place
from gems.transport.core import Handle, Transport

Tensor = torch.Tensor
CHANNEL = 1  # of the transport: what is exchanged inside a stage never mixes with stages' messages


@dataclass
class Traffic:
    """What this rank has sent inside stages since the counters were last cleared."""

    messages: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class Team:
    """The ranks of one stage, in the order of the grid's cells; this rank is number `me`."""

    grid: tuple[int, ...]
    ranks: tuple[int, ...]
    me: int
    transport: Transport
    overlap: bool = False  # compute while strips travel
    traffic: Traffic = field(default_factory=Traffic)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @cached_property
    def place(self) -> tuple[int, ...]:
        return place(self.grid, self.me)

    def post(self, member: int, like: Tensor, count: int) -> tuple[Tensor, Handle]:
        """Expect `count` numbers from a member."""
        buffer = torch.empty(count * like.element_size(), dtype=torch.uint8, device=like.device)
        handle = self.transport.receive(buffer, self.ranks[member], CHANNEL)
        return buffer.view(like.dtype), handle

    def send(self, member: int, parts: Sequence[Tensor]) -> Handle:
        """Send some tensors to a member, flat and in one message."""
        flat = (
            parts[0].reshape(-1) if len(parts) == 1 else torch.cat([p.reshape(-1) for p in parts])
        )
        flat = flat.contiguous().view(torch.uint8)
        self.traffic.messages += 1
        self.traffic.bytes += flat.numel()
        return self.transport.send(flat, self.ranks[member], CHANNEL)

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
    def forward(ctx: Any, x: Tensor, team: Team) -> Tensor:
        ctx.team = team
        return team.total(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # type: ignore[override]
        return ctx.team.total(gradients[0]), None


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
        team: Team,
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

    # --- forward --------------------------------------------------------------------------------

    def strips(self, x: Tensor) -> list[Tensor]:
        """What the others send of this tensor, while they are sent what they want."""
        arriving, sending = self._trade(x, self.receives, self.sends)
        for _, _, handle in arriving:
            handle.wait()
        for handle in sending:
            handle.wait()
        return [buffer for _, buffer, _ in arriving]

    def _trade(
        self, x: Tensor, expected: dict[int, list[Box]], given: dict[int, list[Box]]
    ) -> tuple[list[tuple[list[Box], Tensor, Handle]], list[Handle]]:
        """Post what is expected from each member, and send what each is given of `x`."""
        arriving = [
            (boxes, *self.team.post(member, x, sum(b.size for b in boxes)))
            for member, boxes in sorted(expected.items())
        ]
        sending = [
            self.team.send(member, [x[box.slices()] for box in boxes])
            for member, boxes in sorted(given.items())
        ]
        return arriving, sending

    def slab(self, x: Tensor, strips: Sequence[Tensor]) -> Tensor:
        make = torch.full if self.bare else torch.empty
        fill = (self.fill,) if self.bare else ()
        slab = make(self.frame, *fill, dtype=x.dtype, device=x.device)  # type: ignore[operator]
        for here, there in self.copies:
            slab[there.slices()] = x[here.slices()]
        for (_, boxes), buffer in zip(sorted(self.receives.items()), strips, strict=True):
            for box, part in zip(boxes, buffer.split([b.size for b in boxes]), strict=True):
                slab[box.slices()] = part.view(box.shape)
        return slab

    # --- backward -------------------------------------------------------------------------------

    def adjoint(self, gradient: Tensor) -> Tensor:
        """The gradient of what this rank has: its own part, and what the others send back."""
        arriving, sending = self._trade(gradient, self.sends, self.receives)
        found = self._own(gradient)
        for boxes, buffer, handle in arriving:
            handle.wait()
            for box, part in zip(boxes, buffer.split([b.size for b in boxes]), strict=True):
                found[box.slices()] += part.view(box.shape)
        for handle in sending:
            handle.wait()
        return found

    def _own(self, gradient: Tensor) -> Tensor:
        if len(self.copies) == 1 and self.copies[0][0].shape == self.have.shape:
            return gradient[self.copies[0][1].slices()].clone(memory_format=torch.contiguous_format)
        found = gradient.new_zeros(self.have.shape)
        for here, there in self.copies:
            found[here.slices()] += gradient[there.slices()]
        return found


def _size(shape: Sequence[int]) -> int:
    return Box((0,) * len(shape), tuple(shape)).size


class Fetch(torch.autograd.Function):
    """An exchange that autograd sees."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange, slabs: Any) -> Tensor:
        ctx.exchange = exchange
        strips = exchange.strips(x)
        slab = exchange.slab(x, strips)
        if slabs is not None:
            slabs.note(slab, x, exchange, strips)
        return slab

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # type: ignore[override]
        return ctx.exchange.adjoint(gradients[0]), None, None


class Framed(torch.autograd.Function):
    """A tensor inside a border of a constant; the border's gradient goes nowhere."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pads: list[int], fill: float) -> Tensor:
        ctx.pads = pads
        return F.pad(x, pads, value=fill)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # type: ignore[override]
        return F.pad(gradients[0], [-p for p in ctx.pads]), None, None
