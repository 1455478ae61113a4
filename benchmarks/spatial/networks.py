"""The networks that are cut, each with its images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gems.models import build


@dataclass(frozen=True)
class Work:
    """A network, the shape of its images, and how its output becomes a number."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    loss: Callable[[Tensor, Tensor], Tensor]
    classes: int = 0  # 0: compared with an image

    def model(self) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return self.make()

    def batch(self) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(1)
        images = torch.randn(self.shape, generator=draw)
        if self.classes:
            return images, torch.randint(self.classes, self.shape[:1], generator=draw)
        with torch.no_grad():
            out = (self.shape[0], 8, *self.shape[2:])
        return images, torch.randn(out, generator=draw)


def squares(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def stack(norm: bool = False) -> nn.Module:
    """Convolutions at full resolution, with BatchNorm or without."""
    layers: list[nn.Module] = []
    widths = (3, 32, 32, 32, 32, 32, 32)
    for before, after in pairwise(widths):
        layers.append(nn.Conv2d(before, after, 3, padding=1))
        layers += [nn.BatchNorm2d(after)] if norm else []
        layers.append(nn.ReLU())
    return nn.Sequential(*layers, nn.Conv2d(32, 8, 1))


WORK = {
    "conv stack, 512 px": Work(stack, (1, 3, 512, 512), squares),
    "conv stack with BatchNorm, 512 px": Work(lambda: stack(True), (1, 3, 512, 512), squares),
    "ResNet-20 v1, 1024 px": Work(
        lambda: build("resnet_v1", depth=20), (1, 3, 1024, 1024), cross_entropy, 10
    ),
    "U-Net, 256 px": Work(
        lambda: nn.Sequential(build("unet", width=16), nn.Conv2d(2, 8, 1)),
        (1, 3, 256, 256),
        squares,
    ),
}
