"""Layers for generated models, each drawn for the shape of what it is given.

Image layers take (N, C, ...) with one to three spatial dimensions, sequence layers (N, length,
width). The convolutions, pools, norms and resizings are those of test_spatial_generated.py.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from math import prod
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from tests.test_spatial_generated import LAYERS as SPATIAL

Tensor = torch.Tensor
Shape = tuple[int, ...]
Draw = Callable[[Random, Shape], nn.Module]
LARGEST, LONGEST = 1500, 12  # numbers in a sample, cells along a dimension
TRIES = 12

IMAGE: dict[str, Draw] = {name: draw for name, (_, draw) in SPATIAL.items()}
SEQUENCE: dict[str, Draw] = {}
ON_TILES = set(IMAGE)  # kinds that a plan with tiles is drawn for


def image(draw: Draw) -> Draw:
    IMAGE[draw.__name__] = draw
    return draw


def tiled(draw: Draw) -> Draw:
    ON_TILES.add(draw.__name__)
    return image(draw)


def sequence(draw: Draw) -> Draw:
    SEQUENCE[draw.__name__] = draw
    return draw


def both(draw: Draw) -> Draw:
    return sequence(image(draw))


class Fn(nn.Module):
    """A function with its arguments, as a module that shows them."""

    def __init__(self, function: Callable[..., Any], *args: Any, **options: Any) -> None:
        super().__init__()
        self.function, self.args, self.options = function, args, options

    def forward(self, x: Tensor) -> Any:
        return self.function(x, *self.args, **self.options)

    def extra_repr(self) -> str:
        return f"{self.function.__name__}, {self.args}, {self.options}"


def conv(dims: int, a: int, b: int, size: int = 3, **options: Any) -> nn.Module:
    made = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    return made(a, b, size, padding=size // 2, **options)


# --- activations and dropouts ---------------------------------------------------------------------


@both
def in_place_activation(r: Random, shape: Shape) -> nn.Module:
    """Behind something whose output nobody else needs."""
    kinds: tuple[Callable[[], nn.Module], ...] = (
        lambda: nn.ReLU(inplace=True), lambda: nn.LeakyReLU(0.1, inplace=True),
        lambda: nn.ELU(inplace=True), lambda: nn.Hardtanh(-2, 2, inplace=True),
        lambda: nn.SiLU(inplace=True), lambda: nn.Hardswish(inplace=True),
        lambda: nn.SELU(inplace=True), lambda: nn.CELU(inplace=True),
        lambda: nn.Threshold(0.1, 0.2, inplace=True), lambda: nn.Mish(inplace=True),
    )  # fmt: skip
    return nn.Sequential(Fn(torch.mul, 1.1), r.choice(kinds)())


@both
def smooth_activation(r: Random, shape: Shape) -> nn.Module:
    kinds: tuple[Callable[[], nn.Module], ...] = (
        nn.GELU, lambda: nn.GELU("tanh"), nn.SiLU, nn.Mish, nn.Softplus, nn.LogSigmoid, nn.Sigmoid,
        nn.Softsign, nn.Tanhshrink, nn.CELU, nn.ELU, nn.SELU, lambda: nn.Softmin(1),
        lambda: nn.LogSoftmax(1), lambda: nn.PReLU(),
    )  # fmt: skip
    return r.choice(kinds)()


@both
def dropout(r: Random, shape: Shape) -> nn.Module:
    p, inplace = r.choice((0.1, 0.5)), r.random() < 0.3
    kinds: list[Callable[[], nn.Module]] = [
        lambda: nn.Dropout(p, inplace), lambda: nn.AlphaDropout(p),
        lambda: nn.FeatureAlphaDropout(p), lambda: Functional(p), lambda: nn.Dropout(0.0),
        lambda: nn.RReLU(0.1, 0.4),
    ]  # fmt: skip
    spatial = {3: nn.Dropout1d, 4: nn.Dropout2d, 5: nn.Dropout3d}.get(len(shape))
    kinds += [lambda: spatial(p)] if spatial else []
    made = r.choice(kinds)()
    return nn.Sequential(Fn(torch.mul, 1.1), made) if inplace else made


class Functional(nn.Module):
    """Dropout as a function, by an attribute."""

    draws = True

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.p, self.training)


class Noise(nn.Module):
    """Random numbers of a tensor's own shape, or one per sample."""

    draws = True

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        if self.how == "randn_like":
            return x + 0.1 * torch.randn_like(x)
        if self.how == "depth":
            each = (len(x), *(1,) * (x.dim() - 1))
            return x * torch.empty(each, dtype=x.dtype).bernoulli_(0.7)
        return x + 0.1 * torch.rand(x.shape[1:], dtype=x.dtype)


