"""Any plan, any schedule: the same loss, gradients, parameters and buffers as the plain model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gems.plans.plan import Plan
from tests.exact import assert_equal, batches, plainly, planned


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.conv(x))
        y += x
        return self.relu(y)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.blocks = nn.ModuleList(Block(4) for _ in range(4))
        self.group = nn.GroupNorm(2, 4)
        self.head = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = skip = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head((self.group(x) + skip).mean((2, 3)))


PLANS = {
    "one rank": Plan(stages=1, micro_batches=8, schedule="sequential"),
    "sequential": Plan(stages=3, micro_batches=8, schedule="sequential"),
    "gpipe": Plan(stages=3, micro_batches=8, schedule="gpipe"),
    "1f1b": Plan(stages=4, micro_batches=8, schedule="1f1b"),
    "interleaved": Plan(stages=4, ranks=2, micro_batches=8, schedule="interleaved"),
    "zero-bubble": Plan(stages=4, micro_batches=8, schedule="zero-bubble"),
    "MASTER": Plan(stages=4, replications=4, schedule="gems"),
    "MASTER, odd": Plan(stages=3, replications=4, schedule="gems"),
    "Hybrid": Plan(stages=2, replications=2, data=2, schedule="gems"),
    "gems-zb": Plan(stages=4, replications=4, schedule="gems-zb"),
    "fold": Plan(stages=4, micro_batches=8, schedule="auto", placement="fold"),
    "both ways": Plan(stages=4, micro_batches=8, schedule="auto", bidirectional=True),
    "data": Plan(stages=1, micro_batches=4, data=2, schedule="sequential"),
}


@pytest.mark.parametrize("name", PLANS)
def test_any_plan_trains_like_the_plain_model(name: str) -> None:
    torch.manual_seed(0)
    model, data = Net().double(), batches((8, 3, 8, 8), 5, 3, torch.float64)
    assert_equal(planned(model, data, PLANS[name]), plainly(model, data, 8))
