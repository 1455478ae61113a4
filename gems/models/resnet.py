"""Residual networks: CIFAR-style v1 and v2 of any depth, and ImageNet's with bottlenecks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor, nn

Norm = Callable[[int], nn.Module]
Network = TypeVar("Network", bound=nn.Module)


# CIFAR style: a Sequential of cells (stem, one per block, head), three groups of n blocks.
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


# ImageNet style: ordinary named children, so that published weights load by name.


def resnet50(
    num_classes: int = 1000,
    norm: str = "batch",
    width: int = 64,
    layers: Sequence[int] = (3, 4, 6, 3),
    in_channels: int = 3,
) -> ImageNetResNet:
    """ResNet-50, 25,557,032 parameters; `width` and `layers` make smaller (or deeper) ones.

    Stride is on the 3x3 convolution, as in the weights people share. `norm` is "batch" or "group".
    """
    problems = [
        *([f"norm is {norm!r}, not one of {', '.join(_NORMS)}"] if norm not in _NORMS else []),
        *(
            [f"layers is {tuple(layers)}, not blocks per group"]
            if not layers or any(count < 1 for count in layers)
            else []
        ),
    ]
    if problems:
        raise ValueError(f"this ResNet cannot be built: {'; '.join(problems)}")
    return _he_normal(ImageNetResNet(num_classes, _NORMS[norm], width, layers, in_channels))


def resnet101(
    num_classes: int = 1000, norm: str = "batch", width: int = 64, in_channels: int = 3
) -> ImageNetResNet:
    """ResNet-101, 44,549,160 parameters."""
    return resnet50(num_classes, norm, width, (3, 4, 23, 3), in_channels)


def resnet152(
    num_classes: int = 1000, norm: str = "batch", width: int = 64, in_channels: int = 3
) -> ImageNetResNet:
    """ResNet-152, 60,192,808 parameters."""
    return resnet50(num_classes, norm, width, (3, 8, 36, 3), in_channels)


class ImageNetResNet(nn.Module):
    """7x7 stem, max-pool 3/2/1, groups of bottlenecks, mean over the image, linear."""

    def __init__(
        self,
        num_classes: int,
        norm: Norm,
        width: int,
        layers: Sequence[int],
        in_channels: int,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = norm(width)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        channels = width
        self.groups = len(layers)
        for group, count in enumerate(layers):
            inner = width * 2**group
            strides = (1 if group == 0 else 2, *(1 for _ in range(count - 1)))
            blocks: list[nn.Module] = []
            for stride in strides:
                blocks.append(Bottleneck(channels, inner, stride, norm))
                channels = inner * Bottleneck.expansion
            self.add_module(f"layer{group + 1}", nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for group in range(self.groups):
            x = self.get_submodule(f"layer{group + 1}")(x)
        return self.fc(self.avgpool(x).flatten(1))


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1, each with its norm; four times as wide outside as inside."""

    expansion = 4

    def __init__(self, channels: int, inner: int, stride: int, norm: Norm) -> None:
        super().__init__()
        out = inner * self.expansion
        self.conv1 = nn.Conv2d(channels, inner, 1, bias=False)
        self.bn1 = norm(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride, padding=1, bias=False)
        self.bn2 = norm(inner)
        self.conv3 = nn.Conv2d(inner, out, 1, bias=False)
        self.bn3 = norm(out)
        self.relu = nn.ReLU()
        self.downsample = None
        if stride != 1 or channels != out:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels, out, 1, stride, bias=False), norm(out)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


def _group_norm(channels: int) -> nn.Module:
    """At most 32 groups, fewer where the channels do not divide."""
    groups = next(g for g in (32, 16, 8, 4, 2, 1) if channels % g == 0)
    return nn.GroupNorm(groups, channels)


_NORMS: dict[str, Norm] = {"batch": nn.BatchNorm2d, "group": _group_norm}


def _he_normal(model: Network) -> Network:
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return model
