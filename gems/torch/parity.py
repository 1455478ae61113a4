"""Steps under a plan beside the same steps of the plain model: how far apart they end."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from gems.errors import PlanError
from gems.geometry.box import split_points
from gems.plans.plan import Plan
from gems.torch.trainer import Trainer
from gems.transport.threads import World

TOLERANCE = 1e-10  # in float64
FLOOR = 1e-3  # of the largest change of any tensor: below that, a change is compared with this much
PLAIN, ONE_RANK = "the plain loop", "one rank"


@dataclass(frozen=True)
class Parity:
    """The largest relative differences: of a loss, and of the change of a weight or buffer.

    `oracle` is the plain loop, or one rank under GEMS where the model draws random numbers, which
    only GEMS keys by sample and pixel.
    """

    oracle: str
    steps: int
    loss: float
    state: float
    worst: str  # the tensor

    @property
    def error(self) -> float:
        return max(self.loss, self.state)


def mean_square(output: Any, target: Any = None) -> torch.Tensor:
    """A loss for any model: of all floating-point tensors that it gives."""
    found = [x for x in pytree.tree_leaves(output) if torch.is_tensor(x) and x.is_floating_point()]
    return torch.stack([x.square().mean() for x in found]).sum()


def compare(model: nn.Module, sample: torch.Tensor, plan: Plan, **options: Any) -> Parity | None:
    """Train `model` in float64 for two steps under `plan`, and beside it; all ranks call it, and
    rank 0, which compares, gets the result.

    `sample` gives the shape of one micro-batch. Options are the trainer's. The model that was given
    stays as it is.
    """
    if plan.asynchronous:
        raise PlanError(
            "schedule '2bw' does not train as one device does, it equals its own update rule; "
            "verify another schedule"
        )
    model = copy.deepcopy(model).double().train()
    shape = (plan.total * sample.shape[0], *sample.shape[1:])
    draw = torch.Generator().manual_seed(0)
    batches = [torch.randn(shape, generator=draw, dtype=torch.float64) for _ in range(2)]
    before = copy.deepcopy(model.state_dict())
    given = batches[0][: sample.shape[0]]
    with Trainer(copy.deepcopy(model), mean_square, _sgd, given, plan, **options) as trainer:
        rank, device = trainer.session.rank, trainer.session.device
        losses = [trainer.step(batch).loss for batch in batches]
        state = trainer.state_dict()
    if rank != 0:
        return None
    random = _draws(model, given, device)
    oracle = _one_rank if random else _plain
    expected, wanted = oracle(model, batches, plan.total, device)
    loss = max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(losses, expected, strict=True))
    worst, error = _largest_difference(before, state, wanted)
    return Parity(ONE_RANK if random else PLAIN, len(batches), loss, error, worst)


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.01, momentum=0.9)


def _draws(model: nn.Module, given: torch.Tensor, device: torch.device) -> bool:
    """Whether two runs on the same inputs differ."""
    found = []
    for _ in range(2):
        run = copy.deepcopy(model).to(device)
        with torch.no_grad():
            found.append(float(mean_square(run(given.to(device)))))
    return found[0] != found[1]


def _plain(
    model: nn.Module, batches: list[torch.Tensor], count: int, device: torch.device
) -> tuple[list[float], Mapping[str, Any]]:
    model = copy.deepcopy(model).to(device)
    optimizer, losses = _sgd(model.parameters()), []
    for batch in batches:
        optimizer.zero_grad()
        parts = [batch[a:b].to(device) for a, b in pairwise(split_points(len(batch), count))]
        loss = 0.0
        for x in parts:
            value = mean_square(model(x)) * (len(x) / len(batch))
            value.backward()
            loss += float(value.detach())
        optimizer.step()
        losses.append(loss)
    return losses, model.state_dict()


def _one_rank(
    model: nn.Module, batches: list[torch.Tensor], count: int, device: torch.device
) -> tuple[list[float], Mapping[str, Any]]:
    plan = Plan(stages=1, micro_batches=count, schedule="sequential")
    sample = batches[0][: -(-len(batches[0]) // count)]
    alone = World(1).rank(0)
    with Trainer(
        copy.deepcopy(model), mean_square, _sgd, sample, plan, transport=alone, device=device
    ) as trainer:
        return [trainer.step(batch).loss for batch in batches], trainer.state_dict()


def _largest_difference(
    before: Mapping[str, Any], found: Mapping[str, Any], wanted: Mapping[str, Any]
) -> tuple[str, float]:
    """The tensor whose change differs most from the wanted one, and by how much of it."""
    tensors = {
        name: [x[name].detach().cpu().double() for x in (before, found, wanted)]
        for name, value in before.items()
        if torch.is_tensor(value) and value.numel()
    }
    changes = {name: float((c - a).abs().max()) for name, (a, _, c) in tensors.items()}
    least = max(FLOOR * max(changes.values(), default=0.0), 1e-12)
    errors = {
        name: float((b - c).abs().max()) / max(changes[name], least)
        for name, (_, b, c) in tensors.items()
    }
    worst = max(errors, key=lambda name: errors[name], default="")
    return worst, errors.get(worst, 0.0)
