"""Densely connected networks: every layer reads all earlier outputs of its block."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def densenet121(
    num_classes: int = 1000,
    in_channels: int = 3,
    growth: int = 32,
    layers: Sequence[int] = (6, 12, 24, 16),
    width: int = 64,
    dropout: float = 0.0,
) -> DenseNet:
    """DenseNet-121, 7,978,856 parameters; `layers`, `growth` and `width` make its siblings."""
    model = DenseNet(num_classes, in_channels, growth, layers, width, dropout)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    return model


class DenseNet(nn.Module):
    """Stem, dense blocks with halving transitions between, norm, mean over the image, linear."""

    def __init__(
        self,
        num_classes: int,
        in_channels: int,
        growth: int,
        layers: Sequence[int],
        width: int,
        dropout: float,
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(in_channels, width, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        channels = width
        self.blocks = nn.ModuleList()
        self.transitions = nn.ModuleList()
        for index, count in enumerate(layers):
            self.blocks.append(DenseBlock(channels, growth, count, dropout))
            channels += growth * count
            last = index == len(layers) - 1
            self.transitions.append(nn.Identity() if last else _transition(channels))
            channels = channels if last else channels // 2
        self.norm = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block, transition in zip(self.blocks, self.transitions, strict=True):
            x = transition(block(x))
        return self.classifier(self.pool(self.relu(self.norm(x))).flatten(1))


class DenseBlock(nn.Module):
    """Each layer adds `growth` channels to the list that all later ones read."""

    def __init__(self, channels: int, growth: int, count: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            DenseLayer(channels + growth * i, growth, dropout) for i in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(torch.cat(features, dim=1)))
        return torch.cat(features, dim=1)


class DenseLayer(nn.Module):
    """BN-ReLU-1x1 down to four times `growth`, then BN-ReLU-3x3 down to `growth`."""

    def __init__(self, channels: int, growth: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv1 = nn.Conv2d(channels, 4 * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(4 * growth)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)
        self.relu = nn.ReLU()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(self.relu(self.norm1(x)))
        return self.dropout(self.conv2(self.relu(self.norm2(x))))


def _transition(channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.Conv2d(channels, channels // 2, 1, bias=False),
        nn.AvgPool2d(2),
    )
