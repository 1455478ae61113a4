"""What is predicted and measured: networks with their images, and plans for one or two ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from gems.models import build
from gems.plans import Plan


@dataclass(frozen=True)
class Network:
    make: Callable[[], nn.Module]
    samples: int
    side: int
    classes: int = 10


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
