"""The calls of a patch that backward need not make again, as nobody looks at what they make."""

from __future__ import annotations

import operator
from collections.abc import Sequence, Set

import torch
import torch.nn.functional as F
from torch import nn

from gems.torch.tracing.calls import Call

CONVOLUTIONS = {nn.Conv1d, nn.Conv2d, nn.Conv3d, F.conv1d, F.conv2d, F.conv3d}
SUMS = {torch.add, torch.Tensor.add, torch.Tensor.__add__, operator.add}


def blind(call: Call, model: nn.Module) -> int:
    """As in `Block.blind`: 1 for a convolution, 2 for a sum, 0 for all else."""
    if call.mutates or call.overwrites or call.touches or call.region is not None:
        return 0
    kind = call.function if call.module is None else type(model.get_submodule(call.module))
    return 1 if kind in CONVOLUTIONS else 2 if kind in SUMS else 0


def unread(
    calls: Sequence[Call], model: nn.Module, looking: Set[str] = frozenset()
) -> frozenset[str]:
    """The convolutions whose results backward does not look at, nor do calls between them and the
    end: only sums do, and none of those `looking` at what they read."""
    found, read = set(), set[str]()
    for call in reversed(calls):
        kind, seen = blind(call, model), not read.isdisjoint(call.writes)
        if kind == 1 and not seen:
            found.add(call.name)
        if kind != 2 or seen or call.name in looking:
            read.update((*call.reads, *call.overwrites, *(old for old, _ in call.mutates)))
    return frozenset(found)
