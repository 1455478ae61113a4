"""Each layer that can be cut, by name: on any grid, with either halo, it does what it does uncut.

Every layer stands between two convolutions, so that it reads and is read beyond the tiles, and d2
has something to fuse. Images are 7 rows high, some cut into 8 tiles.
"""

from __future__ import annotations

import copy
import operator
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gems.errors import PlanError
from gems.plans.plan import Plan
from gems.torch.trainer import Trainer
from gems.transport.threads import run
from tests.exact import alone, assert_equal, planned, sgd
from tests.spatial import Plain, Points

Tensor = torch.Tensor
C = 4
SHAPES = {1: (2, C, 13), 2: (2, C, 7, 9), 3: (1, C, 5, 6, 7)}

# Tiles, where to cut if not evenly, and how many layers fetch together. Some tiles are empty.
Cut = tuple[tuple[int, ...], "Points | None", int]
CUTS: dict[int, list[Cut]] = {
    1: [((2,), None, 1), ((4,), [(3, 3, 5)], 9)],
    2: [((1, 3), [(1, 1)], 1), ((2, 2), None, 1), ((2, 2), [(6,), (1,)], 9)],
    3: [((2, 2, 2), None, 1), ((1, 3, 1), [(1, 5)], 9)],
}
FEWER: dict[int, list[Cut]] = {1: CUTS[1][1:], 2: [((3, 2), [(2, 2), (7,)], 2)], 3: CUTS[3][1:]}
MORE: list[Cut] = [((8, 1), None, 9), ((1, 5), [(0, 9, 9, 9)], 1)]


class Function(nn.Module):
    """A function of the input and of parameters: `Function(F.conv2d, weight=(4, 4, 3, 3))`."""

    def __init__(self, function: Callable[..., Any], **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape) / 2))

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs, **dict(self.named_parameters()))


CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


def between(layer: nn.Module, shape: tuple[int, ...]) -> nn.Module:
    """The layer after a convolution, and before one if it gives an image."""
    dims = len(shape) - 2
    first = CONV[dims](C, C, 3, padding=1)
    with torch.no_grad():
        found = layer(torch.randn(shape))
    if not isinstance(found, Tensor) or found.dim() != len(shape) or found.shape[-1] < 2:
        return nn.Sequential(first, layer)
    return nn.Sequential(first, layer, CONV[dims](found.shape[1], 2, 3, padding=1))


def assert_exact(
    layer: nn.Module, shape: tuple[int, ...], cuts: list[Cut] | None = None, **options: Any
) -> None:
    """Between convolutions, on several grids, one exchange per layer and one for several."""
    torch.manual_seed(0)
    model = between(layer, shape).double()
    plain = Plain(model, torch.randn(shape, dtype=torch.float64), **options)
    for grid, points, fused in cuts or CUTS[len(shape) - 2]:
        try:
            plain.cut(grid, fused=fused, points=points)
        except Exception as error:
            error.add_note(f"on grid {grid} cut at {points or 'even'}, {fused} layers fused")
            raise


# --- windows: modules and functions, in one, two and three dims ----------------------------------

CONVOLUTIONS: dict[str, dict[str, Any]] = {
    "kernel 1": {"kernel_size": 1},
    "kernel 3, padding 1": {"kernel_size": 3, "padding": 1},
    "kernel 5, padding 4": {"kernel_size": 5, "padding": 4},
    "kernel 2": {"kernel_size": 2},
    "kernel 4, padding 1": {"kernel_size": 4, "padding": 1},
    "kernel 3, stride 2, padding 1": {"kernel_size": 3, "stride": 2, "padding": 1},
    "kernel 1, stride 3": {"kernel_size": 1, "stride": 3},
    "kernel 2, stride 3": {"kernel_size": 2, "stride": 3, "padding": 1},
    "dilation 2": {"kernel_size": 3, "dilation": 2, "padding": 1},
    "dilation 3, stride 2": {"kernel_size": 2, "dilation": 3, "stride": 2, "padding": 2},
    "groups": {"kernel_size": 3, "groups": 2, "padding": 1},
    "depthwise": {"kernel_size": 3, "groups": C, "padding": 1, "stride": 2},
    "no bias": {"kernel_size": 3, "bias": False},
    "same": {"kernel_size": 3, "padding": "same"},
    "same, even kernel": {"kernel_size": 4, "padding": "same"},
    "same, dilation": {"kernel_size": 2, "padding": "same", "dilation": 3},
    "valid": {"kernel_size": 3, "padding": "valid"},
}
MODES: dict[str, dict[str, Any]] = {
    f"{mode}, {name}": {**options, "padding_mode": mode}
    for mode in ("zeros", "reflect", "replicate", "circular")
    for name, options in {
        "kernel 3": {"kernel_size": 3, "padding": 1},
        "kernel 5, stride 2": {"kernel_size": 5, "padding": 3, "stride": 2},
        "same": {"kernel_size": 4, "padding": "same"},
    }.items()
}
RECTANGULAR = {
    "kernel (3, 2), stride (1, 2)": {"kernel_size": (3, 2), "stride": (1, 2), "padding": (2, 0)},
    "dilation (1, 3)": {"kernel_size": 3, "dilation": (1, 3), "padding": (1, 2)},
    "circular, (1, 2)": {"kernel_size": 3, "padding": (1, 2), "padding_mode": "circular"},
    "reflect, (0, 3)": {"kernel_size": 3, "padding": (0, 3), "padding_mode": "reflect"},
}
SOME = ("kernel 5, padding 4", "kernel 3, stride 2, padding 1", "dilation 2", "groups")
SOME_MODES = [f"{mode}, kernel 5, stride 2" for mode in ("reflect", "replicate", "circular")]


@pytest.mark.parametrize("name", CONVOLUTIONS | MODES | RECTANGULAR)
def test_convolution_in_two_dims(name: str) -> None:
    assert_exact(nn.Conv2d(C, 2 * C, **(CONVOLUTIONS | MODES | RECTANGULAR)[name]), SHAPES[2])


