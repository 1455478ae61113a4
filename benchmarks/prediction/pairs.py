"""What is predicted and measured: networks with their images, and plans for one or two ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from gems.hardware import machine
from gems.plans.plan import Plan
from gems.torch.trainer import Trainer
from tests.networks import build


@dataclass(frozen=True)
class Network:
    make: Callable[[], nn.Module]
    samples: int
    side: int
    classes: int = 10

    def sample(self, micro_batches: int) -> torch.Tensor:
        return torch.empty(self.samples // micro_batches, 3, self.side, self.side)

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The same on every rank, in every step."""
        draw = torch.Generator().manual_seed(1)
        images = torch.randn((self.samples, 3, self.side, self.side), generator=draw)
        return images, torch.randint(self.classes, (self.samples,), generator=draw)

    def trainer(self, plan: Plan, **options: Any) -> Trainer:
        """On this computer. The learning rate is 0: every step does the same."""
        torch.manual_seed(0)
        return Trainer(
            self.make(),
            cross_entropy,
            lambda p: torch.optim.SGD(p, 0.0, momentum=0.9),
            self.sample(plan.total),
            plan,
            machine=machine("local"),
            **options,
        )


NETWORKS = {
    "ResNet-20 v1, 192 px": Network(lambda: build("resnet_v1", depth=20), 8, 192),
    "ResNet-110 v2, 64 px": Network(lambda: build("resnet110_v2"), 8, 64),
    "ConvNeXt, 192 px": Network(
        lambda: build(
            "convnext_tiny", num_classes=10, depths=(1, 1, 3, 1), dims=(32, 64, 128, 256)
        ),
        8,
        192,
    ),
    "DenseNet-121, 128 px": Network(lambda: build("densenet121"), 8, 128, 1000),
}
# Their layers differ more in what they cost.
UNEVEN = {
    "DenseNet-121, 128 px": NETWORKS["DenseNet-121, 128 px"],
    "EfficientNet-B0, 160 px": Network(lambda: build("efficientnet_b0", num_classes=10), 8, 160),
}

M = 4
PLANS: dict[str, dict[str, Any]] = {
    "one rank": {"schedule": "sequential", "micro_batches": M},
    "1f1b": {"stages": 2, "schedule": "1f1b", "micro_batches": M},
    "zero-bubble": {"stages": 2, "schedule": "zero-bubble", "micro_batches": M},
    "MASTER": {"stages": 2, "schedule": "gems", "micro_batches": M},
    "copies": {"schedule": "sequential", "data": 2, "micro_batches": M // 2},
    "rows": {"schedule": "sequential", "spatial": [(2, 1)], "micro_batches": M},
}


def plan(name: str) -> Plan:
    return Plan(**PLANS[name])