@both
def noise(r: Random, shape: Shape) -> nn.Module:
    return Noise(r.choice(("randn_like", "depth", "rand")))


# --- state ----------------------------------------------------------------------------------------


class Averaged(nn.Module):
    """A buffer that forward changes, in place or by assigning a new one."""

    mean: Tensor
    count: Tensor

    def __init__(self, width: int, dim: int, assigned: bool) -> None:
        super().__init__()
        self.dim, self.assigned = dim, assigned
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            rest = [d for d in range(x.dim()) if d != self.dim]
            now = x.detach().mean(rest)
            if self.assigned:
                self.mean = 0.9 * self.mean + 0.1 * now
                self.count = self.count + 1
            else:
                self.mean.mul_(0.9).add_(now, alpha=0.1)
                self.count += 1
        shape = [1] * x.dim()
        shape[self.dim] = -1
        return x - 0.5 * self.mean.view(shape)


@both
def buffer_in_place(r: Random, shape: Shape) -> nn.Module:
    return Averaged(shape[1], 1, False)


@both
def buffer_assigned(r: Random, shape: Shape) -> nn.Module:
    return Averaged(shape[1], 1, True)


@image
def parametrized(r: Random, shape: Shape) -> nn.Module:
    made = conv(len(shape) - 2, shape[1], shape[1])
    return r.choice((spectral_norm, weight_norm))(made)