@pytest.mark.parametrize("dims", [1, 3])
@pytest.mark.parametrize("name", [*SOME, *SOME_MODES, "same, even kernel"])
def test_convolution_in_one_and_three_dims(name: str, dims: int) -> None:
    assert_exact(CONV[dims](C, C, **(CONVOLUTIONS | MODES)[name]), SHAPES[dims])


def function_of(module: Any, function: Any, names: tuple[str, ...]) -> Function:
    """The function with the weights and settings of a module."""
    weights = {n: tuple(p.shape) for n, p in module.named_parameters()}
    settings = {name: getattr(module, name) for name in names}
    return Function(lambda x, **given: function(x, **given, **settings), **weights)


CONV_SETTINGS = ("stride", "padding", "dilation", "groups")


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("name", [*SOME, "no bias", "same", "kernel 2, stride 3"])
def test_convolution_as_a_function(name: str, dims: int) -> None:
    module = CONV[dims](C, C, **CONVOLUTIONS[name])
    function = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[dims]
    assert_exact(function_of(module, function, CONV_SETTINGS), SHAPES[dims], FEWER[dims])


def test_a_convolution_whose_weight_is_computed() -> None:
    """Weight standardisation: the kernel itself comes out of recorded calls."""

    def standardised(x: Tensor, weight: Tensor) -> Tensor:
        weight = weight - weight.mean((1, 2, 3), keepdim=True)
        return F.conv2d(x, weight, padding=1)

    assert_exact(Function(standardised, weight=(C, C, 3, 3)), SHAPES[2])


TRANSPOSED: dict[str, dict[str, Any]] = {
    "kernel 2, stride 2": {"kernel_size": 2, "stride": 2},
    "kernel 3, stride 2, output padding": {
        "kernel_size": 3, "stride": 2, "padding": 1, "output_padding": 1,
    },
    "kernel 3, padding 2": {"kernel_size": 3, "padding": 2},
    "stride 3, gaps, output padding 2": {"kernel_size": 1, "stride": 3, "output_padding": 2},
    "dilation 2": {"kernel_size": 3, "dilation": 2, "stride": 2, "padding": 1},
    "groups, no bias": {"kernel_size": 4, "stride": 2, "padding": 1, "groups": 2, "bias": False},
}  # fmt: skip
TRANSPOSE = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
TRANSPOSE_SETTINGS = (*CONV_SETTINGS, "output_padding")


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("name", TRANSPOSED)
def test_transposed_convolution(name: str, dims: int) -> None:
    assert_exact(TRANSPOSE[dims](C, C, **TRANSPOSED[name]), SHAPES[dims])


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("name", TRANSPOSED)
def test_transposed_convolution_as_a_function(name: str, dims: int) -> None:
    module = TRANSPOSE[dims](C, C, **TRANSPOSED[name])
    function = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}[dims]
    assert_exact(function_of(module, function, TRANSPOSE_SETTINGS), SHAPES[dims], FEWER[dims])


