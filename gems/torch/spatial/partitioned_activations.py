"""Sharded inputs of a recomputed stage: each rank of a spatial group saves a part of a value that
all of them have, until recomputation needs it (ZeRO-R's P_a, partitioned activations).

rank 0    a b c d e ──► a b ─┐            ┌─► a b c d e
rank 1    a b c d e ──► c d ─┼ all_gather ┼─► a b c d e     right before recomputation
rank 2    a b c d e ──► e 0 ─┘            └─► a b c d e
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from gems.torch.autograd.saved_tensors import Pack, PackedParts, Saved
from gems.torch.spatial.group import SpatialGroup

Tensor = torch.Tensor


@dataclass(frozen=True)
class StridedForm:
    """How a value lies in memory: its dims from the slowest to the fastest, and their lengths."""

    group: SpatialGroup
    order: tuple[int, ...]
    lengths: tuple[int, ...]

    def unshard(self, shard: Tensor) -> Tensor:
        """The whole value. Collective: all ranks of the group must call it."""
        flat = torch.cat(self.group.all_gather(shard))[: prod(self.lengths)]
        back = [self.order.index(dim) for dim in range(len(self.order))]
        return flat.view(self.lengths).permute(back)


@dataclass(frozen=True)
class PartitionedActivations:
    """The step of the chain of saved tensors that saves a shard of what all ranks of a group have.
    They must unpack in one order."""

    group: SpatialGroup

    def pack(self, x: Tensor, version: int | None, rest: Pack) -> Saved:
        form, shard = self.shard(x)
        return PackedParts([rest(shard, None)], form.unshard)

    def shard(self, x: Tensor) -> tuple[StridedForm, Tensor]:
        """This rank's shard of a value: equally large on all ranks, padded with zeros."""
        order = tuple(sorted(range(x.dim()), key=lambda dim: -x.stride(dim)))
        form = StridedForm(self.group, order, tuple(x.shape[dim] for dim in order))
        width = -(-x.numel() // self.group.size)
        flat = x.detach().permute(order).reshape(-1)
        mine = flat[self.group.me * width : (self.group.me + 1) * width]
        shard = x.new_zeros(width)  # memory of its own, so that the whole value can be freed
        shard[: len(mine)] = mine
        return form, shard