class Constant(nn.Module):
    """Tensors that are no buffers: a plain attribute, one not in the state dict, one of forward."""

    fixed: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.register_buffer("fixed", torch.linspace(0.5, 1, width), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        shape = (1, -1, *(1,) * (x.dim() - 2))
        more = torch.arange(self.width, dtype=x.dtype, device=x.device).cos()
        return x * self.fixed.view(shape) + 0.1 * more.view(shape)


@both
def constant(r: Random, shape: Shape) -> nn.Module:
    return Constant(shape[1])


class Attribute(nn.Module):
    """A number that the user sets between steps: `moves` is found by `models.at_step`."""

    moves = True

    def __init__(self) -> None:
        super().__init__()
        self.alpha = 0.5

    def forward(self, x: Tensor) -> Tensor:
        return x * self.alpha


@both
def attribute(r: Random, shape: Shape) -> nn.Module:
    return Attribute()


class Listed(nn.Module):
    """Weights that forward reaches through a list, and a dict."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(width)), nn.Parameter(torch.randn(()))
        self.ws = [self.a, self.b]

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.ws
        return x * (1 + 0.1 * a.view(1, -1, *(1,) * (x.dim() - 2))) + b


@both
def parameters_in_a_list(r: Random, shape: Shape) -> nn.Module:
    return Listed(shape[1])


class Several(nn.Module):
    """A ParameterList, a ParameterDict, a parameter of no dimensions, one that is never used."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.many = nn.ParameterList([nn.Parameter(torch.randn(width)) for _ in range(2)])
        self.named = nn.ParameterDict({"scale": nn.Parameter(torch.randn(()))})
        self.never = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        for p in self.many:
            x = x + 0.1 * p.view(1, -1, *(1,) * (x.dim() - 2))
        return x * self.named["scale"].tanh()


@both
def parameter_containers(r: Random, shape: Shape) -> nn.Module:
    return Several(shape[1])


class Complex(nn.Module):
    """A filter in the frequency domain, whose weight is real and seen as complex."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(length // 2 + 1, 2))

    def forward(self, x: Tensor) -> Tensor:
        found = torch.fft.rfft(x, dim=-1) * torch.view_as_complex(self.weight)
        return torch.fft.irfft(found, n=x.shape[-1], dim=-1)


@both
def spectrum(r: Random, shape: Shape) -> nn.Module:
    return Complex(shape[-1])


# --- shapes ---------------------------------------------------------------------------------------


def rolled(x: Tensor, shift: int) -> Tensor:
    return torch.roll(x, shift, -1)


def flipped(x: Tensor) -> Tensor:
    return x.flip(-1)


def gated(x: Tensor) -> Tensor:
    a, b = x.chunk(2, 1)
    return torch.cat((a * b.sigmoid(), b), 1)


def split_and_stacked(x: Tensor) -> Tensor:
    parts = x.split(1, 1)
    return torch.cat([p * (0.5 + 0.1 * i) for i, p in enumerate(reversed(parts))], 1)


def unbound(x: Tensor) -> Tensor:
    return torch.stack([part.tanh() for part in x.unbind(1)], 1)


def regrouped(x: Tensor) -> Tensor:
    """A channel shuffle by hand."""
    n, c, *rest = x.shape
    return x.view(n, 2, c // 2, *rest).transpose(1, 2).reshape(x.shape)


def masked(x: Tensor) -> Tensor:
    return x.masked_fill(x > 0.5, 0.25).clamp(-2, 2)


def chosen(x: Tensor) -> Tensor:
    index = torch.arange(x.shape[1] - 1, -1, -1, device=x.device)
    return x.index_select(1, index) + x[:, index]


def summed_up(x: Tensor) -> Tensor:
    return 0.5 * x.cumsum(-1)


def contracted(x: Tensor) -> Tensor:
    return (
        torch.einsum("nc...,nd...->ncd", x, x).mean(2).view(*x.shape[:2], *(1,) * (x.dim() - 2)) * x
    )


def clipped(x: Tensor) -> Tensor:
    y = x.clone()
    y[..., 0] = 0.5
    y[:, :1].mul_(2)
    return y


def powers(x: Tensor) -> Tensor:
    return (x.abs() + 0.1).sqrt() - x.square().mean(1, keepdim=True).add(1).log()


def largest(x: Tensor) -> Tensor:
    where = x.argmax(1, keepdim=True)
    return x + 0.1 * torch.zeros_like(x).scatter(1, where, 1.0)


def sorted_along(x: Tensor) -> Tensor:
    return x.sort(-1).values + 0.1 * x.topk(1, -1).values


def padded_shape(x: Tensor) -> Tensor:
    return F.pad(x.unsqueeze(1), (1, 1)).squeeze(1)[..., 1:-1]


def detached(x: Tensor) -> Tensor:
    return x + 0.1 * x.detach().pow(2)


def unseen(x: Tensor) -> Tensor:
    with torch.no_grad():
        y = x.tanh() * 2
    return x + y


SHAPES = (
    rolled, flipped, gated, split_and_stacked, unbound, regrouped, masked, chosen, summed_up,
    contracted, clipped, powers, largest, sorted_along, padded_shape, detached, unseen,
)  # fmt: skip


def _shapes() -> None:
    """Each of them is a kind of its own, so that tables tell them apart."""
    for function in SHAPES:
        args = (1,) if function is rolled else ()

        def draw(r: Random, shape: Shape, function: Any = function, args: Any = args) -> nn.Module:
            return Fn(function, *args)

        draw.__name__ = function.__name__
        both(draw)
    ON_TILES.update(("gated", "split_and_stacked", "masked", "detached", "powers"))


_shapes()


# --- more image layers ----------------------------------------------------------------------------


class PixelAttention(nn.Module):
    def __init__(self, channels: int, how: str) -> None:
        super().__init__()
        self.how = how
        self.attention = nn.MultiheadAttention(channels, 1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = x.flatten(2).transpose(1, 2)
        if self.how == "module":
            y = self.attention(y, y, y, need_weights=False)[0]
        else:
            y = F.scaled_dot_product_attention(y, y, y)
        return x + y.transpose(1, 2).reshape(x.shape)


@image
def pixel_attention(r: Random, shape: Shape) -> nn.Module:
    return PixelAttention(shape[1], r.choice(("module", "function")))


@image
def folded(r: Random, shape: Shape) -> nn.Module:
    if len(shape) != 4:
        raise ValueError("unfolds pictures")
    return Unfolded(shape)


class Unfolded(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.mix = nn.Linear(9 * shape[1], 9 * shape[1])

    def forward(self, x: Tensor) -> Tensor:
        y = F.unfold(x, 3, padding=1)
        y = self.mix(y.transpose(1, 2)).transpose(1, 2)
        return F.fold(y, x.shape[2:], 3, padding=1)


@image
def other_pools(r: Random, shape: Shape) -> nn.Module:
    dims = len(shape) - 2
    kinds: list[Callable[[], nn.Module]] = [
        lambda: (nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d)[dims - 1](3),
        lambda: (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)[dims - 1](2),
        lambda: nn.LocalResponseNorm(2),
    ]
    if dims < 3:
        kinds.append(lambda: (nn.LPPool1d, nn.LPPool2d)[dims - 1](1, 2))
    return r.choice(kinds)()


@image
def recurrent_columns(r: Random, shape: Shape) -> nn.Module:
    return Columns(shape[1])


class Columns(nn.Module):
    """A recurrent layer along the last dimension."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gru = nn.GRU(channels, channels, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = x.movedim(1, -1)
        flat = y.reshape(-1, *y.shape[-2:])
        return self.gru(flat)[0].view(y.shape).movedim(-1, 1)


@tiled
def block(r: Random, shape: Shape) -> nn.Module:
    """A residual block: norm, convolutions, a gain that starts at nought or not."""
    return Residual(shape, r.random() < 0.5, r.random() < 0.5)


class Residual(nn.Module):
    def __init__(self, shape: Shape, zero: bool, inplace: bool) -> None:
        super().__init__()
        dims, c = len(shape) - 2, shape[1]
        norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims - 1]
        self.one, self.norm = conv(dims, c, c, bias=False), norm(c)
        self.act, self.two = nn.ReLU(inplace=inplace), conv(dims, c, c, bias=False)
        self.last = norm(c)
        if zero:
            nn.init.zeros_(self.last.weight)

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(self.two(self.act(self.norm(self.one(x)))))
        y += x
        return self.act(y)


