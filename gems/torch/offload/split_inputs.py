"""A value that all ranks of a group have, kept in parts until it is needed again (ZeRO-R's P_a).

rank 0    a b c d e ──► a b ─┐            ┌─► a b c d e
rank 1    a b c d e ──► c d ─┼─ gathered ─┼─► a b c d e     right before the forward runs again
rank 2    a b c d e ──► e 0 ─┘            └─► a b c d e
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from gems.torch.spatial.group import SpatialGroup

Tensor = torch.Tensor


@dataclass(frozen=True)
class Form:
    """How a value lies in memory: its dims from the slowest to the fastest, and their lengths."""

    order: tuple[int, ...]
    lengths: tuple[int, ...]

    def flat(self, x: Tensor) -> Tensor:
        return x.permute(self.order).reshape(-1)

    def gathered(self, part: Tensor, group: SpatialGroup) -> Tensor:
        """The whole value, out of all parts. All ranks of the group must come here."""
        flat = torch.cat(group.all_gather(part))[: prod(self.lengths)]
        back = [self.order.index(dim) for dim in range(len(self.order))]
        return flat.view(self.lengths).permute(back)


def part_of(x: Tensor, group: SpatialGroup) -> tuple[Form, Tensor]:
    """This rank's part of a value: as large as any other's, with zeros at the end."""
    order = tuple(sorted(range(x.dim()), key=lambda dim: -x.stride(dim)))
    form = Form(order, tuple(x.shape[dim] for dim in order))
    width = -(-x.numel() // group.size)
    mine = form.flat(x.detach())[group.me * width : (group.me + 1) * width]
    part = x.new_zeros(width)  # memory of its own: the whole must go
    part[: len(mine)] = mine
    return form, part
