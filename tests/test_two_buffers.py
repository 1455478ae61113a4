"""PipeDream-2BW: its update equation, its windows, its two versions of weights."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from gems.plans import Plan
from gems.torch.trainer import Trainer
from gems.transport.core import Transport
from gems.transport.local import run
from tests.exact import Recordings, batches, micro_batches, part, same_state

MAKERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=1e-2),
    "adam": lambda p: torch.optim.Adam(p, 0.01),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(),
        nn.Conv2d(4, 4, 3), nn.Tanh(), nn.BatchNorm2d(4, momentum=None),
        nn.Flatten(), nn.Linear(4 * 16, 8), nn.Tanh(), nn.Linear(8, 3),
    ]  # fmt: skip
    return nn.Sequential(*layers).double()


def by_equation(
    model: nn.Module, data: list[Any], count: int, make: Any
) -> tuple[list[float], Any]:
    """W(t+1) = W(t) - update(gradient of batch t at W(max(t-1, 0))), in one process."""
    model = copy.deepcopy(model).train()
    parameters = list(model.parameters())
    optimizer = make(parameters)
    before = [p.detach().clone() for p in parameters]
    losses = []
    for inputs, targets in data:
        newest = [p.detach().clone() for p in parameters]
        with torch.no_grad():
            for p, old in zip(parameters, before, strict=True):
                p.copy_(old)
        total = 0.0
        for x, y, share in micro_batches(inputs, targets, count):
            loss = cross_entropy(model(x), y) * share
            loss.backward()
            total += float(loss.detach())
        with torch.no_grad():
            for p, new in zip(parameters, newest, strict=True):
                p.copy_(new)
        optimizer.step()
        optimizer.zero_grad()
        before = newest
        losses.append(total)
    return losses, model.state_dict()


def trained(
    plan: Plan, model: nn.Module, data: list[Any], make: Any, flushes: tuple[int, ...] = ()
) -> tuple[list[float], Any]:
    """Losses and state of rank 0; all ranks must have the same."""

    def work(transport: Transport) -> Any:
        return on_rank(transport, copy.deepcopy(model), plan, data, make, flushes)

    with mock.patch("gems.torch.trace.record", Recordings()):
        first, *others = run(plan.world, work)
    for losses, state in others:
        assert losses == first[0]
        same_state(state, first[1], 0.0)
    return first


def on_rank(
    transport: Transport, model: nn.Module, plan: Plan, data: list[Any], make: Any, flushes: Any
) -> tuple[list[float], Any]:
    inputs = data[0][0]
    sample = part(inputs, 0, inputs.shape[0] // plan.total)
    trainer = Trainer(model, cross_entropy, make, sample, plan, transport=transport)
    losses = []
    for t, (inputs, targets) in enumerate(data):
        step = trainer.step(inputs, targets)
        losses += [step.loss] if step.updated else []
        if t in flushes and (rest := trainer.flush()):
            losses.append(rest.loss)
    if rest := trainer.flush():
        losses.append(rest.loss)
    return losses, trainer.state_dict()


PLANS = {
    "one stage": (Plan(micro_batches=2, schedule="2bw"), "momentum"),
    "two stages": (Plan(stages=2, micro_batches=2, schedule="2bw"), "sgd"),
    "three stages": (Plan(stages=3, micro_batches=4, schedule="2bw"), "adam"),
    "four stages": (Plan(stages=4, micro_batches=4, schedule="2bw"), "momentum"),
    "recomputing": (Plan(stages=3, micro_batches=3, schedule="2bw", keep="inputs"), "adam"),
    "two copies": (Plan(stages=2, micro_batches=3, data=2, schedule="2bw"), "momentum"),
    "two copies, recomputing": (
        Plan(stages=2, micro_batches=2, data=2, schedule="2bw", keep=("inputs", ("3", "9"))),
        "adam",
    ),
    "tiles": (Plan(stages=2, micro_batches=2, spatial=(2, 1), schedule="2bw"), "momentum"),
    "tiles and copies": (
        Plan(stages=2, micro_batches=2, spatial=(1, 2), local_dp=2, data=2, schedule="2bw"),
        "sgd",
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_weights_and_statistics_follow_the_update_equation(name: str) -> None:
    plan, maker = PLANS[name]
    data = batches((12, 2, 6, 6), 3, 5, torch.float64)
    expected = by_equation(network(), data, plan.total, MAKERS[maker])
    losses, state = trained(plan, network(), data, MAKERS[maker])
    assert losses == pytest.approx(expected[0], rel=1e-10)
    same_state(state, expected[1])
