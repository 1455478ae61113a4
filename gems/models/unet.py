"""U-Net in two or three dimensions: an encoder, a decoder and skips across by concatenation."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_CONV = {2: nn.Conv2d, 3: nn.Conv3d}
_CONV_UP = {2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
_POOL = {2: nn.MaxPool2d, 3: nn.MaxPool3d}
_BATCH_NORM = {2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


def u_net(
    num_classes: int = 2,
    in_channels: int = 3,
    width: int = 64,
    levels: int = 5,
    dims: int = 2,
    norm: str = "batch",
) -> UNet:
    """U-Net of `levels` resolutions: `width` channels at the finest, twice as many at each next.

    Gives one logit per class and pixel, at the size of the input, odd sizes included.
    `norm` is "batch" or "none"; "none" is the network of the paper, with padded convolutions.
    """
    problems = [
        *([f"dims is {dims}, not 2 or 3"] if dims not in _CONV else []),
        *([f"levels is {levels}, not 1 or more"] if levels < 1 else []),
        *([f"norm is {norm!r}, not 'batch' or 'none'"] if norm not in ("batch", "none") else []),
    ]
    if problems:
        raise ValueError(f"this U-Net cannot be built: {'; '.join(problems)}")
    model = UNet(num_classes, in_channels, width, levels, dims, norm)
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Conv3d)):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    return model


class UNet(nn.Module):
    """The skips of three levels:

    encoder.0 ──────── skip ────────► decoder.1 ─ head
        encoder.1 ──── skip ────► decoder.0 ╯
                encoder.2 ───────────╯
    """

    def __init__(
        self, num_classes: int, in_channels: int, width: int, levels: int, dims: int, norm: str
    ) -> None:
        super().__init__()
        channels = [width * 2**level for level in range(levels)]
        self.encoder = nn.ModuleList(
            _two_convolutions(a, b, dims, norm)
            for a, b in zip([in_channels, *channels], channels, strict=False)
        )
        self.pool = _POOL[dims](2)
        up = list(reversed(channels))
        pairs = list(itertools.pairwise(up))
        self.up = nn.ModuleList(_CONV_UP[dims](a, b, 2, stride=2) for a, b in pairs)
        self.decoder = nn.ModuleList(_two_convolutions(2 * b, b, dims, norm) for _, b in pairs)
        self.head = _CONV[dims](width, num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        halvings = len(self.encoder) - 1
        if min(x.shape[2:]) < 2**halvings:
            raise ValueError(
                f"an image of {'x'.join(map(str, x.shape[2:]))} cannot be halved {halvings} times; "
                f"take sides of {2**halvings} or more, or fewer levels"
            )
        skips: list[Tensor] = []
        for level, block in enumerate(self.encoder):
            x = block(x if level == 0 else self.pool(x))
            skips.append(x)
        skips.pop()
        for up, block in zip(self.up, self.decoder, strict=True):
            skip = skips.pop()
            x = block(torch.cat([skip, _fit(up(x), skip.shape[2:])], dim=1))
        return self.head(x)


def _fit(x: Tensor, size: Sequence[int]) -> Tensor:
    """`x` padded with zeros, or cropped, around its centre to the spatial `size`."""
    missing = [want - have for want, have in zip(size, x.shape[2:], strict=True)]
    if not any(missing):
        return x
    # F.pad counts from the last dimension; a negative amount crops.
    return F.pad(x, [side for m in reversed(missing) for side in (m // 2, m - m // 2)])


def _two_convolutions(channels: int, out: int, dims: int, norm: str) -> nn.Sequential:
    layers: list[nn.Module] = []
    for source in (channels, out):
        layers.append(_CONV[dims](source, out, 3, padding=1, bias=norm == "none"))
        if norm == "batch":
            layers.append(_BATCH_NORM[dims](out))
        layers.append(nn.ReLU())
    return nn.Sequential(*layers)
