"""Weights in any memory format, under optimizers that walk through memory: the plain numbers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gems.plans.plan import Plan
from gems.torch.trainer import Trainer
from gems.transport.threads import run
from tests.exact import batches, micro_batches, plainly, same_state
from tests.test_zero import assert_same, planned

PLANS = {
    "pipeline": Plan(stages=2, micro_batches=2),
    "gems": Plan(stages=2, schedule="gems", replications=1),
    "copies": Plan(stages=1, micro_batches=1, data=2),
    "copies, zero 1": Plan(stages=1, micro_batches=1, data=2, zero=1),
    "copies, zero 3": Plan(stages=1, micro_batches=1, data=2, zero=3),
    "tiles": Plan(stages=1, spatial=["1x2"], micro_batches=2),
    "weights on the host": Plan(stages=2, schedule="gems", offload=("weights:host",)),
}
OPTIMIZERS = {
    f"{kind.__name__}, {way}": (kind, {way: True, "lr": 0.05, **options})
    for kind, options in (
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.AdamW, {}),
        (torch.optim.Adagrad, {}),
    )
    for way in ("foreach", "fused")
}


class Tied(nn.Module):
    """A convolution that is used at the beginning and at the end, hence in two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.twice = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 5)

    def forward(self, x: Any) -> Any:
        x = self.norm(self.twice(self.stem(x)).relu())
        return self.head(self.twice(x).mean((2, 3)))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("plan", PLANS)
def test_channels_last_weights_train_as_plainly(plan: str, optimizer: str) -> None:
    """Story: summed gradients came back row by row, whatever the weight's format was, and fused
    optimizers paired the wrong cells."""
    kind, options = OPTIMIZERS[optimizer]
    torch.manual_seed(0)
    model = Tied().double().to(memory_format=torch.channels_last)
    make = lambda p: kind(p, **options)  # noqa: E731
    data = batches((4, 3, 8, 8), 5, 3, torch.float64)
    found = planned(model, data, PLANS[plan], make=make)
    assert_same(found, plainly(model, data, PLANS[plan].total, make=make))


RELOADED = {
    "from one rank to a pipeline": (Plan(stages=1), Plan(stages=2, micro_batches=2)),
    "from a pipeline to one rank": (Plan(stages=2, micro_batches=2), Plan(stages=1)),
    "to sharded state": (Plan(stages=1), Plan(stages=1, data=2, zero=1)),
    "to weights on the host": (Plan(stages=1), Plan(stages=2, offload=("weights:host",))),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("plans", RELOADED)
def test_channels_last_weights_train_on_as_plainly_after_loading(
    plans: str, optimizer: str, tmp_path: Path
) -> None:
    """Story: loaded state was row by row, whatever the weight's format was."""
    kind, options = OPTIMIZERS[optimizer]
    torch.manual_seed(0)
    model = Tied().double().to(memory_format=torch.channels_last)
    make = lambda p: kind(p, **options)  # noqa: E731
    data = batches((4, 3, 8, 8), 5, 4, torch.float64)
    before, after = RELOADED[plans]
    counts = [before.total] * 2 + [after.total] * 2
    plain = copy.deepcopy(model)
    plainly_by = make(plain.parameters())
    for (images, labels), count in zip(data, counts, strict=True):
        for x, y, share in micro_batches(images, labels, count):
            (nn.functional.cross_entropy(plain(x), y) * share).backward()
        plainly_by.step()
        plainly_by.zero_grad()

    def part(transport: Any, plan: Plan, steps: list[Any], first: bool) -> Any:
        sample = torch.empty(4 // plan.total, 3, 8, 8, dtype=torch.float64)
        loss, mine = nn.functional.cross_entropy, copy.deepcopy(model)
        trainer = Trainer(mine, loss, make, sample, plan, transport=transport)
        if not first:
            trainer.load(tmp_path / "saved")
        for x, y in steps:
            trainer.step(x, y)
        if first:
            trainer.save(tmp_path / "saved")
        return trainer.state_dict()

    run(before.world, lambda t: part(t, before, data[:2], True))
    for state in run(after.world, lambda t: part(t, after, data[2:], False)):
        same_state(state, plain.state_dict())