# --- sequence layers ------------------------------------------------------------------------------


@sequence
def linear(r: Random, shape: Shape) -> nn.Module:
    return nn.Linear(shape[2], r.choice((4, 6, 8)), bias=r.random() < 0.8)


@sequence
def layer_norms(r: Random, shape: Shape) -> nn.Module:
    kinds = (
        lambda: nn.LayerNorm(shape[2]),
        lambda: nn.LayerNorm(shape[1:], elementwise_affine=False),
        lambda: nn.RMSNorm(shape[2]),
        lambda: nn.BatchNorm1d(shape[1]),
        lambda: nn.BatchNorm1d(shape[1], momentum=None, affine=False),
        lambda: nn.BatchNorm1d(shape[1], track_running_stats=False),
        lambda: nn.GroupNorm(1, shape[1]),
        lambda: nn.InstanceNorm1d(shape[1], affine=True, track_running_stats=True),
    )
    return r.choice(kinds)()


class Recurrent(nn.Module):
    def __init__(self, kind: Any, width: int, both_ways: bool, layers: int) -> None:
        super().__init__()
        self.rnn = kind(width, width // 2 if both_ways else width, layers, batch_first=True,
                        bidirectional=both_ways)  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0]


@sequence
def recurrent(r: Random, shape: Shape) -> nn.Module:
    kind = r.choice((nn.LSTM, nn.GRU, nn.RNN))
    return Recurrent(kind, shape[2], r.random() < 0.5, r.randint(1, 2))


