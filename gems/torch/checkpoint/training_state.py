"""What of a trainer a checkpoint saves and restores."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from gems.plans.plan import Plan
from gems.torch.state.loss_scale import LossScale
from gems.torch.state.optimizer_step import StageOptimizer
from gems.torch.state.ownership import Ownership
from gems.torch.state.rank_weights import RankWeights
from gems.transport.protocol import Transport


class TrainingState(Protocol):
    """The trainer, as far as checkpoints need it: they import nothing above them."""

    model: nn.Module
    plan: Plan
    owned: Ownership
    weights: RankWeights
    runner: Any  # whose random draws have a seed
    transport: Transport
    rank: int
    device: torch.device
    loss_weights: dict[str, nn.Parameter]
    first_name: Any  # of each weight, by any of its names
    extra_state_owners: dict[str, int]
    optimizer: Optimizer | None
    stage_optimizer: StageOptimizer | None
    scheduler: Any
    scale: LossScale | None
    async_pipeline: Any  # of schedule 2bw, else None
    seed: int
    steps: int
    window: int  # samples of the gradients that are accumulated
    first: int  # those of its first step

    def _named_parameters(self) -> list[tuple[str, nn.Parameter]]: ...

    def _stepped(self) -> dict[str, nn.Parameter]: ...
