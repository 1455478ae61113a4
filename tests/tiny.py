"""Networks that train in a tenth of a second, for `--model tests.tiny:net`. Not a test itself."""

from __future__ import annotations

import torch
from torch import nn

from gems.models import build


class Net(nn.Module):
    """Two convolutions with statistics, dropout, and a head."""

    def __init__(self, num_classes: int, width: int, drop: float) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()
        )
        self.body = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU())
        self.drop = nn.Dropout(drop)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.body(self.stem(x)).mean((2, 3))))


def net(num_classes: int = 2, width: int = 4, drop: float = 0.0) -> nn.Module:
    return Net(num_classes, width, drop)


def pixels(num_classes: int = 2, width: int = 4) -> nn.Module:
    """A class for each pixel."""
    first, last = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, num_classes, 1)
    return nn.Sequential(first, nn.ReLU(), last)


def unet(num_classes: int = 2, width: int = 4) -> nn.Module:
    return build("unet", num_classes=num_classes, levels=2, width=width, image_size=16)
