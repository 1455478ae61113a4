"""The spatial group: the ranks that hold the tiles of one stage, and their collectives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from gems.geometry.layout import coordinate
from gems.transport.protocol import Transport, Work

Tensor = torch.Tensor
CHANNEL = 1  # of the transport: messages inside a stage never mix with those between stages


@dataclass
class Traffic:
    """What this rank has sent inside stages since the counters were last cleared."""

    messages: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class SpatialGroup:
    """The ranks of one stage, row-major over the grid; this rank is member number `me`."""

    grid: tuple[int, ...]
    ranks: tuple[int, ...]
    me: int
    transport: Transport
    traffic: Traffic = field(default_factory=Traffic)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @cached_property
    def coordinate(self) -> tuple[int, ...]:
        """This rank's row, column, ... of the grid."""
        return coordinate(self.grid, self.me)

    def irecv(self, member: int, like: Tensor, count: int) -> tuple[Tensor, Work]:
        """Receive `count` numbers from a member, of the type of `like`."""
        buffer = torch.empty(count * like.element_size(), dtype=torch.uint8, device=like.device)
        handle = self.transport.irecv(buffer, self.ranks[member], CHANNEL)
        return buffer.view(like.dtype), handle

    def isend(self, member: int, parts: Sequence[Tensor]) -> Work:
        """Send some tensors to a member, flat and in one message."""
        flat = (
            parts[0].reshape(-1) if len(parts) == 1 else torch.cat([p.reshape(-1) for p in parts])
        )
        flat = flat.contiguous().view(torch.uint8)
        self.traffic.messages += 1
        self.traffic.bytes += flat.numel()
        return self.transport.isend(flat, self.ranks[member], CHANNEL)

    def all_gather(self, mine: Tensor) -> list[Tensor]:
        """The tensors of all members, which have one shape: the same bits on every rank."""
        others = [m for m in range(self.size) if m != self.me]
        arriving = {m: self.irecv(m, mine, mine.numel()) for m in others}
        sending = [self.isend(m, [mine]) for m in others]
        for handle in (*(handle for _, handle in arriving.values()), *sending):
            handle.wait()
        return [mine if m == self.me else arriving[m][0].view(mine.shape) for m in range(self.size)]

    def all_reduce(self, mine: Tensor) -> Tensor:
        """The sum over the group, without a gradient."""
        first, *others = self.all_gather(mine.contiguous())
        found = first.clone()
        for other in others:
            found += other
        return found


class AllReduce(torch.autograd.Function):
    """The sum over the group. The gradient of a summand is the sum of all ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: SpatialGroup) -> Tensor:
        ctx.group = group
        ctx.set_materialize_grads(False)
        return group.all_reduce(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # type: ignore[override]
        (g,) = gradients
        return None if g is None else ctx.group.all_reduce(g), None