class Sized(nn.Module):
    """A transposed convolution told the size to give."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.up, self.how = nn.ConvTranspose2d(C, C, 3, stride=2), how

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x, (16, 19)) if not self.how else self.up(x, **self.how)


def test_transposed_convolution_to_a_given_size() -> None:
    assert_exact(Sized(), SHAPES[2])


def test_transposed_convolution_to_a_size_given_by_name() -> None:
    assert_exact(Sized(output_size=(16, 20)), SHAPES[2])


POOLS: dict[str, dict[str, Any]] = {
    "2": {"kernel_size": 2},
    "3/2/1": {"kernel_size": 3, "stride": 2, "padding": 1},
    "3/1": {"kernel_size": 3, "stride": 1},
    "2, ceil": {"kernel_size": 2, "ceil_mode": True},
    "3/2/1, ceil": {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True},
    "2/3": {"kernel_size": 2, "stride": 3, "ceil_mode": True},
}
MAX_ONLY = {"dilation": {"kernel_size": 2, "stride": 1, "dilation": 2, "padding": 1}}
AVERAGE_ONLY = {
    "border not counted": {"kernel_size": 3, "stride": 2, "padding": 1, "count_include_pad": False},
    "border not counted, ceil": {
        "kernel_size": 3, "stride": 2, "padding": 1, "count_include_pad": False, "ceil_mode": True,
    },
}  # fmt: skip
DIVIDED = {"kernel_size": 3, "stride": 2, "padding": 1, "divisor_override": 5, "ceil_mode": True}
MAXIMA = {1: (nn.MaxPool1d, F.max_pool1d), 2: (nn.MaxPool2d, F.max_pool2d)}
MAXIMA[3] = (nn.MaxPool3d, F.max_pool3d)
MEANS = {1: (nn.AvgPool1d, F.avg_pool1d), 2: (nn.AvgPool2d, F.avg_pool2d)}
MEANS[3] = (nn.AvgPool3d, F.avg_pool3d)


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("name", POOLS | MAX_ONLY)
def test_max_pooling(name: str, dims: int) -> None:
    module, function = MAXIMA[dims]
    options = (POOLS | MAX_ONLY)[name]
    assert_exact(module(**options), SHAPES[dims])
    assert_exact(Function(lambda x: function(x, **options)), SHAPES[dims], FEWER[dims])


def test_max_pooling_of_negative_numbers_at_the_border() -> None:
    """A border of zeros would win against them."""
    assert_exact(nn.Sequential(nn.Softplus(), Negated(), nn.MaxPool2d(3, 2, 1)), SHAPES[2])


class Negated(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return -x - 1


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("name", POOLS | AVERAGE_ONLY)
def test_average_pooling(name: str, dims: int) -> None:
    module, function = MEANS[dims]
    options = (POOLS | AVERAGE_ONLY)[name]
    assert_exact(module(**options), SHAPES[dims])
    assert_exact(Function(lambda x: function(x, **options)), SHAPES[dims], FEWER[dims])


@pytest.mark.parametrize("dims", [2, 3])
def test_average_pooling_with_a_divisor_of_its_own(dims: int) -> None:
    module, function = MEANS[dims]
    assert_exact(module(**DIVIDED), SHAPES[dims])
    assert_exact(Function(lambda x: function(x, **DIVIDED)), SHAPES[dims], FEWER[dims])


UNPOOLS = {1: (nn.MaxUnpool1d, F.max_unpool1d), 2: (nn.MaxUnpool2d, F.max_unpool2d)}
UNPOOLS[3] = (nn.MaxUnpool3d, F.max_unpool3d)


class ThereAndBack(nn.Module):
    """Max-pool with indices, a convolution, and back to where the maxima were (ReLayNet)."""

    def __init__(self, dims: int, *sizes: int, functional: bool = False) -> None:
        super().__init__()
        self.sizes, self.functional = sizes, functional
        self.down, self.pooled = MAXIMA[dims][0](*sizes, return_indices=True), MAXIMA[dims][1]
        self.up, self.unpooled = UNPOOLS[dims][0](*sizes), UNPOOLS[dims][1]
        self.conv = CONV[dims](C, C, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        if self.functional:
            y, at = self.pooled(x, *self.sizes, return_indices=True)
            return x + self.unpooled(self.conv(y), at, *self.sizes, output_size=x.shape[2:])
        y, at = self.down(x)
        return x + self.up(self.conv(y), at, output_size=x.shape)


@pytest.mark.parametrize("functional", [False, True], ids=["modules", "functions"])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_max_pooling_with_indices_and_back(dims: int, functional: bool) -> None:
    assert_exact(ThereAndBack(dims, 2, functional=functional), SHAPES[dims])


@pytest.mark.parametrize("sizes", [(2, 2, 1), (3, 3, 1)])
def test_max_pooling_and_back_with_padding(sizes: tuple[int, ...]) -> None:
    assert_exact(ThereAndBack(2, *sizes), SHAPES[2])


def test_unpooling_without_a_size() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)

        def forward(self, x: Tensor) -> Tensor:
            return self.up(*self.down(x))

    assert_exact(Bare(), (2, C, 8, 6))


def test_the_indices_of_a_max_pool_count_the_whole_image() -> None:
    assert_exact(nn.MaxPool2d(3, 2, 1, return_indices=True), SHAPES[2])


# --- the whole image -----------------------------------------------------------------------------

AVERAGES = {1: (nn.AdaptiveAvgPool1d, F.adaptive_avg_pool1d)}
AVERAGES[2] = (nn.AdaptiveAvgPool2d, F.adaptive_avg_pool2d)
AVERAGES[3] = (nn.AdaptiveAvgPool3d, F.adaptive_avg_pool3d)
LARGEST = {1: (nn.AdaptiveMaxPool1d, F.adaptive_max_pool1d)}
LARGEST[2] = (nn.AdaptiveMaxPool2d, F.adaptive_max_pool2d)
LARGEST[3] = (nn.AdaptiveMaxPool3d, F.adaptive_max_pool3d)
SIZES: dict[int, list[Any]] = {1: [1, 3, 13], 2: [1, (3, 4), (None, 2), 11], 3: [1, (2, 3, 2)]}
ADAPTIVE = [(dims, size) for dims, sizes in SIZES.items() for size in sizes]


@pytest.mark.parametrize(("dims", "size"), ADAPTIVE)
@pytest.mark.parametrize("kind", ["average", "maximum"])
def test_adaptive_pooling(kind: str, dims: int, size: Any) -> None:
    module, function = (AVERAGES if kind == "average" else LARGEST)[dims]
    assert_exact(module(size), SHAPES[dims])
    assert_exact(Function(lambda x: function(x, size)), SHAPES[dims], FEWER[dims])


def test_adaptive_maxima_and_where_they_are() -> None:
    assert_exact(nn.AdaptiveMaxPool2d((3, 2), return_indices=True), SHAPES[2])


def head(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers, nn.Linear(C, 5))


GLOBAL: dict[str, Callable[[], nn.Module]] = {
    "average pool, flatten": lambda: head(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    "max pool, flatten": lambda: head(nn.AdaptiveMaxPool2d(1), nn.Flatten()),
    "mean": lambda: head(Function(lambda x: x.mean((2, 3)))),
    "mean of negative dims, kept": lambda: Function(lambda x: torch.mean(x, (-1, -2), True)),
    "sum": lambda: Function(lambda x: x.sum(dim=(2, 3))),
    "sum of everything": lambda: Function(lambda x: (x * x).sum()),
    "mean of everything": lambda: Function(lambda x: torch.mean(x)),
    "mean over channels too": lambda: Function(lambda x: x.mean((1, 2, 3))),
    "amax": lambda: head(Function(lambda x: x.amax((2, 3)))),
    "amin, kept": lambda: Function(lambda x: torch.amin(x, (2, 3), keepdim=True)),
    "max of everything": lambda: Function(lambda x: x.max()),
    "min of everything": lambda: Function(lambda x: torch.min(x)),
    "amax of ties": lambda: Function(lambda x: x.round().amax((2, 3)) * x.mean((2, 3))),
    "sum over channels": lambda: Function(lambda x: x.sum(1, keepdim=True)),
    "mean over channels": lambda: Function(lambda x: x.mean(1)),
    "amax over channels": lambda: Function(lambda x: x.amax(1, keepdim=True)),
    "max and argmax over channels": lambda: Function(lambda x: x.max(1)),
    "norm over channels": lambda: Function(lambda x: F.normalize(x, dim=1)),
    "argmax": lambda: Function(lambda x: (x.argmax(1), x)),
}


@pytest.mark.parametrize("name", GLOBAL)
def test_sums_means_and_maxima(name: str) -> None:
    assert_exact(GLOBAL[name](), SHAPES[2])


class Excited(nn.Module):
    """Squeeze and excitation."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.down, self.up = nn.Conv2d(C, 2, 1), nn.Conv2d(2, C, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.up(self.down(self.pool(x)).relu()).sigmoid()


class ExcitedByMean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(C, 2), nn.Linear(2, C)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.up(self.down(x.mean((2, 3))).relu()).sigmoid()[:, :, None, None]


