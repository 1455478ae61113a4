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

from gems.torch.spatial.group import SpatialGroup

Tensor = torch.Tensor


@dataclass(frozen=True)
class StridedForm:
    """How a value lies in memory: its dims from the slowest to the fastest, and their lengths."""

    order: tuple[int, ...]
    lengths: tuple[int, ...]

    def flat(self, x: Tensor) -> Tensor:
        return x.permute(self.order).reshape(-1)

    def unshard(self, shard: Tensor, group: SpatialGroup) -> Tensor:
        """The whole value. Collective: all ranks of the group must call it."""
        flat = torch.cat(group.all_gather(shard))[: prod(self.lengths)]
        back = [self.order.index(dim) for dim in range(len(self.order))]
        return flat.view(self.lengths).permute(back)


def shard_of(x: Tensor, group: SpatialGroup) -> tuple[StridedForm, Tensor]:
    """This rank's shard of a value: equally large on all ranks, padded with zeros."""
    order = tuple(sorted(range(x.dim()), key=lambda dim: -x.stride(dim)))
    form = StridedForm(order, tuple(x.shape[dim] for dim in order))
    width = -(-x.numel() // group.size)
    mine = form.flat(x.detach())[group.me * width : (group.me + 1) * width]
    shard = x.new_zeros(width)  # memory of its own, so that the whole value can be freed
    shard[: len(mine)] = mine
    return form, shard
