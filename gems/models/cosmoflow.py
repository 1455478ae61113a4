"""CosmoFlow: numbers of the universe from cubes of dark matter, by convolutions in three dims.

A. Mathuriya et al., CosmoFlow, SC 2018, in the forms of two later papers: for cubes of 128, 256 and
512 (Y. Oyama et al., arXiv 2007.12856) and of MLPerf HPC (S. Farrell et al., arXiv 2110.11466).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

SLOPE = 0.3  # of LeakyReLU below zero


def cosmo_flow(
    num_classes: int = 4,
    image_size: int = 128,
    in_channels: int = 4,
    width: int = 16,
    norm: str = "none",
    dropout: float = 0.2,
    bound: float = 1.2,
) -> CosmoFlow:
    """Seven convolutions of 3³ down to a cube of 2³, then 2048, 256 and `num_classes` numbers.

    Channels double from `width` to 16 times that; pooling is the mean of 3³ with stride 2, and the
    fourth convolution has stride 2 too. Larger cubes are pooled more often, so that those of 128,
    256 and 512 all have 9,437,636 parameters. The numbers lie within
    `bound`, by tanh; 0 leaves them as they are. `norm` is "none" or "batch".
    """
    _reject(image_size, 32, width, norm, bound)
    blocks: list[nn.Module] = []
    channels, side = in_channels, image_size
    for index in range(7):
        out, stride = width * 2 ** min(index, 4), 2 if index == 3 else 1
        convolution = nn.Conv3d(channels, out, 3, stride, padding=1, bias=False)
        side = -(-side // stride)
        pooled = side > 2
        pool = nn.AvgPool3d(3, 2, padding=1) if pooled else None
        side = -(-side // 2) if pooled else side
        blocks.append(_block(convolution, norm, pool))
        channels = out
    features = (channels * side**3, 128 * width, 16 * width)
    return CosmoFlow(blocks, features, num_classes, dropout, bound)


def cosmo_flow_mlperf(
    num_classes: int = 4,
    image_size: int = 128,
    in_channels: int = 4,
    width: int = 32,
    kernel: int = 2,
    norm: str = "none",
    dropout: float = 0.5,
    bound: float = 1.2,
) -> CosmoFlow:
    """The network of MLPerf HPC: convolution, LeakyReLU and max-pooling until 4³ are left.

    Channels double from `width` to 16 times that, then 128, 64 and `num_classes` numbers. The
    reference code's kernels are 2³, which makes 5,597,604 parameters at 128³; 3³ make 8,907,556.
    """
    _reject(image_size, 8, width, norm, bound)
    blocks: list[nn.Module] = []
    channels, side = in_channels, image_size
    while side >= 8:
        out = width * 2 ** min(len(blocks), 4)
        convolution = nn.Conv3d(channels, out, kernel, padding="same")
        blocks.append(_block(convolution, norm, nn.MaxPool3d(2)))
        channels, side = out, side // 2
    features = (channels * side**3, 4 * width, 2 * width)
    return CosmoFlow(blocks, features, num_classes, dropout, bound)


def _reject(image_size: int, least: int, width: int, norm: str, bound: float) -> None:
    problems = [
        *([f"image_size is {image_size}, not {least} or more"] if image_size < least else []),
        *([f"width is {width}, not 1 or more"] if width < 1 else []),
        *([f"norm is {norm!r}, not 'batch' or 'none'"] if norm not in ("batch", "none") else []),
        *([f"bound is {bound}, not 0 or more"] if bound < 0 else []),
    ]
    if problems:
        raise ValueError(f"this CosmoFlow cannot be built: {'; '.join(problems)}")


def _block(convolution: nn.Conv3d, norm: str, pool: nn.Module | None) -> nn.Sequential:
    layers: OrderedDict[str, nn.Module] = OrderedDict(conv=convolution)
    if norm == "batch":
        layers["norm"] = nn.BatchNorm3d(convolution.out_channels)
    layers["relu"] = nn.LeakyReLU(SLOPE)
    if pool is not None:
        layers["pool"] = pool
    return nn.Sequential(layers)


class CosmoFlow(nn.Module):
    """Convolutions over a cube, then linear layers over all that is left of it.

    They belong to one size of cube, so the network takes no other.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        features: Sequence[int],
        num_classes: int,
        dropout: float,
        bound: float,
    ) -> None:
        super().__init__()
        self.bound = bound
        self.blocks = nn.Sequential(*blocks)
        self.flatten = nn.Flatten()
        hidden: list[nn.Module] = []
        for a, b in pairwise(features):
            hidden += [nn.Linear(a, b), nn.LeakyReLU(SLOPE), nn.Dropout(dropout)]
        self.hidden = nn.Sequential(*hidden)
        self.head = nn.Linear(features[-1], num_classes)
        for module in self.modules():
            if isinstance(module, (nn.Conv3d, nn.Linear)):
                nn.init.kaiming_normal_(module.weight, SLOPE)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.head(self.hidden(self.flatten(self.blocks(x))))
        return self.bound * torch.tanh(x) if self.bound else x