@pytest.mark.parametrize("kind", [Excited, ExcitedByMean])
def test_squeeze_and_excitation(kind: Callable[[], nn.Module]) -> None:
    assert_exact(kind(), SHAPES[2])


def test_layers_behind_the_pooling_run_whole_on_every_rank() -> None:
    tail = nn.Sequential(
        nn.AdaptiveAvgPool2d(4), nn.Conv2d(C, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(24, 3),
    )  # fmt: skip
    assert_exact(tail, SHAPES[2])


# --- interpolation -------------------------------------------------------------------------------

NEAREST = ("nearest", "nearest-exact")
SMOOTH = {1: ("linear",), 2: ("bilinear", "bicubic"), 3: ("trilinear",)}
RESIZED: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "size 20": {"size": 20}, "size 5": {"size": 5}, "twice": {"scale_factor": 2},
        "1.7 times": {"scale_factor": 1.7}, "same size": {"size": 13},
    },
    2: {
        "size (11, 5)": {"size": (11, 5)},
        "size 3": {"size": 3},
        "twice": {"scale_factor": 2},
        "(3, 2) times": {"scale_factor": (3, 2)},
        "1.6 times": {"scale_factor": 1.6},
        "(0.6, 2.3) times": {"scale_factor": (0.6, 2.3)},
        "1.6 times, by the sizes": {"scale_factor": 1.6, "recompute_scale_factor": True},
        "same size": {"size": (7, 9)},
        "(1.05, 2) times": {"scale_factor": (1.05, 2)},
    },
    3: {
        "size (7, 4, 9)": {"size": (7, 4, 9)}, "twice": {"scale_factor": 2},
        "1.4 times": {"scale_factor": 1.4},
    },
}  # fmt: skip
RESIZES = [
    (dims, mode, corners, name)
    for dims, sizes in RESIZED.items()
    for name in sizes
    for mode in (*NEAREST, *SMOOTH[dims])
    for corners in ((None,) if mode in NEAREST else (False, True))
]


@pytest.mark.parametrize(("dims", "mode", "corners", "name"), RESIZES)
def test_interpolation(dims: int, mode: str, corners: bool | None, name: str) -> None:
    options = {**RESIZED[dims][name], "mode": mode, "align_corners": corners}
    if name.startswith(("size", "twice")):
        assert_exact(nn.Upsample(**options), SHAPES[dims])
    assert_exact(Function(lambda x: F.interpolate(x, **options)), SHAPES[dims], FEWER[dims])


@pytest.mark.parametrize("kind", [nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d])
def test_upsampling_by_its_older_names(kind: Any) -> None:
    assert_exact(kind(scale_factor=2), SHAPES[2])


# --- moving cells about --------------------------------------------------------------------------

PADS: dict[str, tuple[Any, tuple[int, ...], str]] = {
    "zeros": (nn.ZeroPad2d, (1, 2, 3, 0), "constant"),
    "reflection": (nn.ReflectionPad2d, (3, 1, 2, 4), "reflect"),
    "replication": (nn.ReplicationPad2d, (9, 1, 0, 8), "replicate"),
    "circular": (nn.CircularPad2d, (5, 1, 2, 6), "circular"),
}


@pytest.mark.parametrize("name", PADS)
def test_padding(name: str) -> None:
    module, sizes, mode = PADS[name]
    assert_exact(module(sizes), SHAPES[2])
    assert_exact(Function(lambda x: F.pad(x, sizes, mode=mode)), SHAPES[2], FEWER[2])


MOVED: dict[str, Callable[[Tensor], Any]] = {
    "pad by a number": lambda x: F.pad(x, (1, 2, 2, 1), value=1.5),
    "pad, negative": lambda x: F.pad(x, (-1, 2, 0, -3)),
    "pad a channel": lambda x: F.pad(x, (1, 0, 0, 0, 0, 2)),
    "crop": lambda x: x[:, :, 2:6, 1:],
    "crop, negative": lambda x: x[..., 1:-1, :-3],
    "crop to one tile": lambda x: x[:, :, :2, :2],
    "every other": lambda x: x[:, :, ::2, 1::3],
    "one channel": lambda x: x[:, 1:2] * x[:, 0].unsqueeze(1),
    "an added dim": lambda x: x[:, None, :, 1:].squeeze(1),
    "narrow": lambda x: x.narrow(2, 1, 5).narrow(-1, 3, 4),
    "narrow a channel": lambda x: torch.narrow(x, 1, 1, 2),
    "chunk": lambda x: torch.cat(x.chunk(2, 1)[::-1], 1),
    "split": lambda x: operator.mul(*x.split(2, dim=1)),
    "unbind": lambda x: torch.cat([y.unsqueeze(1) for y in x.unbind(1)], 1),
    "stack of sums": lambda x: torch.cat((x, x.sum(1, keepdim=True)), dim=1),
    "permute": lambda x: x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
    "transpose": lambda x: x.transpose(1, 3).transpose(1, 3),
    "swapped": lambda x: x.transpose(2, 3).transpose(2, 3),
    "movedim": lambda x: x.movedim(1, -1).movedim(-1, 1),
    "groups of channels": lambda x: x.view(len(x), 2, 2, *x.shape[2:]).mean(2),
    "shuffled channels": lambda x: (
        x.view(len(x), 2, 2, *x.shape[2:]).transpose(1, 2).reshape(x.shape)
    ),
    "unflatten": lambda x: x.unflatten(1, (2, -1)).sum(1),
    "flatten channels": lambda x: x.unsqueeze(1).flatten(1, 2),
    "pixel unshuffle": lambda x: F.pixel_unshuffle(x[:, :, :6, :8], 2),
    "pixel shuffle": lambda x: F.pixel_shuffle(x, 2),
}


@pytest.mark.parametrize("name", MOVED)
def test_moving_cells_about(name: str) -> None:
    assert_exact(Function(MOVED[name]), SHAPES[2])


def test_pixel_shuffle_and_unshuffle_as_modules() -> None:
    assert_exact(nn.PixelShuffle(2), SHAPES[2])
    assert_exact(nn.PixelUnshuffle(3), (2, C, 6, 9))


