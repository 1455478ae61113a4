"""The network every contestant trains, with the batch it is given."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

BATCH, PIXELS, CHANNELS, CLASSES = 8, 128, 3, 10
WIDTHS, DEPTHS = (32, 64, 128, 256), (3, 4, 4, 3)


class Residual(nn.Module):
    """Two 3×3 convolutions around a shortcut. GroupNorm sees one sample at a time, so that the
    network computes the same function over any micro-batches."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        stride = 1 if before == after else 2
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False),
            nn.GroupNorm(8, after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, 1, 1, bias=False),
            nn.GroupNorm(8, after),
        )
        self.shortcut = (
            nn.Identity() if stride == 1 else nn.Conv2d(before, after, 1, stride, bias=False)
        )
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.body(x) + self.shortcut(x))


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Stem, residual blocks and head, one child each; the same weights always."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        first, last = WIDTHS[0], WIDTHS[-1]
        stem = nn.Sequential(
            nn.Conv2d(CHANNELS, first, 3, 2, 1, bias=False), nn.GroupNorm(8, first), nn.ReLU()
        )
        widths = [w for w, depth in zip(WIDTHS, DEPTHS, strict=True) for _ in range(depth)]
        blocks = [Residual(a, b) for a, b in pairwise([first, *widths])]
        head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(last, CLASSES))
        return nn.Sequential(stem, *blocks, head).to(dtype)


def batch(
    size: int = BATCH, pixels: int = PIXELS, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Images and labels, the same always."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(size, CHANNELS, pixels, pixels, generator=generator).to(dtype)
    return images, torch.randint(CLASSES, (size,), generator=generator)


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Mean over the micro-batch."""
    return nn.functional.cross_entropy(output, target)
