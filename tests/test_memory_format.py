"""Weights in any memory format, under optimizers that walk through memory: the plain numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gems.plans import Plan
from tests.exact import batches, plainly
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