def test_rows_may_be_flattened_where_only_rows_are_cut() -> None:
    """(N, C, H, W) to (N, C, H W): a run of rows is a run of cells."""
    model = Function(lambda x: x.flatten(2).cumsum(1).sigmoid())
    assert_exact(model, SHAPES[2], [((8, 1), None, 1), ((3, 1), [(0, 5)], 9)])


# --- norms ---------------------------------------------------------------------------------------

BATCH: dict[str, dict[str, Any]] = {
    "plain": {},
    "momentum None": {"momentum": None},
    "affine off": {"affine": False},
    "no running statistics": {"track_running_stats": False},
    "fast, coarse": {"momentum": 0.7, "eps": 0.1},
}
BATCH_NORM = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
INSTANCE_NORM = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}


def randomised(module: nn.Module) -> nn.Module:
    """Weights and running statistics that are not 1 and 0."""
    with torch.no_grad():
        for t in (*module.parameters(), *module.buffers()):
            if t.is_floating_point():
                t.copy_(torch.rand_like(t) + 0.5)
    return module


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", BATCH)
def test_batch_norm(name: str, training: bool) -> None:
    assert_exact(randomised(nn.BatchNorm2d(C, **BATCH[name])).train(training), SHAPES[2])


@pytest.mark.parametrize("dims", [1, 3])
def test_batch_norm_in_one_and_three_dims(dims: int) -> None:
    assert_exact(randomised(BATCH_NORM[dims](C)), SHAPES[dims])


def test_batch_norm_as_a_function() -> None:
    trained = Function(
        lambda x, weight, bias: F.batch_norm(x, None, None, weight, bias, training=True),
        weight=(C,), bias=(C,),
    )  # fmt: skip
    assert_exact(trained, SHAPES[2])


def test_batch_norm_of_cells_that_nobody_reads_later() -> None:
    """The last row and column before a stride of 2 on odd sizes still count."""
    norm = nn.Sequential(nn.BatchNorm2d(C), nn.Conv2d(C, C, 2, stride=2))
    assert_exact(norm, SHAPES[2])


def test_batch_norm_called_twice() -> None:
    norm = randomised(nn.BatchNorm2d(C))
    assert_exact(nn.Sequential(norm, nn.Conv2d(C, C, 3, padding=1), norm), SHAPES[2])


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(C), nn.GroupNorm(2, C)], ids=type)
def test_a_tile_that_owns_nothing_but_is_read(norm: nn.Module) -> None:
    """The first output rows read rows 1 to 3, mirrored; whoever has them, it is not the owner."""
    mirrored = nn.Conv2d(C, C, 1, padding=3, padding_mode="reflect")
    plain = Plain(nn.Sequential(norm, mirrored), torch.randn(SHAPES[2]))
    for fused in (1, 9):
        plain.cut((3, 1), points=[(0, 4)], fused=fused)


@pytest.mark.parametrize("groups", [1, 2, C])
def test_group_norm(groups: int) -> None:
    assert_exact(randomised(nn.GroupNorm(groups, C)), SHAPES[2])
    function = Function(
        lambda x, weight, bias: F.group_norm(x, groups, weight, bias), weight=(C,), bias=(C,)
    )
    assert_exact(function, SHAPES[2], FEWER[2])


def test_group_norm_without_weights_in_one_and_three_dims() -> None:
    assert_exact(nn.GroupNorm(2, C, affine=False), SHAPES[1])
    assert_exact(nn.GroupNorm(2, C, affine=False), SHAPES[3])


INSTANCE: dict[str, dict[str, Any]] = {
    "plain": {},
    "affine": {"affine": True},
    "tracking": {"affine": True, "track_running_stats": True, "momentum": 0.3},
    "tracking without momentum": {"track_running_stats": True, "momentum": None},
}


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", INSTANCE)
def test_instance_norm(name: str, training: bool) -> None:
    assert_exact(randomised(nn.InstanceNorm2d(C, **INSTANCE[name])).train(training), SHAPES[2])


def test_instance_norm_in_other_dims_and_as_a_function() -> None:
    assert_exact(nn.InstanceNorm1d(C, affine=True), SHAPES[1])
    assert_exact(nn.InstanceNorm3d(C, affine=True), SHAPES[3])
    assert_exact(Function(lambda x: F.instance_norm(x)), SHAPES[2], FEWER[2])


