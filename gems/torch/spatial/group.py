"""The spatial group: the ranks that hold the tiles of one stage, and their collectives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gems.distributed.members import Members
from gems.torch.tensors.strides import as_bytes
from gems.transport.protocol import EXCHANGES, Work

Tensor = torch.Tensor


class SpatialGroup(Members):
    """The members of a stage on tiles, and their collectives."""

    def channel(self, call: str, value: str, number: int) -> SpatialGroup:
        """The group for one of a call's exchanges of a value. Ranks match messages by order."""
        return self

    def exchange(
        self, parts: Mapping[int, Sequence[Tensor]], counts: Mapping[int, int], like: Tensor
    ) -> tuple[dict[int, Tensor], Work]:
        """Send each member its tensors, flat and in one message, and receive so many numbers from
        each member, of the type of `like`."""
        size, device = like.element_size(), like.device
        received = {
            m: torch.empty(n * size, dtype=torch.uint8, device=device) for m, n in counts.items()
        }
        sends = [(_flat(tensors), self.ranks[m]) for m, tensors in parts.items()]
        receives = [(buffer, self.ranks[m]) for m, buffer in received.items()]
        self.traffic.messages += len(sends)
        self.traffic.bytes += sum(flat.numel() for flat, _ in sends)
        handle = self.transport.exchange(sends, receives, self.sorted)
        return {m: buffer.view(like.dtype) for m, buffer in received.items()}, handle

    def all_gather(self, mine: Tensor) -> list[Tensor]:
        """The tensors of all members, which have one shape: the same bits on every rank."""
        flat = _flat([mine])
        buffer = torch.empty(self.size * flat.numel(), dtype=torch.uint8, device=flat.device)
        rows = dict(zip(self.sorted, buffer.view(self.size, len(flat)), strict=True))
        rows[self.ranks[self.me]].copy_(flat)
        self.traffic.messages += self.size - 1
        self.traffic.bytes += (self.size - 1) * flat.numel()
        self.transport.all_gather(buffer, self.sorted, EXCHANGES).wait()
        return [rows[rank].view(mine.dtype).view(mine.shape) for rank in self.ranks]

    def all_reduce(self, mine: Tensor) -> Tensor:
        """The sum over the group, without a gradient."""
        first, *others = self.all_gather(mine.contiguous())
        found = first.clone()
        for other in others:
            found += other
        return found


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of some tensors, one after the other."""
    if len(tensors) == 1:
        return as_bytes(tensors[0].contiguous())
    return torch.cat([t.reshape(-1) for t in tensors]).view(torch.uint8)


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
