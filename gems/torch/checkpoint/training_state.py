"""What of a session a checkpoint saves and restores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn

from gems.distributed.ownership import Ownership
from gems.plans.plan import Plan
from gems.torch.state.loss_scale import LossScale
from gems.torch.state.rank_optimizer import RankOptimizer
from gems.torch.state.rank_weights import RankWeights
from gems.transport.protocol import Transport


class TrainingState(Protocol):
    """The session, as far as checkpoints need it: they import nothing above them."""

    model: nn.Module
    plan: Plan
    owned: Ownership
    weights: RankWeights
    runner: Any  # whose random draws have a seed
    transport: Transport
    rank: int
    device: torch.device
    loss_weights: dict[str, nn.Parameter]
    part: Any  # the RankModel, which knows names and owners
    optimizers: list[RankOptimizer]
    in_half: bool  # whether weights that were fp32 are stored in half
    scale: LossScale | None
    async_pipeline: Any  # of schedule 2bw, else None
    seed: int
    steps: int
    window: int  # samples of the gradients that are accumulated
    first: int  # those of its first step


def saved_optimizers(plain: Mapping[str, Any]) -> list[Any]:
    """What state.json has of each optimizer: `optimizer` (kind, groups, rest), the `names` of the
    weights of each group, and its `scheduler`. The first one's are fields of state.json itself."""
    return [plain, *plain.get("others", ())] if plain["optimizer"] else []