class Cells(nn.Module):
    """A cell that Python runs along the sequence."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = nn.GRUCell(width, width)

    def forward(self, x: Tensor) -> Tensor:
        h, found = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
            found.append(h)
        return torch.stack(found, 1)


@sequence
def cells(r: Random, shape: Shape) -> nn.Module:
    return Cells(shape[2])


class Attention(nn.Module):
    def __init__(self, width: int, how: str) -> None:
        super().__init__()
        self.how, self.heads = how, 2
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.bias = nn.Parameter(torch.zeros(1, 2, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        q, k, v = (
            y.view(n, length, self.heads, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, -1)
        )
        if self.how == "causal":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        elif self.how == "einsum":
            scores = torch.einsum("nhqd,nhkd->nhqk", q, k) / math.sqrt(q.shape[-1]) + self.bias
            y = torch.einsum("nhqk,nhkd->nhqd", scores.softmax(-1), v)
        else:
            mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
            y = (q @ k.mT).masked_fill(~mask, float("-inf")).softmax(-1) @ v
        return x + self.out(y.transpose(1, 2).reshape(n, length, width))


@sequence
def attention(r: Random, shape: Shape) -> nn.Module:
    return Attention(shape[2], r.choice(("causal", "einsum", "masked")))


@sequence
def transformer(r: Random, shape: Shape) -> nn.Module:
    drop = r.choice((0.0, 0.0, 0.0, 0.2))
    if r.random() < 0.3:
        return nn.TransformerEncoder(
            nn.TransformerEncoderLayer(shape[2], 2, 8, drop, batch_first=True),
            r.randint(1, 2),
            enable_nested_tensor=False,
        )
    return nn.TransformerEncoderLayer(
        shape[2], 2, 8, drop, batch_first=True, norm_first=r.random() < 0.5, activation="gelu"
    )


class Convolved(nn.Module):
    def __init__(self, width: int, groups: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, width, 3, padding=1, groups=groups)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.permute(0, 2, 1)).permute(0, 2, 1)


@sequence
def convolved(r: Random, shape: Shape) -> nn.Module:
    return Convolved(shape[2], r.choice((1, 2)))


class Rotary(nn.Module):
    """Rotary positions from a table that is made at first use and kept."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        if self.table is None or self.table.shape[0] != x.shape[1]:
            at = torch.arange(x.shape[1], dtype=x.dtype, device=x.device)
            self.table = torch.outer(at, 0.5 ** torch.arange(half, dtype=x.dtype, device=x.device))
        a, b = x[..., :half], x[..., half:]
        cos, sin = self.table.cos(), self.table.sin()
        return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


@sequence
def rotary(r: Random, shape: Shape) -> nn.Module:
    return Rotary()


class Mixer(nn.Module):
    """Weights of the module itself, in matrix products and einsum."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.over, self.along = (nn.Parameter(torch.randn(n, n) / n**0.5) for n in (width, length))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("nlw,lk->nkw", x @ self.over, self.along)


@sequence
def mixer(r: Random, shape: Shape) -> nn.Module:
    return Mixer(shape[1], shape[2])


@sequence
def bilinear(r: Random, shape: Shape) -> nn.Module:
    return Pair(shape[2])


class Pair(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Bilinear(width, width, width)

    def forward(self, x: Tensor) -> Tensor:
        return 0.3 * self.mix(x, x.tanh())


# --- drawing one ----------------------------------------------------------------------------------


def fitting(kind: str, seed: int, shape: Shape) -> tuple[nn.Module, Shape] | None:
    """A layer of a kind for this shape, and the shape that it gives; None if none fits."""
    draw = (IMAGE if kind in IMAGE else SEQUENCE)[kind]
    for attempt in range(TRIES):
        r = Random(f"{seed} {attempt}")
        torch.manual_seed(r.randrange(1 << 30))
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                made = draw(r, shape)
                found = tuple(made(torch.randn(2, *shape[1:])).shape)
        except (RuntimeError, ValueError, IndexError, AssertionError, NotImplementedError):
            continue
        if len(found) != len(shape) or found[0] != 2 or min(found[1:]) < 2:
            continue
        if max(found[2:]) <= LONGEST and prod(found[1:]) <= LARGEST:
            return made, found
    return None
