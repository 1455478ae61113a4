"""The networks, each with what a step of it needs: targets, a loss, and the cells it is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from gems.models import build
from gems.models.unet import UNet

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
    """`target(images, side)` is what the loss wants for so many images of that side."""

    make: Callable[[], nn.Module]
    target: Callable[[int, int], Tensor]
    multiple: int = 16  # of which sides are tried

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target)


def _classes(images: int, side: int) -> Tensor:
    return torch.zeros(images, dtype=torch.int64)


def _masks(images: int, side: int) -> Tensor:
    return torch.zeros(images, side, side, dtype=torch.int64)


NETWORKS = {
    "ResNet-110-v2": Network(lambda: build("resnet110_v2", num_classes=2), _classes),
    "ResNet-110-v2, BatchNorm frozen": Network(
        lambda: frozen(build("resnet110_v2", num_classes=2)), _classes
    ),
    "U-Net": Network(lambda: build("unet", norm="none", num_classes=2), _masks),
    "U-Net, width 16": Network(lambda: build("unet", norm="none", num_classes=2, width=16), _masks),
}


# What a user who cuts or checkpoints by hand makes of a network: a list of cells, each from a tuple
# of tensors to the next one's. A U-Net's skips ride along until they are wanted.
#
#   (image) encode (x) encode (x, skip) encode (x, skip, skip) decode (x, skip) decode (x) head (y)


def cells(model: nn.Module) -> list[nn.Module]:
    """The model as a chain, with its own modules and weights."""
    if isinstance(model, nn.Sequential):
        return [Cell(child) for child in model]
    if isinstance(model, UNet):
        first, *rest = model.encoder
        encoders = [Encode(block, model.pool) for block in rest]
        decoders = [Decode(*pair) for pair in zip(model.up, model.decoder, strict=True)]
        return [Cell(first), *encoders, *decoders, Cell(model.head)]
    raise ValueError(f"{type(model).__name__} is neither a Sequential nor a U-Net; list its cells")


class Cell(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (self.inner(x),)


class Encode(nn.Module):
    """The level before becomes a skip."""

    def __init__(self, block: nn.Module, pool: nn.Module) -> None:
        super().__init__()
        self.block, self.pool = block, pool

    def forward(self, x: Tensor, *skips: Tensor) -> tuple[Tensor, ...]:
        return (self.block(self.pool(x)), x, *skips)


class Decode(nn.Module):
    """The newest skip is used up. Sides are multiples of 16 here: nothing to pad or crop."""

    def __init__(self, up: nn.Module, block: nn.Module) -> None:
        super().__init__()
        self.up, self.block = up, block

    def forward(self, x: Tensor, skip: Tensor, *skips: Tensor) -> tuple[Tensor, ...]:
        return (self.block(torch.cat([skip, self.up(x)], 1)), *skips)
