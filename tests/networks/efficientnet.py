"""EfficientNet: inverted residuals with squeeze-and-excitation and stochastic depth."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gems.models.amoebanet import StochasticDepth

# expansion, channels, blocks, stride of the first block, kernel
Group = tuple[int, int, int, int, int]
B0: tuple[Group, ...] = (
    (1, 16, 1, 1, 3),
    (6, 24, 2, 2, 3),
    (6, 40, 2, 2, 5),
    (6, 80, 3, 2, 3),
    (6, 112, 3, 1, 5),
    (6, 192, 4, 2, 5),
    (6, 320, 1, 1, 3),
)


def efficientnet_b0(
    num_classes: int = 1000,
    in_channels: int = 3,
    groups: Sequence[Group] = B0,
    stem: int = 32,
    head: int = 1280,
    dropout: float = 0.2,
    drop_path: float = 0.2,
) -> EfficientNet:
    """EfficientNet-B0, 5,288,548 parameters; other `groups`, `stem` and `head` make smaller ones.

    A group is (expansion, channels, blocks, stride of the first, kernel). In training, block i of n
    is skipped with probability `drop_path * i / n`, sample by sample.
    """
    model = EfficientNet(num_classes, in_channels, groups, stem, head, dropout, drop_path)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return model


class EfficientNet(nn.Module):
    """Stem, inverted residual blocks, a wide 1x1 convolution, mean over the image, linear."""

    def __init__(
        self,
        num_classes: int,
        in_channels: int,
        groups: Sequence[Group],
        stem: int,
        head: int,
        dropout: float,
        drop_path: float,
    ) -> None:
        super().__init__()
        self.stem = _conv_norm(in_channels, stem, 3, stride=2)
        total = sum(count for _, _, count, _, _ in groups)
        channels = stem
        blocks: list[nn.Module] = []
        for expansion, out, count, stride, kernel in groups:
            for index in range(count):
                chance = drop_path * len(blocks) / total
                step = stride if index == 0 else 1
                blocks.append(InvertedResidual(channels, out, expansion, kernel, step, chance))
                channels = out
        self.blocks = nn.Sequential(*blocks)
        self.head = _conv_norm(channels, head, 1)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(head, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.head(self.blocks(self.stem(x)))
        return self.classifier(self.dropout(self.pool(x).flatten(1)))


class InvertedResidual(nn.Module):
    """1x1 wide, depthwise, squeeze-and-excitation, 1x1 narrow; a shortcut where shapes agree."""

    def __init__(
        self, channels: int, out: int, expansion: int, kernel: int, stride: int, drop_path: float
    ) -> None:
        super().__init__()
        wide = channels * expansion
        self.expand = _conv_norm(channels, wide, 1) if expansion != 1 else nn.Identity()
        self.depthwise = _conv_norm(wide, wide, kernel, stride, groups=wide)
        self.excite = SqueezeExcitation(wide, max(1, channels // 4))
        self.project = nn.Conv2d(wide, out, 1, bias=False)
        self.norm = nn.BatchNorm2d(out)
        self.shortcut = stride == 1 and channels == out
        self.drop_path = StochasticDepth(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        y = self.excite(self.depthwise(self.expand(x)))
        y = self.norm(self.project(y))
        return x + self.drop_path(y) if self.shortcut else y


class SqueezeExcitation(nn.Module):
    """Scale every channel by a gate computed from the mean of all channels."""

    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.reduce = nn.Conv2d(channels, squeezed, 1)
        self.act = nn.SiLU()
        self.expand = nn.Conv2d(squeezed, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.expand(self.act(self.reduce(self.pool(x)))))


def _conv_norm(
    channels: int, out: int, kernel: int, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(
                channels, out, kernel, stride, padding=kernel // 2, groups=groups, bias=False
            ),
            norm=nn.BatchNorm2d(out),
            act=nn.SiLU(),
        )
    )
