"""Random stacks of layers on random grids, cut anywhere: the same numbers as uncut.

A case is a network, a grid, the points where its input is cut, and how many layers fetch together.
Its number decides all of that, and is printed with the network if it fails. 520 cases run by
themselves, in less than a minute; thousands, and one of them again, by

    GEMS_CASES=5000 .venv/bin/python -m pytest tests/test_spatial_generated.py -q
    GEMS_CASES=4712 .venv/bin/python -m pytest tests/test_spatial_generated.py -q -k "case_4711_"
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container
from functools import lru_cache
from math import prod
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.spatial import Plain, Points

Tensor = torch.Tensor
Shape = tuple[int, ...]  # samples, channels, and the image's dims
CASES = int(os.environ.get("GEMS_CASES", "520"))
CUTS = 4  # of each network, which is built and recorded once for all of them
LONGEST, LARGEST = 20, 6000  # cells along a dim, numbers in a tensor
TRIES = 30  # draws of a layer until one fits the image

# --- layers: each is drawn for the shape that it will see ----------------------------------------

Draw = Callable[[Random, Shape], nn.Module]
LAYERS: dict[str, tuple[int, Draw]] = {}  # name -> how often, and how


def layer(times: int = 1) -> Callable[[Draw], Draw]:
    def enter(draw: Draw) -> Draw:
        LAYERS[draw.__name__] = (times, draw)
        return draw

    return enter


def each(shape: Shape, draw: Callable[[], int]) -> Any:
    """One number for all dims of the image, or one for each."""
    found = tuple(draw() for _ in shape[2:])
    return found[0] if len(set(found)) == 1 else found


def of(dims: int, *kinds: Any) -> Any:
    """The kind for one, two or three dims."""
    return kinds[dims - 1]


@layer(6)
def convolution(r: Random, shape: Shape) -> nn.Module:
    dims = len(shape) - 2
    kernel = each(shape, lambda: r.choice((1, 2, 3, 3, 4, 5)))
    dilation = each(shape, lambda: r.choice((1, 1, 1, 2, 3)))
    same = r.random() < 0.15
    groups = r.choice([g for g in (1, 1, 2, shape[1]) if shape[1] % g == 0])
    return of(dims, nn.Conv1d, nn.Conv2d, nn.Conv3d)(
        shape[1],
        groups * r.randint(1, max(1, 6 // groups)) if groups > 1 else r.randint(2, 6),
        kernel,
        stride=1 if same else each(shape, lambda: r.choice((1, 1, 1, 2, 3))),
        padding="same" if same else each(shape, lambda: r.randint(0, 4)),
        dilation=dilation,
        groups=groups,
        bias=r.random() < 0.7,
        padding_mode=r.choice(("zeros", "zeros", "zeros", "reflect", "replicate", "circular")),
    )


@layer(2)
def transposed(r: Random, shape: Shape) -> nn.Module:
    stride = r.randint(1, 3)
    dilation = r.choice((1, 1, 2))
    return of(len(shape) - 2, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)(
        shape[1],
        r.randint(2, 4),
        each(shape, lambda: r.randint(1, 4)),
        stride=stride,
        padding=each(shape, lambda: r.randint(0, 2)),
        output_padding=r.randrange(max(stride, dilation)),
        dilation=dilation,
        bias=r.random() < 0.7,
    )


@layer(2)
def max_pool(r: Random, shape: Shape) -> nn.Module:
    kernel = r.randint(2, 4)
    options: dict[str, Any] = {"padding": r.randint(0, kernel // 2), "ceil_mode": r.random() < 0.4}
    if r.random() < 0.2:
        options = {"dilation": 2}
    stride = each(shape, lambda: r.randint(1, 3))
    return of(len(shape) - 2, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)(kernel, stride, **options)


@layer(2)
def average_pool(r: Random, shape: Shape) -> nn.Module:
    dims = len(shape) - 2
    kernel = r.randint(2, 4)
    options: dict[str, Any] = {
        "padding": r.randint(0, kernel // 2),
        "ceil_mode": r.random() < 0.4,
        "count_include_pad": r.random() < 0.5,
    }
    stride: Any = r.randint(1, 3)
    if dims > 1:
        stride = each(shape, lambda: r.randint(1, 3))
        options["divisor_override"] = r.choice((None, None, 3))
    return of(dims, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)(kernel, stride, **options)


class ThereAndBack(nn.Module):
    """Max-pool with indices, something pointwise, and unpooling to the size of before.

    `apart` keeps cells from being equal but for rounding, which would decide where maxima are.
    """

    def __init__(self, shape: Shape, size: int, padding: int) -> None:
        super().__init__()
        dims = len(shape) - 2
        self.apart = nn.Parameter(torch.randn(shape[1:]))
        kinds = of(dims, F.max_pool1d, F.max_pool2d, F.max_pool3d)
        self.down = lambda x: kinds(x, size, size, padding, return_indices=True)
        back = of(dims, F.max_unpool1d, F.max_unpool2d, F.max_unpool3d)
        self.up = lambda x, at, to: back(x, at, size, size, padding, output_size=to)

    def forward(self, x: Tensor) -> Tensor:
        y, at = self.down(x + self.apart)
        return self.up(y.tanh(), at, x.shape[2:])


@layer()
def there_and_back(r: Random, shape: Shape) -> nn.Module:
    size = r.randint(2, 3)
    return ThereAndBack(shape, size, r.randint(0, size // 2))


class Function(nn.Module):
    """A function with its arguments: shown when a case fails."""

    def __init__(self, function: Callable[..., Tensor], *args: Any, **options: Any) -> None:
        super().__init__()
        self.function, self.args, self.options = function, args, options

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.args, **self.options)

    def extra_repr(self) -> str:
        return f"{self.function.__name__}, {self.args}, {self.options}"


@layer(2)
def resized(r: Random, shape: Shape) -> nn.Module:
    dims = len(shape) - 2
    smooth = r.choice(of(dims, ("linear",), ("bilinear", "bicubic"), ("trilinear",)))
    mode = r.choice(("nearest", "nearest-exact", smooth, smooth))
    options: dict[str, Any] = {"mode": mode}
    if mode == smooth:
        options["align_corners"] = r.random() < 0.5
    if r.random() < 0.5:
        size = tuple(r.randint(2, min(2 * n + 1, LONGEST)) for n in shape[2:])
        return Function(F.interpolate, size=size, **options)
    scale = tuple(r.choice((2, 2, 3, 1.5, 0.7, 1.9)) for _ in shape[2:])
    return nn.Upsample(scale_factor=scale[0] if r.random() < 0.5 else scale, **options)


@layer()
def padded(r: Random, shape: Shape) -> nn.Module:
    mode = r.choice(("constant", "reflect", "replicate", "circular"))
    low = -2 if mode == "constant" else 0
    sizes = tuple(r.randint(low, 3) for _ in range(2 * (len(shape) - 2)))
    return Function(F.pad, sizes, mode=mode, **{"value": 0.5} if mode == "constant" else {})


def sliced(x: Tensor, index: Any) -> Tensor:
    return x[index]


@layer()
def cropped(r: Random, shape: Shape) -> nn.Module:
    index: list[Any] = [slice(None), slice(None)]
    for n in shape[2:]:
        start = r.randint(0, n // 3)
        index.append(slice(start, r.choice((None, n - n // 4, -1)), r.choice((1, 1, 2, 3))))
    return Function(sliced, tuple(index))


@layer(4)
def norm(r: Random, shape: Shape) -> nn.Module:
    dims, channels = len(shape) - 2, shape[1]
    affine = r.random() < 0.7
    kind = r.choice(("batch", "batch", "batch", "group", "instance", "channels", "image"))
    if kind == "batch":
        momentum = r.choice((0.1, 0.5, None))
        made = of(dims, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)(
            channels, momentum=momentum, affine=affine, track_running_stats=r.random() < 0.8
        )
        return made.train(r.random() < 0.8)
    if kind == "group":
        groups = r.choice([g for g in range(1, channels + 1) if channels % g == 0])
        return nn.GroupNorm(groups, channels, affine=affine)
    if kind == "instance":
        made = of(dims, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
        return made(channels, affine=affine, track_running_stats=r.random() < 0.5)
    if kind == "image":
        return nn.LayerNorm(shape[1:], elementwise_affine=affine)
    return ChannelsLast(channels)


class ChannelsLast(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(channels), nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(self.norm(x.movedim(1, -1))).movedim(-1, 1)


@layer(3)
def activation(r: Random, shape: Shape) -> nn.Module:
    kinds: tuple[Callable[[], nn.Module], ...] = (
        nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Hardswish,
        lambda: nn.Sequential(nn.GroupNorm(1, shape[1]), nn.ReLU(inplace=True)),
        lambda: nn.PReLU(shape[1]), lambda: nn.Softmax(1), lambda: nn.Dropout(0.3),
        lambda: nn.Dropout1d(0.3) if len(shape) == 3 else nn.Dropout2d(0.3),
    )  # fmt: skip
    return r.choice(kinds)()


class Scaled(nn.Module):
    """Parameters as large as the image, or as one of its dims."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.randn(shape)), nn.Parameter(torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + 0.1 * self.scale) + self.shift


