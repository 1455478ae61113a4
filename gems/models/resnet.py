"""Residual networks for small images: v1 and v2 of any depth."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn

# A Sequential of cells (stem, one per block, head), three groups of n blocks.
#
#   image ─ stem ─ block1_1 … block1_n ─ block2_1 … block2_n ─ block3_1 … block3_n ─ head ─ logits
#   side      1         group 1: 1            group 2: 1/2          group 3: 1/4


def resnet_v1(
    depth: int = 20, num_classes: int = 10, width: int = 16, in_channels: int = 3
) -> nn.Sequential:
    """Basic blocks of two 3x3 convolutions, `depth = 6n + 2`; groups of 1, 2 and 4 times `width`.

    Where the shape changes the shortcut is a bare 1x1 convolution.
    """
    n = _blocks_per_group("resnet_v1", depth, 6)
    cells: OrderedDict[str, nn.Module] = OrderedDict(stem=_stem(in_channels, width))
    channels = width
    for group in range(3):
        out = width * 2**group
        for index in range(n):
            stride = 2 if group > 0 and index == 0 else 1
            cells[f"block{group + 1}_{index + 1}"] = BasicBlock(channels, out, stride)
            channels = out
    cells["head"] = nn.Sequential(
        OrderedDict(
            pool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(), fc=nn.Linear(channels, num_classes)
        )
    )
    return _he_normal(nn.Sequential(cells))


def resnet_v2(
    depth: int = 110,
    num_classes: int = 10,
    width: int = 16,
    in_channels: int = 3,
    bias: bool = False,
) -> nn.Sequential:
    """Pre-activation bottlenecks 1x1-3x3-1x1, `depth = 9n + 2`.

    With `width` 16 the groups are 16 wide inside and 64 outside, 64 and 128, 128 and 256: as in
    the Keras CIFAR example, wider inside than the paper's 16, 32, 64. `bias` adds the convolution
    biases of the Keras network. ResNet-110 has 3,291,610 parameters, ResNet-1001
    30,251,290 (with biases 3,302,442 and 30,347,658).
    """
    n = _blocks_per_group("resnet_v2", depth, 9)
    cells: OrderedDict[str, nn.Module] = OrderedDict(stem=_stem(in_channels, width, bias))
    channels, inner = width, width
    for group, out in enumerate((4 * width, 8 * width, 16 * width)):
        for index in range(n):
            first = index == 0
            cells[f"block{group + 1}_{index + 1}"] = PreActivationBottleneck(
                channels,
                inner,
                out,
                stride=2 if first and group > 0 else 1,
                project=first,
                activate=not (first and group == 0),  # the stem has just done it
                bias=bias,
            )
            channels = out
        inner = out
    cells["head"] = nn.Sequential(
        OrderedDict(
            norm=nn.BatchNorm2d(channels),
            relu=nn.ReLU(),
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            fc=nn.Linear(channels, num_classes),
        )
    )
    return _he_normal(nn.Sequential(cells))


class BasicBlock(nn.Module):
    """`relu(x + BN(conv(relu(BN(conv(x))))))`."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU()
        same = channels == out and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(channels, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        return self.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class PreActivationBottleneck(nn.Module):
    """Three times BN-ReLU-conv beside a shortcut of the raw input; stride is on the first."""

    def __init__(
        self,
        channels: int,
        inner: int,
        out: int,
        stride: int,
        project: bool,
        activate: bool,
        bias: bool,
    ) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(channels) if activate else nn.Identity()
        self.relu1 = nn.ReLU() if activate else nn.Identity()
        self.conv1 = nn.Conv2d(channels, inner, 1, stride, bias=bias)
        self.norm2 = nn.BatchNorm2d(inner)
        self.relu2 = nn.ReLU()
        self.conv2 = nn.Conv2d(inner, inner, 3, padding=1, bias=bias)
        self.norm3 = nn.BatchNorm2d(inner)
        self.relu3 = nn.ReLU()
        self.conv3 = nn.Conv2d(inner, out, 1, bias=bias)
        self.shortcut = nn.Conv2d(channels, out, 1, stride, bias=bias) if project else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(self.relu1(self.norm1(x)))
        y = self.conv2(self.relu2(self.norm2(y)))
        y = self.conv3(self.relu3(self.norm3(y)))
        return self.shortcut(x) + y


def _stem(in_channels: int, width: int, bias: bool = False) -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(in_channels, width, 3, padding=1, bias=bias),
            norm=nn.BatchNorm2d(width),
            relu=nn.ReLU(),
        )
    )


def _blocks_per_group(name: str, depth: int, layers: int) -> int:
    n, rest = divmod(depth - 2, layers)
    if rest or n < 1:
        near = layers * max(1, n) + 2
        raise ValueError(
            f"{name} has depth {layers}n + 2, and {depth} is not of that form; "
            f"take {near} or {near + layers}"
        )
    return n


def _he_normal(model: nn.Sequential) -> nn.Sequential:
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return model