class ChannelsLast(nn.Module):
    """A layer norm over channels, as ConvNeXt has it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = randomised(nn.LayerNorm(C)), nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(self.norm(x.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)


def test_layer_norm_over_channels() -> None:
    assert_exact(ChannelsLast(), SHAPES[2])


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"elementwise_affine": False}])
def test_layer_norm_over_the_image(options: dict[str, Any]) -> None:
    assert_exact(randomised(nn.LayerNorm(SHAPES[2][1:], **options)), SHAPES[2])


def test_layer_norm_over_the_image_without_channels() -> None:
    assert_exact(randomised(nn.LayerNorm(SHAPES[2][2:])), SHAPES[2], CUTS[2][1:])


def test_layer_norm_as_a_function() -> None:
    shape = SHAPES[2][1:]
    function = Function(
        lambda x, weight, bias: F.layer_norm(x, shape, weight, bias), weight=shape, bias=shape
    )
    assert_exact(function, SHAPES[2])


NORMS: dict[str, Callable[[], nn.Module]] = {
    "BatchNorm": lambda: nn.BatchNorm2d(C),
    "GroupNorm": lambda: nn.GroupNorm(1, C),
    "InstanceNorm": lambda: nn.InstanceNorm2d(C, affine=True),
    "LayerNorm": lambda: nn.LayerNorm((C, 2, 3)),
}


@pytest.mark.parametrize("name", NORMS)
def test_norms_of_tiles_of_one_cell_whose_channels_are_last_in_memory(name: str) -> None:
    """Story: the strides of such a tile say as well that its channels are first."""
    torch.manual_seed(0)
    image = torch.randn(3, C, 2, 3).contiguous(memory_format=torch.channels_last)
    plain = Plain(nn.Sequential(NORMS[name]()), image)
    plain.cut((2, 2))
    plain.cut((2, 3))


# --- pointwise -----------------------------------------------------------------------------------

H, W = SHAPES[2][2:]
CONSTANT = torch.linspace(0, 1, H * W, dtype=torch.float64).view(H, W)  # neither weight nor buffer
POINTWISE: dict[str, Callable[[], nn.Module]] = {
    "ReLU": nn.ReLU,
    "ReLU in place": lambda: nn.ReLU(inplace=True),
    "ReLU6": nn.ReLU6,
    "LeakyReLU in place": lambda: nn.LeakyReLU(0.1, inplace=True),
    "LeakyReLU in place, on a view": lambda: nn.Sequential(  # what InstanceNorm gives is a view
        nn.InstanceNorm2d(C, affine=True), nn.LeakyReLU(0.1, inplace=True)
    ),
    "PReLU": lambda: nn.PReLU(C),
    "GELU": nn.GELU,
    "SiLU": nn.SiLU,
    "Mish": nn.Mish,
    "Hardswish": nn.Hardswish,
    "Hardsigmoid": nn.Hardsigmoid,
    "ELU": nn.ELU,
    "Softplus": nn.Softplus,
    "Tanh": nn.Tanh,
    "Identity": nn.Identity,
    "Softmax over channels": lambda: nn.Softmax(1),
    "LogSoftmax over channels": lambda: nn.LogSoftmax(dim=1),
    "Softmax2d": nn.Softmax2d,
    "GLU over channels": lambda: nn.GLU(1),
    "softmax": lambda: Function(lambda x: x.softmax(1)),
    "log_softmax": lambda: Function(lambda x: F.log_softmax(x, dim=-3)),
    "a function of functions": lambda: Function(
        lambda x: (x.abs() + 1).log() * x.clamp(-1, 2) ** 3
    ),
    "where": lambda: Function(lambda x: torch.where(x > 0, x, 0.1 * x)),
    "a parameter per channel": lambda: Function(
        lambda x, scale: x * scale[:, None, None], scale=(C,)
    ),
    "a parameter as large as the image": lambda: Function(
        lambda x, scale, shift: x * scale + shift, scale=(C, H, W), shift=(1, H, W)
    ),
    "a parameter per row": lambda: Function(lambda x, rows: x + rows, rows=(H, 1)),
    "a parameter per column": lambda: Function(lambda x, columns: x * columns, columns=(W,)),
    "a constant as large as the image": lambda: Function(lambda x: x * CONSTANT),
    "in place": lambda: Function(lambda x: (x * 2).add_(1).mul_(x).tanh_()),
    "augmented": lambda: Function(augmented),
    "a scalar from the image": lambda: Function(lambda x: x / (x * x).mean()),
    "another type": lambda: Function(lambda x: (x > 0).float().double() * x + x.to(x.dtype)),
    "detached": lambda: Function(lambda x: x + x.detach().clone()),
    "masked fill": lambda: Function(lambda x: x.masked_fill(x > 1, 0.5)),
    "maximum": lambda: Function(lambda x: torch.maximum(x, x * x)),
    "lerp": lambda: Function(lambda x: torch.lerp(x, x * x, 0.3)),
}


def augmented(x: Tensor) -> Tensor:
    y = 2 * x
    y += x.sigmoid()
    y *= 0.5
    return y


@pytest.mark.parametrize("name", POINTWISE)
def test_pointwise(name: str) -> None:
    assert_exact(POINTWISE[name](), SHAPES[2])


# --- branches that are cut differently -----------------------------------------------------------


class Branches(nn.Module):
    """The same image twice, by two ways, joined."""

    def __init__(self, one: nn.Module, other: nn.Module, join: Callable[..., Tensor]) -> None:
        super().__init__()
        self.one, self.other, self.join = one, other, join

    def forward(self, x: Tensor) -> Tensor:
        return self.join(self.one(x), self.other(x))


def beside(one: Tensor, other: Tensor) -> Tensor:
    return torch.cat((one, other), 1)


def onto(one: Tensor, other: Tensor) -> Tensor:
    one = one + 0
    one += other
    return one


# Both give 7 x 9 -> 4 x 5, or 7 x 9 -> 5 x 7, but follow the cut of the input to other places.
BRANCHES: dict[str, Callable[[], tuple[nn.Module, nn.Module]]] = {
    "stride 2, by kernels 1 and 3": lambda: (
        nn.Conv2d(C, C, 1, stride=2),
        nn.Conv2d(C, C, 3, stride=2, padding=1),
    ),
    "stride 2, by pooling": lambda: (
        nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(C, C, 2, stride=2, padding=1),
    ),
    "cropped at either end": lambda: (
        Function(lambda x: x[:, :, 2:, 2:]),
        nn.Sequential(nn.Conv2d(C, C, 3), nn.BatchNorm2d(C)),
    ),
    "crop behind": lambda: (Function(lambda x: x[:, :, :-2, :-2]), nn.Conv2d(C, C, 3)),
    "up and down": lambda: (nn.Identity(), UpAndDown()),
}


class UpAndDown(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(C, C, 3, stride=3, padding=1)
        self.up = nn.ConvTranspose2d(C, C, 4, stride=3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.down(x))
        return F.interpolate(y, size=x.shape[2:], mode="bilinear")


@pytest.mark.parametrize("join", [torch.add, beside, onto], ids=["add", "concatenate", "add_"])
@pytest.mark.parametrize("name", BRANCHES)
def test_branches_that_are_cut_differently(name: str, join: Callable[..., Tensor]) -> None:
    assert_exact(Branches(*BRANCHES[name](), join), SHAPES[2])


def test_two_inputs_that_are_cut_differently() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Conv2d(C, C, 3), nn.Conv2d(C, C, 3)
            self.last = nn.Conv2d(2 * C, 2, 3, padding=1)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.last(torch.cat((self.left(x), self.right(y)), 1)) + x.mean()

    torch.manual_seed(0)
    plain = Plain(Both(), torch.randn(SHAPES[2]), torch.randn(SHAPES[2]))
    for fused in (1, 2, 9):
        plain.cut((2, 2), fused=fused, points={"input": [(1,), (7,)], "input1": [(6,), (0,)]})


def test_an_input_that_is_no_image_goes_to_every_rank() -> None:
    class Conditioned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.mix = nn.Conv2d(C, C, 3), nn.Linear(3, C)

        def forward(self, x: Tensor, z: Tensor) -> Tensor:
            return self.conv(x) * self.mix(z)[:, :, None, None]

    torch.manual_seed(0)
    plain = Plain(Conditioned(), torch.randn(SHAPES[2]), torch.randn(2, 3))
    for grid, points, fused in CUTS[2]:
        plain.cut(grid, points=points, fused=fused)


def test_several_outputs_cut_and_whole() -> None:
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(C, C, 3), nn.Conv2d(C, 3, 3, stride=2)

        def forward(self, x: Tensor) -> dict[str, Any]:
            y = self.a(x)
            return {"map": self.b(y), "deep": [y, y.mean((2, 3))], "where": y.argmax(1)}

    torch.manual_seed(0)
    plain = Plain(Several(), torch.randn(SHAPES[2]))
    for grid, points, fused in CUTS[2]:
        plain.cut(grid, points=points, fused=fused)


SLICED = ("conv", "pool", "transposed", "norm", "resize", "dropout")


@pytest.mark.parametrize("name", SLICED)
def test_samples_may_be_cut_as_well(name: str) -> None:
    """Slices of the batch are a cut along the first dim, with tiles or without."""
    layers = {
        "conv": nn.Conv2d(C, C, 3, padding=1, stride=2),
        "pool": nn.MaxPool2d(3, 2, 1),
        "transposed": nn.ConvTranspose2d(C, C, 3, stride=2, padding=1, output_padding=1),
        "norm": nn.Sequential(nn.BatchNorm2d(C), nn.GroupNorm(2, C), nn.LayerNorm((C, 7, 9))),
        "resize": nn.Upsample(scale_factor=1.5, mode="bilinear"),
        "dropout": nn.Sequential(nn.Dropout(0.3), nn.Dropout2d(0.3)),
    }
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(C, C, 3, padding=1), layers[name])
    plain = Plain(model, torch.randn(5, C, 7, 9), keyed=name == "dropout")
    for parts in (2, 3, 7):
        plain.cut((parts,), dims=(0,))


TILED: dict[str, Callable[[], nn.Module]] = {
    "conv": lambda: nn.Conv2d(C, C, 5, padding=2, stride=2),
    "conv, reflect": lambda: nn.Conv2d(C, C, 3, padding=2, padding_mode="reflect"),
    "conv, circular": lambda: nn.Conv2d(C, C, 3, padding=2, padding_mode="circular"),
    "transposed": lambda: nn.ConvTranspose2d(C, C, 3, stride=2, padding=1, output_padding=1),
    "max pool": lambda: nn.MaxPool2d(3, 2, 1),
    "there and back": lambda: ThereAndBack(2, 2, functional=True),
    "average pool": lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=False),
    "adaptive": lambda: nn.AdaptiveAvgPool2d((3, 4)),
    "adaptive, max": lambda: nn.AdaptiveMaxPool2d((2, 3)),
    "nearest": lambda: nn.Upsample(scale_factor=2),
    "bilinear": lambda: nn.Upsample(scale_factor=2, mode="bilinear"),
    "bicubic": lambda: nn.Upsample(size=(11, 4), mode="bicubic", align_corners=True),
    "crop": lambda: Function(lambda x: x[:, :, 1:5, ::2]),
    "batch norm": lambda: nn.BatchNorm2d(C),
    "group norm": lambda: nn.GroupNorm(2, C),
    "layer norm": lambda: nn.LayerNorm(SHAPES[2][1:]),
    "excited": Excited,
    "pad": lambda: nn.ZeroPad2d(2),
    "pixel shuffle": lambda: nn.PixelShuffle(2),
    "softmax": lambda: nn.Softmax(1),
    "dropout": lambda: nn.Dropout(0.3),
    "maximum": lambda: Function(lambda x: x.amax()),
    "branches": lambda: Branches(nn.MaxPool2d(3, 2, 1), nn.Conv2d(C, C, 1, stride=2), beside),
}


@pytest.mark.parametrize("name", TILED)
def test_more_tiles_than_rows(name: str) -> None:
    """Eight tiles of seven rows, and halos that reach over several of them."""
    assert_exact(TILED[name](), SHAPES[2], MORE, keyed=name == "dropout")


# --- random numbers ------------------------------------------------------------------------------

DROPPING: dict[str, Callable[[], nn.Module]] = {
    "Dropout": lambda: nn.Dropout(0.4),
    "Dropout in place": lambda: nn.Dropout(0.4, inplace=True),
    "dropout": lambda: Function(lambda x: F.dropout(x, 0.4)),
    "dropout off": lambda: Function(lambda x: F.dropout(x, 0.4, training=False)),
    "Dropout2d": lambda: nn.Dropout2d(0.4),
    "dropout2d": lambda: Function(lambda x: F.dropout2d(x, 0.4)),
    "Dropout, eval": lambda: nn.Dropout(0.4).eval(),
    "everything": lambda: nn.Dropout(1.0),
}


@pytest.mark.parametrize("name", DROPPING)
def test_dropout_is_that_of_the_uncut_image(name: str) -> None:
    assert_exact(DROPPING[name](), SHAPES[2], keyed=True)


@pytest.mark.parametrize("halo", ["d1", "d2"])
@pytest.mark.parametrize("kind", [nn.Dropout, nn.Dropout2d])
def test_dropout_under_a_plan_is_that_of_one_rank(kind: Any, halo: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, C, 3, padding=1), kind(0.3), nn.Conv2d(C, C, 3, padding=1), kind(0.3),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(C, 5),
    ).double()  # fmt: skip
    draw = torch.Generator().manual_seed(1)
    images = torch.randn(4, 3, 7, 9, generator=draw, dtype=torch.float64)
    data = [(images, torch.randint(5, (4,), generator=draw))] * 2
    plan = Plan(stages=2, micro_batches=2, spatial=(2, 2), halo=halo, balance=(4, 3))
    assert_equal(planned(model, data, plan), alone(model, data, 2))


# --- layers without a layer rule -----------------------------------------------------------------


class Attention(nn.Module):
    """Every cell looks at every cell."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(C, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        cells = x.flatten(2).transpose(1, 2)
        return self.attend(cells, cells, cells)[0].transpose(1, 2).reshape(x.shape)


