"""ConvNeXt: large depthwise kernels, normalisation over channels, layer scale."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn


def convnext_tiny(
    num_classes: int = 1000,
    in_channels: int = 3,
    depths: Sequence[int] = (3, 3, 9, 3),
    dims: Sequence[int] = (96, 192, 384, 768),
    scale: float = 1e-6,
) -> ConvNeXt:
    """ConvNeXt-T, 28,589,128 parameters; `depths` and `dims` make others.

    `scale` is where the layer scale parameters start.
    """
    if len(depths) != len(dims):
        raise ValueError(
            f"depths {tuple(depths)} and dims {tuple(dims)} must have one entry per group each"
        )
    model = ConvNeXt(num_classes, in_channels, depths, dims, scale)
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            nn.init.normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return model


class ConvNeXt(nn.Module):
    """A 4x4 patch stem, groups of blocks with a halving between, mean over the image, linear."""

    def __init__(
        self,
        num_classes: int,
        in_channels: int,
        depths: Sequence[int],
        dims: Sequence[int],
        scale: float,
    ) -> None:
        super().__init__()
        self.downsample = nn.ModuleList(
            [nn.Sequential(nn.Conv2d(in_channels, dims[0], 4, stride=4), ChannelNorm(dims[0]))]
        )
        for a, b in itertools.pairwise(dims):
            self.downsample.append(nn.Sequential(ChannelNorm(a), nn.Conv2d(a, b, 2, stride=2)))
        self.groups = nn.ModuleList(
            nn.Sequential(*(Block(dim, scale) for _ in range(depth)))
            for depth, dim in zip(depths, dims, strict=True)
        )
        self.norm = nn.LayerNorm(dims[-1], eps=1e-6)
        self.head = nn.Linear(dims[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        for downsample, group in zip(self.downsample, self.groups, strict=True):
            x = group(downsample(x))
        return self.head(self.norm(x.mean(dim=(2, 3))))


class ChannelNorm(nn.Module):
    """LayerNorm over the channels of every pixel of an N, C, H, W tensor."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Block(nn.Module):
    """Depthwise 7x7, then per pixel: norm, four times wider, GELU, back; scaled and added."""

    def __init__(self, channels: int, scale: float) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.expand = nn.Linear(channels, 4 * channels)
        self.act = nn.GELU()
        self.reduce = nn.Linear(4 * channels, channels)
        self.scale = nn.Parameter(torch.full((channels,), scale))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.reduce(self.act(self.expand(y))) * self.scale
        return x + y.permute(0, 3, 1, 2)
