"""ReLayNet: layers and fluid of the retina in OCT scans, unpooled where the encoder pooled.

A. G. Roy et al., ReLayNet, Biomedical Optics Express 8 (2017).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def relay_net(
    num_classes: int = 10,
    in_channels: int = 1,
    width: int = 64,
    levels: int = 3,
    kernel: Sequence[int] = (7, 3),
) -> ReLayNet:
    """`levels` blocks down, one at the bottom, as many up; all `width` channels wide.

    The kernels are 7 high and 3 wide, as retinas lie flat. The paper's network has 777,482
    parameters for its 10 classes: seven layers, fluid, and what is above and below. Gives one logit
    per class and pixel, at the size of the input, odd sizes included.
    """
    problems = [
        *([f"levels is {levels}, not 1 or more"] if levels < 1 else []),
        *([f"width is {width}, not 1 or more"] if width < 1 else []),
        *(
            [f"kernel is {tuple(kernel)}, not two odd numbers"]
            if len(kernel) != 2 or any(k < 1 or k % 2 == 0 for k in kernel)
            else []
        ),
    ]
    if problems:
        raise ValueError(f"this ReLayNet cannot be built: {'; '.join(problems)}")
    return ReLayNet(num_classes, in_channels, width, levels, (kernel[0], kernel[1]))


class ReLayNet(nn.Module):
    """What two levels pass across: a skip, and the places of its maxima (integers).

    encoder.0 ─────── skip, indices ───────► decoder.1 ─ head
        encoder.1 ─── skip, indices ───► decoder.0 ╯
                  bottom ──────────────────╯
    """

    def __init__(
        self, num_classes: int, in_channels: int, width: int, levels: int, kernel: tuple[int, int]
    ) -> None:
        super().__init__()
        channels = [in_channels, *[width] * (levels - 1)]
        self.encoder = nn.ModuleList(_block(c, width, kernel) for c in channels)
        self.pool = nn.MaxPool2d(2, return_indices=True)
        self.bottom = _block(width, width, kernel)
        self.unpool = nn.MaxUnpool2d(2)
        self.decoder = nn.ModuleList(_block(2 * width, width, kernel) for _ in range(levels))
        self.head = nn.Conv2d(width, num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        halvings = len(self.encoder)
        if min(x.shape[2:]) < 2**halvings:
            raise ValueError(
                f"an image of {'x'.join(map(str, x.shape[2:]))} cannot be halved {halvings} times; "
                f"take sides of {2**halvings} or more, or fewer levels"
            )
        skips: list[tuple[Tensor, Tensor]] = []
        for block in self.encoder:
            skip = block(x)
            x, indices = self.pool(skip)
            skips.append((skip, indices))
        x = self.bottom(x)
        for block in self.decoder:
            skip, indices = skips.pop()
            x = self.unpool(x, indices, output_size=skip.shape[2:])
            x = block(torch.cat([skip, x], dim=1))
        return self.head(x)


def _block(channels: int, out: int, kernel: tuple[int, int]) -> nn.Sequential:
    padding = (kernel[0] // 2, kernel[1] // 2)
    convolution = nn.Conv2d(channels, out, kernel, padding=padding)
    nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
    return nn.Sequential(convolution, nn.BatchNorm2d(out), nn.ReLU())