class Centred(torch.autograd.Function):
    """Forward looks at every cell by itself, backward does not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] - gradients[0].mean()


def hooked() -> nn.Module:
    conv = nn.Conv2d(C, C, 3, padding=1)
    conv.register_forward_hook(lambda module, inputs, output: output * output.mean())
    return conv


def view_changed(x: Tensor) -> Tensor:
    x = x + 1
    x[:, 0].mul_(2)
    return x


# What runs whole on every rank must name: the call, and why it has no layer rule.
WHOLE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "attention": (Attention, r"layer.flatten .*reshapes \(2, 4, 8, 8\) to \(2, 4, 64\)"),
    "concatenation along rows": (
        lambda: Function(lambda x: torch.cat((x, x), 2)),
        "layer.cat .*joins tensors along dim 2, which is tiled",
    ),
    "softmax over rows": (
        lambda: nn.Softmax(2),
        r"layer \(Softmax\) looks along dim 2, which is tiled",
    ),
    "softmax over pixels": (
        lambda: Function(lambda x: x.flatten(2).softmax(-1).view(x.shape)),
        r"layer.flatten .*in which dim 3 is tiled",
    ),
    "an autograd function": (
        lambda: Function(Centred.apply),
        r"layer.Centred \(Centred\) ",
    ),
    "hooks": (hooked, r"layer \(Conv2d\) carries hooks, which expect to see the whole tensor"),
    "one row": (
        lambda: Function(lambda x: x + x[:, :, 0].unsqueeze(2)),
        "layer.getitem .*picks one cell along dim 2, which is tiled",
    ),
    "a mask": (
        lambda: Function(lambda x: x * x[x > 0].mean()),
        "layer .*is not a layer that is known to have an exact form",
    ),
    "a layer over columns": (
        lambda: nn.Linear(8, 8),
        "layer .*mixes the cells of the last dim, which is tiled",
    ),
    "the layer norm of a row": (
        lambda: nn.LayerNorm(8),
        "layer .*normalises over some, but not all",
    ),
    "noise": (lambda: nn.AlphaDropout(0.5), r"layer \(AlphaDropout\) is not a layer"),
    "noise of its own": (
        lambda: Function(lambda x: x + torch.rand_like(x)),
        r"layer.rand_like \(rand_like\) is not a layer",
    ),
    "flipped": (lambda: Function(lambda x: x.flip(3)), r"layer.flip .*known to have an exact form"),
    "rolled": (lambda: Function(lambda x: x.roll(1)), r"layer.roll .*as if they were one"),
    "a product of matrices": (lambda: Function(lambda x, w: x @ w, w=(8, 8)), "layer.matmul"),
    "antialias": (
        lambda: Function(
            lambda x: F.interpolate(x, scale_factor=0.5, mode="bilinear", antialias=True)
        ),
        "layer.interpolate .*antialias",
    ),
}


class Refused(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.stem, self.layer = nn.Conv2d(3, C, 3, padding=1), layer
        self.head = nn.Linear(C, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.stem(x)).mean((2, 3)))


def trainer(transport: Any, model: nn.Module, plan: Plan) -> Trainer:
    mine, sample = copy.deepcopy(model), torch.empty(2, 3, 8, 8)
    return Trainer(mine, F.cross_entropy, sgd, sample, plan, transport=transport)


@pytest.mark.parametrize("name", WHOLE)
def test_a_layer_without_a_layer_rule_runs_whole_on_every_rank(name: str) -> None:
    make, why = WHOLE[name]
    plain = Plain(Refused(make()), torch.randn(2, 3, 8, 8), keyed=True)
    for grid, fused in (((2, 2), 1), ((2, 2), 4)):
        laid = plain.cut(grid, fused=fused)[0].laid
        assert laid is not None and any(re.search(why, line) for line in laid.gathered())


def test_a_change_in_place_that_a_copy_would_not_see_is_rejected_before_anything_runs() -> None:
    model = Refused(Function(view_changed))
    plan = Plan(stages=1, spatial=(2, 2), schedule="sequential")
    with pytest.raises(PlanError, match="changes in place what is also seen as") as caught:
        run(4, lambda transport: trainer(transport, model, plan))
    said = str(caught.value)
    assert said.startswith("stage 0 is cut 2x2, but layer")
    assert "let stage 0 end there and leave layer" in said
    # The name it offers is one that a plan takes.
    last = said.split("the last that can be cut is ")[1].split(":")[0]
    assert last.startswith(("stem", "layer"))


def test_the_offered_end_of_the_spatial_stages_works() -> None:
    """The error says to end the stage at `stem`; so we do."""
    model = Refused(Attention())
    plan = Plan(stages=[["stem"], ["layer", "head"]], spatial=(2, 2))
    run(5, lambda transport: trainer(transport, model, plan))


def test_attention_over_strips_gathers_only_before_the_attention() -> None:
    """Strips of rows may be flattened, and are still not all that a cell looks at."""
    laid = Plain(Refused(Attention()), torch.randn(2, 3, 8, 8)).cut((2, 1))[0].laid
    assert laid is not None
    assert [line.split()[0] for line in laid.gathered()] == ["layer.attend", "layer.reshape"]


def test_pixel_shuffle_of_a_volume_cut_in_depth_runs_whole() -> None:
    """It takes the dim before the last two for channels."""
    plain = Plain(nn.PixelShuffle(2), torch.randn(1, 2, 4, 3, 3))
    assert plain.cut((2, 1, 1))[0].laid.gathered()  # type: ignore[union-attr]
    assert not plain.cut((1, 2, 2))[0].laid.gathered()  # type: ignore[union-attr]
