"""Residual networks for ImageNet, with named children as in torchvision."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

Norm = Callable[[int], nn.Module]


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
    model = ImageNetResNet(num_classes, _NORMS[norm], width, layers, in_channels)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    return model


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
