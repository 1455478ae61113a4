"""The networks, each with what a step of it needs: a target of the right size, and a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from gems.models import build

Tensor = torch.Tensor


class Frozen(nn.BatchNorm2d):
    """A BatchNorm that goes by its running statistics, whatever mode the model is in."""

    def train(self, mode: bool = True) -> Frozen:
        return super().train(False)


def frozen(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.__class__ = Frozen
            module.train()
    return model


@dataclass(frozen=True)
class Network:
    """`target(side)` is what the loss wants for one image of that side."""

    make: Callable[[], nn.Module]
    target: Callable[[int], Tensor]
    multiple: int  # of which sides are tried

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target)


NETWORKS = {
    "ResNet-110-v2, BatchNorm frozen": Network(
        lambda: frozen(build("resnet110_v2", num_classes=2)),
        lambda side: torch.zeros(1, dtype=torch.int64),
        32,
    ),
    "U-Net, width 64, no norm": Network(
        lambda: build("unet", norm="none", num_classes=2),
        lambda side: torch.zeros(1, side, side, dtype=torch.int64),
        32,
    ),
    "U-Net, width 16, no norm": Network(
        lambda: build("unet", norm="none", num_classes=2, width=16),
        lambda side: torch.zeros(1, side, side, dtype=torch.int64),
        32,
    ),
}
