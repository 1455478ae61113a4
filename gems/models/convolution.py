"""One convolution, to measure halo exchanges with."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn


def convolution(
    num_classes: int = 10, width: int = 256, in_channels: int = 3, halo: int = 1
) -> nn.Sequential:
    """A convolution that reads `halo` pixels on each side, to `width` channels; their means are
    classified."""
    return nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(in_channels, width, 2 * halo + 1, padding=halo),
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            fc=nn.Linear(width, num_classes),
        )
    )