@layer()
def scaled(r: Random, shape: Shape) -> nn.Module:
    return Scaled(tuple(r.choice((1, n)) for n in shape[1:]))


class Excited(nn.Module):
    """Squeeze and excitation: every cell depends on all of them, by a mean or a maximum."""

    def __init__(self, shape: Shape, how: str) -> None:
        super().__init__()
        self.dims, self.how = tuple(range(2, len(shape))), how
        self.mix = nn.Linear(shape[1], shape[1])

    def forward(self, x: Tensor) -> Tensor:
        seen = getattr(x, self.how)(self.dims)
        return x * self.mix(seen).sigmoid().reshape(*seen.shape, *(1,) * len(self.dims))


@layer()
def excited(r: Random, shape: Shape) -> nn.Module:
    return Excited(shape, r.choice(("mean", "amax", "sum")))


class Pooled(nn.Module):
    """A pooling branch as in PSPNet: few cells, mixed, enlarged again, beside the image."""

    def __init__(self, shape: Shape, size: Any, mode: str) -> None:
        super().__init__()
        self.pool = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)
        self.size, self.mode, self.mix = size, mode, nn.Linear(shape[1], 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.pool[x.dim() - 3](x, self.size)
        y = self.mix(y.movedim(1, -1)).movedim(-1, 1)
        if self.mode == "expand":
            return torch.cat((x, y.expand(-1, -1, *x.shape[2:])), 1)
        return torch.cat((F.interpolate(y, size=x.shape[2:], mode=self.mode), x), 1)


@layer()
def pooled(r: Random, shape: Shape) -> nn.Module:
    smooth = r.choice(of(len(shape) - 2, ("linear",), ("bilinear", "bicubic"), ("trilinear",)))
    mode = r.choice(("nearest", smooth, smooth, "expand"))
    return Pooled(shape, 1 if mode == "expand" else each(shape, lambda: r.randint(1, 3)), mode)


class Located(nn.Module):
    """Coordinates of one dim beside the features, as in CoordConv."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        along = torch.linspace(-1, 1, x.shape[self.dim], dtype=x.dtype)
        along = along.view(-1, *(1,) * (x.dim() - 1 - self.dim))
        return torch.cat((x, along.expand(x[:, :1].shape)), 1)


@layer()
def located(r: Random, shape: Shape) -> nn.Module:
    return Located(r.randrange(2, len(shape)))


class Stripped(nn.Module):
    """Some dims of the image seen from all along them."""

    def __init__(self, how: str, dims: tuple[int, ...]) -> None:
        super().__init__()
        self.how, self.dims = how, dims

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.5 * getattr(x, self.how)(self.dims, keepdim=True)


@layer()
def stripped(r: Random, shape: Shape) -> nn.Module:
    dims = r.sample(range(1, len(shape)), r.randint(1, len(shape) - 2))
    return Stripped(r.choice(("mean", "amax", "var", "sum")), tuple(dims))


@layer()
def shuffled(r: Random, shape: Shape) -> nn.Module:
    if len(shape) != 4:
        raise ValueError("pixels are of pictures")
    return nn.PixelShuffle(2) if r.random() < 0.5 else nn.PixelUnshuffle(2)


class Joined(nn.Module):
    """Two ways for the same image, which may come out cut differently; then joined."""

    def __init__(self, one: nn.Module, other: nn.Module, channels: int | None, how: str) -> None:
        super().__init__()
        self.one, self.other, self.how = one, other, how
        self.mix = None if channels is None else nn.LazyLinear(channels)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.one(x), self.other(x)
        if a.shape[2:] != b.shape[2:]:
            b = F.interpolate(b, size=a.shape[2:])
        if self.mix is not None:  # to as many channels
            b = self.mix(b.movedim(1, -1)).movedim(-1, 1)
        if self.how == "concatenate":
            return torch.cat((b, a), 1)
        return a.add(b) if self.how == "add" else a.clone().mul_(b)


@layer(2)
def joined(r: Random, shape: Shape) -> nn.Module:
    one = stack(r, shape, r.randint(0, 2), nested=True)[0]
    other = stack(r, shape, r.randint(1, 2), nested=True)[0]
    how = r.choice(("add", "concatenate", "multiply in place"))
    channels = None
    if how != "concatenate":
        with torch.no_grad():
            channels = one(torch.zeros(shape)).shape[1]
    return Joined(one, other, channels, how)


# --- the end: what is whole from there on --------------------------------------------------------


def end(r: Random, shape: Shape) -> nn.Module:
    dims = len(shape) - 2
    kinds = [(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)]
    kinds += [(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d)]
    size = each(shape, lambda: r.randint(1, 3))
    return nn.Sequential(of(dims, *r.choice(kinds))(size), nn.Flatten(), nn.LazyLinear(3))


# --- networks ------------------------------------------------------------------------------------


def stack(
    r: Random, shape: Shape, count: int, nested: bool = False, without: Container[str] = ()
) -> tuple[nn.Module, Shape]:
    """So many layers, each for what the one before gives."""
    names = [n for n in LAYERS if not (nested and n == "joined") and n not in without]
    weights = [LAYERS[name][0] for name in names]
    made: list[nn.Module] = []
    for _ in range(count):
        for _ in range(TRIES):
            draw = LAYERS[r.choices(names, weights)[0]][1]
            if (found := fitting(draw, r, shape)) is not None:
                made.append(found[0])
                shape = found[1]
                break
    return nn.Sequential(*made), shape


def fitting(draw: Draw, r: Random, shape: Shape) -> tuple[nn.Module, Shape] | None:
    """A layer and the shape it gives, if it takes this one and gives a decent image.

    Cells of an image of one cell, or of one channel, would be equal but for rounding behind
    a norm, and rounding would decide what an activation or a maximum does with them.
    """
    try:
        made = draw(r, shape)
        with torch.no_grad():
            found = tuple(made(torch.randn(shape)).shape)
    except (RuntimeError, ValueError, IndexError, AssertionError, NotImplementedError):
        return None
    if len(found) != len(shape) or min(found[1:]) < 2:
        return None
    return (made, found) if max(found[2:]) <= LONGEST and prod(found) <= LARGEST else None


@lru_cache(maxsize=1)
def network(number: int) -> Plain:
    """A network on its input, run and recorded."""
    r = Random(number)
    torch.manual_seed(number)
    dims = r.choice((1, 2, 2, 2, 2, 3))
    sides = {1: (3, LONGEST), 2: (3, 13), 3: (3, 7)}[dims]
    shape = (r.randint(1, 3), r.randint(2, 4), *(r.randint(*sides) for _ in range(dims)))
    model, after = stack(r, shape, r.randint(1, 6))
    if r.random() < 0.25:
        model = nn.Sequential(model, end(r, after))
        with torch.no_grad():
            model(torch.zeros(shape))  # gives lazy layers their shape
    image = torch.randn(shape)
    if dims == 2 and r.random() < 0.3:
        image = image.contiguous(memory_format=torch.channels_last)
    drops = any(isinstance(m, nn.modules.dropout._DropoutNd) for m in model.modules())
    return Plain(model, image, keyed=drops)


# --- cuts ----------------------------------------------------------------------------------------

GRIDS: dict[int, list[Shape]] = {
    1: [(2,), (3,), (5,), (8,)],
    2: [(1, 2), (1, 3), (1, 5), (2, 1), (3, 1), (7, 1), (2, 2), (2, 2), (2, 2), (2, 3), (4, 2)],
    3: [(1, 1, 3), (3, 1, 1), (1, 4, 1), (2, 1, 2), (2, 2, 2), (2, 2, 2)],
}


def some_cut(r: Random, shape: Shape, grids: list[Shape]) -> dict[str, Any]:
    """A grid, cut points that may be anywhere, and how many layers fetch together."""
    grid = r.choice(grids)
    points: Points | None = None
    if r.random() < 0.75:
        points = [
            sorted(r.randint(0, length) for _ in range(parts - 1))
            for length, parts in zip(shape[2:], grid, strict=True)
            if parts > 1
        ]
    fused = r.choice((1, 1, 2, 3, 5, 99))
    return {"grid": grid, "points": points, "fused": fused}


@pytest.mark.parametrize("number", range(CASES), ids=lambda n: f"case_{n}_")
def test_a_generated_network_does_the_same_when_it_is_cut(number: int) -> None:
    plain = network(number // CUTS)
    shape = tuple(plain.inputs[0].shape)
    cut = some_cut(Random(f"cut {number}"), shape, GRIDS[len(shape) - 2])
    try:
        plain.cut(**cut)
    except BaseException as error:
        error.add_note(f"case {number}: {shape} cut by {cut}\n{plain.model}")
        raise
