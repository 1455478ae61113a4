"""Halo exchange: every rank of a spatial group gets the box it reads of a tiled tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from gems.geometry.box import Box, Move, moves_of
from gems.torch.spatial.group import SpatialGroup
from gems.torch.tensors.strides import dense_like
from gems.transport.protocol import Work

Tensor = torch.Tensor


@dataclass(frozen=True)
class PendingExchange:
    """An exchange in flight: boxes that arrive, each list in one message."""

    arriving: list[tuple[list[Box], Tensor]]
    handle: Work

    def wait(self) -> list[Tensor]:
        """Wait for all of it; what arrived, box by box."""
        self.handle.wait()
        return [
            part.view(box.shape)
            for boxes, buffer in self.arriving
            for box, part in zip(boxes, buffer.split([b.size for b in boxes]), strict=True)
        ]

    def add_to(self, x: Tensor) -> Tensor:
        """Wait, and add each box that arrived to its cells of `x`."""
        boxes = [box for group, _ in self.arriving for box in group]
        for box, part in zip(boxes, self.wait(), strict=True):
            x[box.slices()] += part
        return x


class HaloExchange:
    """Bring every member the box it wants of a tensor of which each member has a box.

    `have` and `want` list one box per member, in global coordinates. The result is a padded tile:
    the wanted box inside of `frame`, which may be larger; the rest is filled with `fill`.

        have        want + fill            padded tile of member 0:   fill fill fill
        ┌───┐       ┌──────┐                                          fill own  halo
        │ 0 │  1    │ 0   ┊│                                          fill halo halo
        └───┘       └──────┘

    A member may want several boxes (a circular border reads the other end of the image): box k of
    all members is `want[k]`, and lies at `at[k]` of the padded tile.
    """

    def __init__(
        self,
        group: SpatialGroup,
        have: Sequence[Box],
        want: Sequence[Sequence[Box]],
        at: Sequence[Box],
        frame: Sequence[int],
        fill: float = 0.0,
    ) -> None:
        self.group, self.fill = group, fill
        self.have, self.frame = have[group.me], tuple(frame)
        self.at = list(at)
        me = group.me
        found = [(k, m) for k, boxes in enumerate(want) for m in moves_of(me, have, boxes)]
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
        self.filled = inside < Box.whole(self.frame).size  # some cells are nobody's

    def _here(self, move: Move) -> Box:
        return move.box.relative_to(self.have)

    def _there(self, k: int, move: Move, want: Sequence[Sequence[Box]]) -> Box:
        return move.box.relative_to(want[k][self.group.me]).shift(self.at[k].start)

    # --- messages -------------------------------------------------------------------------------

    @property
    def received(self) -> list[Box]:
        """The halos: all boxes that come from others, in the order of members."""
        return [box for _, boxes in sorted(self.receives.items()) for box in boxes]

    def start(self, x: Tensor) -> PendingExchange:
        """Receive what this rank wants of the others' tensors, and send them what they want."""
        given = {m: [x[box.slices()] for box in boxes] for m, boxes in self.sends.items()}
        return self._start(x, self.receives, given)

    def start_backward(self, like: Tensor, received: Sequence[Tensor]) -> PendingExchange:
        """Send the gradients of all halos back to the ranks that own the cells."""
        rest, given = list(received), {}
        for member, boxes in sorted(self.receives.items()):
            given[member], rest = rest[: len(boxes)], rest[len(boxes) :]
        return self._start(like, self.sends, given)

    def _start(
        self, like: Tensor, expected: dict[int, list[Box]], given: dict[int, list[Tensor]]
    ) -> PendingExchange:
        counts = {m: sum(b.size for b in boxes) for m, boxes in sorted(expected.items())}
        received, handle = self.group.exchange(dict(sorted(given.items())), counts, like)
        return PendingExchange([(expected[m], received[m]) for m in counts], handle)

    # --- padded tiles ---------------------------------------------------------------------------

    def assemble(self, x: Tensor, halos: Sequence[Tensor]) -> Tensor:
        """The padded tile, of the tile and its halos."""
        padded = dense_like(self.frame, x)
        if self.filled:
            padded.fill_(self.fill)
        for here, there in self.copies:
            padded[there.slices()] = x[here.slices()]
        for box, halo in zip(self.received, halos, strict=True):
            padded[box.slices()] = halo
        return padded

    def adjoint(self, gradient: Tensor) -> Tensor:
        """The gradient of what this rank has: its own part, and what the others send back."""
        pending = self.start_backward(gradient, [gradient[box.slices()] for box in self.received])
        return pending.add_to(self._own(gradient))

    def _own(self, gradient: Tensor) -> Tensor:
        if len(self.copies) == 1 and self.copies[0][0].shape == self.have.shape:
            return gradient[self.copies[0][1].slices()].clone()
        found = dense_like(self.have.shape, gradient).zero_()
        for here, there in self.copies:
            found[here.slices()] += gradient[there.slices()]
        return found


class ExchangeHalos(torch.autograd.Function):
    """A halo exchange that autograd sees; `saved` then saves the tile and its halos apart."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: HaloExchange, saved: Any) -> Tensor:
        ctx.exchange = exchange
        ctx.set_materialize_grads(False)
        halos = exchange.start(x).wait()
        padded = exchange.assemble(x, halos)
        if saved is not None:
            saved.add_exchanged(padded, x, exchange, halos)
        return padded

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # type: ignore[override]
        (g,) = gradients
        return None if g is None else ctx.exchange.adjoint(g), None, None


class PadTile(torch.autograd.Function):
    """A tile inside a border of a constant, whose gradient is dropped."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pads: list[int], fill: float, saved: Any) -> Tensor:
        ctx.pads = pads
        ctx.set_materialize_grads(False)
        padded = F.pad(x, pads, value=fill)
        if saved is not None:
            saved.add_bordered(padded, x, pads, fill)
        return padded

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # type: ignore[override]
        (g,) = gradients
        return None if g is None else F.pad(g, [-p for p in ctx.pads]), None, None, None
