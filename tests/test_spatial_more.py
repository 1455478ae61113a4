"""Ordinary things between layers, on tiles: coordinates, pooling branches, expansions, rows and
columns, maps of losses. Each is what it is on the whole image, to the last bit that counts."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gems.plans.plan import Plan
from tests.exact import assert_equal
from tests.spatial import Plain, Rank
from tests.test_spatial_layers import SHAPES, C, Cut, Function, H, W, assert_exact
from tests.test_spatial_plans import (
    CLASSES,
    CUT_ENDS,
    WEIGHT,
    classes,
    counted,
    masked,
    numbers,
    pixels,
    plainly,
    planned_with,
    segmenter,
)

Tensor = torch.Tensor
SHAPE = SHAPES[2]
GRIDS: list[Cut] = [
    ((1, 2), None, 1),
    ((2, 1), [(2,)], 9),
    ((2, 2), [(6,), (1,)], 1),
    ((2, 2), None, 9),
    ((1, 3), [(1, 8)], 2),
    ((8, 1), None, 1),
    ((1, 5), [(0, 4, 4, 9)], 9),
]


def assert_cut(model: nn.Module | Callable[..., Any], **options: Any) -> None:
    layer = model if isinstance(model, nn.Module) else Function(model)
    assert_exact(layer, SHAPE, GRIDS, **options)


# --- whole tensors beside cut ones ---------------------------------------------------------------


class Pyramid(nn.Module):
    """The pooling branches of PSPNet (bins) and of DeepLab (one bin): pool, mix, enlarge, join."""

    def __init__(self, bins: tuple[int, ...], enlarge: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.bins, self.enlarge = bins, enlarge
        self.mix = nn.ModuleList(nn.Conv2d(C, 2, 1) for _ in bins)
        self.norm = nn.BatchNorm2d(C + 2 * len(bins))

    def forward(self, x: Tensor) -> Tensor:
        parts = [x]
        for n, mix in zip(self.bins, self.mix, strict=True):
            parts.append(self.enlarge(mix(F.adaptive_avg_pool2d(x, n)).relu(), x))
        return self.norm(torch.cat(parts, 1))


ENLARGED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "bilinear": lambda g, x: F.interpolate(g, size=x.shape[2:], mode="bilinear"),
    "corners": lambda g, x: F.interpolate(g, x.shape[2:], mode="bilinear", align_corners=True),
    "bicubic": lambda g, x: F.interpolate(g, x.shape[2:], mode="bicubic"),
    "nearest": lambda g, x: F.interpolate(g, x.shape[2:]),
    "antialias": lambda g, x: F.interpolate(g, x.shape[2:], mode="bilinear", antialias=True),
    "by name": lambda g, x: F.interpolate(input=g, size=x.shape[2:], mode="nearest-exact"),
}
FROM_ONE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "expand": lambda g, x: g.expand(-1, -1, *x.shape[2:]),
    "expand_as": lambda g, x: g.expand_as(x[:, :2]),
    "expand_as of rows": lambda g, x: g[:, :, 0].unsqueeze(2).expand_as(x[:, :2]),
    "broadcast_to": lambda g, x: torch.broadcast_to(g, (len(x), 2, *x.shape[2:])),
    "broadcast_tensors": lambda g, x: torch.broadcast_tensors(g, x[:, :2])[0],
    "repeat": lambda g, x: g.repeat(1, 1, *x.shape[2:]),
    "tile": lambda g, x: g[0].mean(0).tile(len(x), 2, *x.shape[2:]),
    "ones": lambda g, x: g * torch.ones(x.shape[2:], dtype=x.dtype),
    "product with ones like it": lambda g, x: g * torch.ones_like(x[:, :2]),
}


@pytest.mark.parametrize("name", ENLARGED)
def test_pooling_branches_are_enlarged_and_joined(name: str) -> None:
    assert_cut(Pyramid((1, 2, 3), ENLARGED[name]))


@pytest.mark.parametrize("name", FROM_ONE)
def test_one_cell_becomes_an_image_and_is_joined(name: str) -> None:
    assert_cut(Pyramid((1,), FROM_ONE[name]))


def test_an_enlarged_map_is_made_on_each_rank_for_its_own_tile_only() -> None:
    """Otherwise every rank would hold the whole image."""
    plain = Plain(Pyramid((1, 2), ENLARGED["bilinear"]), torch.randn(SHAPE))
    (laid, *_) = (rank.laid for rank in plain.cut((2, 2)))
    assert laid is not None
    made = [n for call in laid.calls for n in call.writes if "interpolate" in call.name]
    assert len(made) == 2 and all(name in laid.layouts for name in made)


class Coordinates(nn.Module):
    """CoordConv: every cell knows where it is."""

    def __init__(self, made: Callable[[Tensor], list[Tensor]]) -> None:
        super().__init__()
        self.made = made
        self.register_buffer("held", torch.randn(2, H, W))
        self.learned = nn.Parameter(torch.randn(1, H, W))
        self.small = nn.Parameter(torch.randn(1, 1, 3, 3))
        self.conv = nn.LazyConv2d(3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        held = self.held.expand(len(x), -1, -1, -1)
        learned = self.learned.unsqueeze(0).repeat(len(x), 1, 1, 1)
        small = F.interpolate(self.small, size=x.shape[2:], mode="bicubic").expand(len(x), 1, H, W)
        return self.conv(torch.cat([*self.made(x), x, held, learned, small], dim=1))


def meshed(x: Tensor) -> list[Tensor]:
    rows = torch.arange(x.shape[2], dtype=x.dtype) / x.shape[2]
    columns = torch.linspace(-1, 1, x.shape[3], dtype=x.dtype)
    grid = torch.stack(torch.meshgrid(rows, columns, indexing="ij"))
    return [grid.unsqueeze(0).expand(len(x), -1, -1, -1)]


def viewed(x: Tensor) -> list[Tensor]:
    n, _, h, w = x.shape
    rows = torch.arange(h, dtype=x.dtype).view(1, 1, h, 1).expand(n, 1, h, w)
    columns = torch.arange(w, dtype=x.dtype).view(1, 1, 1, w).repeat(n, 1, h, 1)
    return [rows / h, columns / w, (rows**2 + columns**2).sqrt()]


COORDINATES = {"meshgrid": meshed, "views": viewed, "a constant": lambda x: [EVERYWHERE[: len(x)]]}
EVERYWHERE = torch.randn(9, 1, H, W, dtype=torch.float64)


@pytest.mark.parametrize("name", COORDINATES)
def test_coordinates_beside_features(name: str) -> None:
    layer = Coordinates(COORDINATES[name]).double()
    layer(torch.zeros(SHAPE, dtype=torch.float64))  # gives the lazy layer its shape
    assert_cut(layer)


JOINED: dict[str, Callable[..., Tensor]] = {
    "stacked in front": lambda x, w: torch.stack((x, w.expand_as(x)))[1],
    "stacked behind": lambda x, w: torch.stack((w.expand(x.shape), x, x * w), -1).sum(-1),
    "stacked between": lambda x, w: torch.stack([x, w.expand(x.shape)], dim=3).amax(3),
    "along samples": lambda x, w: torch.cat((x, w.unsqueeze(0)), 0),
    "changed in place": lambda x, w: F.interpolate(w[None, :, :3].tile(2, 1, 1, 1), (H, W)).mul_(x),
    "single rows": lambda x, w: torch.cat((x[:, :, :1], w[None, :, :1].expand(2, C, 1, W)), 1),
}  # fmt: skip


@pytest.mark.parametrize("name", JOINED)
def test_cut_and_whole_side_by_side(name: str) -> None:
    assert_cut(Function(JOINED[name], w=(C, H, W)))


def test_a_whole_tail_as_large_as_the_image_stays_whole_where_it_must() -> None:
    """Enlarged to the image's size, but then flattened, which no cut image may be."""

    class Tail(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(C * H * W, 3)

        def forward(self, x: Tensor) -> Tensor:
            g = F.interpolate(F.adaptive_avg_pool2d(x, 2), size=(H, W), mode="bilinear")
            return self.mix(g.flatten(1)) + x.mean()

    assert_exact(Tail(), SHAPE, [((2, 2), None, 1), ((1, 3), [(1, 8)], 9)])


def test_a_whole_tensor_changed_behind_an_expanded_one_stays_whole() -> None:
    def changed(x: Tensor) -> Tensor:
        g = x.mean((2, 3), keepdim=True) * 1
        wide = g.expand(-1, -1, H, W)
        g.mul_(2)
        return torch.cat((x, wide), 1)

    assert_cut(changed)


# --- tensors made like others, and compared ------------------------------------------------------

MADE: dict[str, Callable[[Tensor], Any]] = {
    "zeros_like": lambda x: torch.where(x > 0, x, torch.zeros_like(x)),
    "ones_like": lambda x: x / (torch.ones_like(x[:, :1]) + x * x),
    "full_like": lambda x: torch.full_like(x, 0.3) * x,
    "full_like, of another type": lambda x: x + torch.full_like(x, 2, dtype=torch.int64),
    "empty_like, filled": lambda x: torch.empty_like(x).fill_(0.5) * x,
    "zeros_like, changed in place": lambda x: torch.zeros_like(x).add_(x).mul_(x),
    "new_zeros": lambda x: torch.cat((x.new_zeros(len(x), 1, *x.shape[2:]), x), 1),
    "new_ones": lambda x: x * x.new_ones(x.shape[3]),
    "new_full": lambda x: x + x.new_full((1, C, 1, 1), 0.5),
    "new_tensor": lambda x: x * x.new_tensor([[1.0], [2.0], [3.0], [4.0]])[..., None],
    "max of two": lambda x: torch.max(x, x * x - 1),
    "max of two, as a method": lambda x: x.max(x.mean((2, 3), keepdim=True)),
    "min of two, by name": lambda x: torch.min(input=x, other=-x),
    "maximum and minimum": lambda x: torch.maximum(x, -x) - torch.minimum(x, x * x),
    "fmax": lambda x: torch.fmax(x, x.amax((2, 3), keepdim=True) / 2),
    "where, with a number": lambda x: torch.where(x > 0.2, x, -1.0),
    "where, by a row": lambda x: torch.where(torch.arange(W) > 3, x, x * x),
    "clamp between tensors": lambda x: torch.clamp(x, min=-x.abs() / 2, max=x * x),
    "clamp to a whole tensor": lambda x: x.clamp(max=x.mean((2, 3), keepdim=True)),
    "channels expanded": lambda x: x * x.sum(1, keepdim=True).expand(-1, C, -1, -1),
    "samples and channels added": lambda x: x[0, 0].expand(3, 2, -1, -1),
    "channels repeated": lambda x: x.repeat(1, 2, 1, 1),
    "channels tiled": lambda x: x[:, 0].tile(2, 1, 1, 1).permute(1, 0, 2, 3),
    "gather": lambda x: x.gather(1, x.argmax(1, keepdim=True)),
    "scatter": lambda x: x * torch.zeros_like(x).scatter_(1, x.argmax(1, keepdim=True), 1.0),
    "logsumexp over channels": lambda x: x.logsumexp(1, keepdim=True),
    "any": lambda x: x * (x > 0.5).any(1, keepdim=True),
}


@pytest.mark.parametrize("name", MADE)
def test_tensors_made_like_cut_ones(name: str) -> None:
    assert_cut(MADE[name])


class Worded(nn.Module):
    """A vector for each class that a cell may have."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(C, 3, **options)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((self.words(x.argmax(1)).movedim(-1, 1), x), 1)


def test_a_table_is_looked_up_by_the_cell() -> None:
    assert_cut(Worded())


# --- rows and columns ----------------------------------------------------------------------------

STRIPS: dict[str, Callable[[Tensor], Any]] = {
    "mean along rows": lambda x: x - x.mean(-1, keepdim=True),
    "mean along columns": lambda x: x - x.mean(dim=2, keepdim=True),
    "sum, not kept": lambda x: x * x.sum(2).unsqueeze(2),
    "sum over channels as well": lambda x: x.sum((1, 3)),
    "sum over samples as well": lambda x: x.sum((0, 2), keepdim=True),
    "sum of flags": lambda x: x * (x > 0).sum(3, keepdim=True),
    "amax": lambda x: x - x.amax(dim=2, keepdim=True),
    "amin, not kept": lambda x: x.amin(-1),
    "amax of ties": lambda x: x.round().amax(3, keepdim=True) * x,
    "amax of what is masked": lambda x: x.masked_fill(x < 0.1, -torch.inf).amax(3).clamp(min=-9),
    "amax of all but nothing": lambda x: x.masked_fill(x < x.amax(), -torch.inf).amax((2, 3)).exp(),
    "max and where it is": lambda x: x.max(2),
    "min and where it is, kept": lambda x: torch.min(x, dim=3, keepdim=True),
    "max of equal numbers": lambda x: (x > 0).long().max(3),
    "largest class": lambda x: x * x.argmax(1).max(),
    "smallest byte": lambda x: x * x.argmax(1).to(torch.uint8).min(2, keepdim=True)[0].unsqueeze(1),
    "var": lambda x: x.var((2, 3)),
    "var along rows": lambda x: x / (x.var(3, keepdim=True) + 1),
    "var, biased": lambda x: torch.var(x, (0, 2, 3), unbiased=False),
    "var, by its correction": lambda x: x.var(dim=2, correction=2),
    "var of everything": lambda x: x.var(False) * x,
    "std": lambda x: (x - x.mean((2, 3), keepdim=True)) / x.std((2, 3), keepdim=True),
    "std of equal cells": lambda x: (x * 0).std((2, 3)) + x.mean((2, 3)),
    "std along columns, over channels": lambda x: x.std((1, 2)),
    "var_mean": lambda x: torch.var_mean(x, dim=(2, 3), keepdim=True),
    "std_mean over channels": lambda x: torch.std_mean(x, 1),
}


@pytest.mark.parametrize("name", STRIPS)
def test_rows_and_columns_are_reduced(name: str) -> None:
    assert_cut(STRIPS[name])


class StripPool(nn.Module):
    """Strip pooling (SPNet): rows and columns by themselves, mixed, and back over the image."""

    def __init__(self, channels: int = C) -> None:
        super().__init__()
        self.tall = nn.Conv2d(channels, channels, (3, 1), padding=(1, 0))
        self.wide = nn.Conv2d(channels, channels, (1, 3), padding=(0, 1))
        self.mix = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        tall = self.tall(x.mean(3, keepdim=True)).expand(-1, -1, *x.shape[2:])
        wide = F.interpolate(self.wide(x.mean(2, keepdim=True)), size=x.shape[2:], mode="bilinear")
        return x * self.mix((tall + wide).relu()).sigmoid()


class CoordinateAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows, self.columns = nn.AdaptiveAvgPool2d((None, 1)), nn.AdaptiveAvgPool2d((1, None))
        self.mix, self.norm = nn.Conv2d(C, 6, 1), nn.BatchNorm2d(6)
        self.high, self.wide = nn.Conv2d(6, C, 1), nn.Conv2d(6, C, 1)

    def forward(self, x: Tensor) -> Tensor:
        h, w = x.shape[2:]
        y = torch.cat((self.rows(x), self.columns(x).permute(0, 1, 3, 2)), 2)
        high, wide = self.norm(self.mix(y)).relu().split([h, w], 2)
        return x * self.high(high).sigmoid() * self.wide(wide.permute(0, 1, 3, 2)).sigmoid()


@pytest.mark.parametrize("kind", [StripPool, CoordinateAttention])
def test_attention_to_rows_and_columns(kind: Callable[[], nn.Module]) -> None:
    assert_cut(kind())


@pytest.mark.parametrize("dims", [(2,), (3, 4), (2, 4)])
def test_some_dims_of_a_volume_are_reduced(dims: tuple[int, ...]) -> None:
    layer = Function(lambda x: x * x.mean(dims, keepdim=True) + x.amax(dims, keepdim=True))
    assert_exact(layer, SHAPES[3])


# --- by name -------------------------------------------------------------------------------------


class ByName(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(input=x)


NAMED: dict[str, nn.Module] = {
    type(m).__name__: m
    for m in (
        nn.Conv2d(C, C, 3, padding=1), nn.ConvTranspose2d(C, C, 2, 2), nn.BatchNorm2d(C),
        nn.GroupNorm(2, C), nn.LayerNorm(SHAPE[1:]), nn.ReLU(inplace=True), nn.PReLU(C),
        nn.MaxPool2d(2), nn.AvgPool2d(3, 2, 1), nn.AdaptiveAvgPool2d(2), nn.Softmax(1),
        nn.Upsample(scale_factor=2), nn.ZeroPad2d(1), nn.PixelShuffle(2), nn.Identity(),
    )
}  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
def test_a_layer_called_with_named_arguments_only(name: str) -> None:
    assert_cut(ByName(NAMED[name]))


CALLED: dict[str, Callable[[Tensor], Any]] = {
    "cat": lambda x: torch.cat(tensors=(x, x), dim=1),
    "softmax": lambda x: torch.softmax(input=x, dim=1),
    "pad": lambda x: F.pad(input=x, pad=(1, 2)),
    "permute": lambda x: torch.permute(input=x, dims=(1, 0, 2, 3)),
    "reshape": lambda x: torch.reshape(input=x, shape=(2, 2, 2, H, W)),
    "chunk": lambda x: torch.chunk(input=x, chunks=2, dim=1)[1],
    "mean": lambda x: torch.mean(input=x, dim=(2, 3)),
    "where": lambda x: torch.where(condition=x > 0, input=x, other=-x),
}


@pytest.mark.parametrize("name", CALLED)
def test_a_function_called_with_named_arguments_only(name: str) -> None:
    assert_cut(CALLED[name])


# --- maps of losses ------------------------------------------------------------------------------


def focal(o: Tensor, t: Tensor) -> Tensor:
    loss = F.cross_entropy(o, t, reduction="none")
    return ((1 - torch.exp(-loss)) ** 2 * loss).mean()


class Focal(nn.Module):
    """By hand, with a weight of each class that is looked up by target."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("alpha", WEIGHT.clone())

    def forward(self, o: Tensor, t: Tensor) -> Tensor:
        counts = t != 255
        t = torch.where(counts, t, torch.zeros_like(t))
        log = o.log_softmax(1).gather(1, t.unsqueeze(1)).squeeze(1)
        loss = -self.alpha[t] * (1 - log.exp()) ** 2 * log
        return (loss * counts).sum() / counts.sum()


def focal_of_flags(o: Tensor, t: Tensor) -> Tensor:
    loss = F.binary_cross_entropy_with_logits(
        o, t, reduction="none", pos_weight=WEIGHT[:, None, None]
    )
    p = o.sigmoid() * t + (1 - o.sigmoid()) * (1 - t)
    return torch.where(t > 0.5, 0.25, 0.75).mul((1 - p) ** 2).mul(loss).sum((1, 2, 3)).mean()


def masked_l1(o: Tensor, t: dict[str, Tensor]) -> Tensor:
    loss = F.smooth_l1_loss(o, t["value"], reduction="none") * t["mask"]
    return loss.sum() / t["mask"].sum().clamp(min=1)


def weighed_by_a_mask(o: Tensor, t: dict[str, Tensor]) -> Tensor:
    weight = t["mask"].to(o.dtype).expand_as(o)
    return F.binary_cross_entropy_with_logits(o, t["value"], weight=weight)


def weighed_by_a_mask_of_one_channel(o: Tensor, t: dict[str, Tensor]) -> Tensor:
    weight = t["mask"].to(o.dtype)
    return F.binary_cross_entropy(o.sigmoid(), t["value"], weight, reduction="none").mean()


def dice_of_scattered(o: Tensor, t: Tensor) -> Tensor:
    flags = torch.zeros_like(o).scatter_(1, t.unsqueeze(1), 1.0)
    p = o.softmax(1)
    return 1 - (2 * (p * flags).sum((2, 3)) / (p + flags).sum((2, 3))).mean()


def rows_by_themselves(o: Tensor, t: Tensor) -> Tensor:
    return F.mse_loss(o, t, reduction="none").mean(3).amax(2).sum()


class Weighed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        weight = torch.rand(CLASSES, 13, 11, dtype=torch.float64)
        self.each = nn.BCEWithLogitsLoss(weight, reduction="none")

    def forward(self, o: Tensor, t: Tensor) -> Tensor:
        return self.each(o, target=t).mean()


MAPS: dict[str, tuple[Any, Any]] = {
    "focal": (focal, counted),
    "focal, by hand": (Focal().double(), classes),
    "focal, of flags": (focal_of_flags, numbers),
    "cross entropy, weights and pixels that do not count": (
        lambda o, t: F.cross_entropy(o, t, WEIGHT, ignore_index=255, reduction="none").mean(),
        classes,
    ),
    "CrossEntropyLoss by sample": (
        lambda o, t: nn.CrossEntropyLoss(WEIGHT, reduction="none")(o, t).mean((1, 2)).max(),
        counted,
    ),
    "cross entropy of chances": (
        lambda o, t: F.cross_entropy(o, t.softmax(1), reduction="none").square().mean(),
        numbers,
    ),
    "NLLLoss": (
        lambda o, t: nn.NLLLoss(reduction="none")(o.log_softmax(1), t).sum() / 99,
        counted,
    ),
    "BCEWithLogitsLoss with weights of cells": (Weighed(), numbers),
    "MSELoss, named": (
        lambda o, t: nn.MSELoss(reduction="none")(input=o, target=t).mean(),
        numbers,
    ),
    "L1Loss, half named": (lambda o, t: nn.L1Loss()(o, target=t), numbers),
    "KL": (lambda o, t: F.kl_div(o.log_softmax(1), t, reduction="none").sum(1).mean(), numbers),
    "masked L1": (masked_l1, masked),
    "weighed by a mask": (weighed_by_a_mask, masked),
    "weighed by a mask of one channel": (weighed_by_a_mask_of_one_channel, masked),
    "Dice of scattered flags": (dice_of_scattered, counted),
    "rows by themselves": (rows_by_themselves, numbers),
    "variance of errors": (lambda o, t: (o - t).var((2, 3)).mean() + (o - t).std(), numbers),
}  # fmt: skip


@pytest.mark.parametrize("name", MAPS)
def test_a_loss_of_a_map_of_losses(name: str) -> None:
    loss, target = MAPS[name]
    plan, model = CUT_ENDS["2x2"], segmenter()
    data = pixels((4, 3, 13, 11), target, 1)
    assert_equal(planned_with(loss, model, data, plan), plainly(model, data, plan.total, loss))


@pytest.mark.parametrize("name", ["focal", "focal, by hand", "masked L1"])
@pytest.mark.parametrize("tiles", [(1, 2), (3, 1), (1, 12)], ids=str)
def test_a_map_of_losses_over_other_grids(name: str, tiles: tuple[int, int]) -> None:
    loss, target = MAPS[name]
    plan, model = Plan(micro_batches=2, schedule="sequential", spatial=[tiles]), segmenter()
    data = pixels((4, 3, 13, 11), target, 1)
    assert_equal(planned_with(loss, model, data, plan), plainly(model, data, plan.total, loss))


@pytest.mark.parametrize("name", ["focal", "masked L1"])
def test_a_map_of_losses_of_slices_of_the_batch(name: str) -> None:
    loss, target = MAPS[name]
    plan = Plan(stages=2, balance=(5, 4), micro_batches=2, spatial=[(1, 2)], local_dp=2)
    model, data = segmenter(), pixels((5, 3, 13, 11), target)
    assert_equal(planned_with(loss, model, data, plan), plainly(model, data, plan.total, loss))


# --- what runs whole ------------------------------------------------------------------------------


def picked(o: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(o, t, reduction="none")[t != 2].mean()


class Picked(nn.Module):
    def forward(self, o: Tensor, t: Tensor) -> Tensor:
        return picked(o, t)


@pytest.mark.parametrize("loss", [picked, Picked()], ids=["function", "module"])
def test_a_loss_that_picks_cells_by_a_mask_runs_whole_on_every_rank(loss: Any) -> None:
    model, data = segmenter(), pixels((4, 3, 13, 11), counted, 1)
    found = planned_with(loss, model, data, CUT_ENDS["2x2"])
    assert_equal(found, plainly(model, data, 2, picked))


def test_the_offered_form_of_a_masked_mean_works() -> None:
    def offered(o: Tensor, t: Tensor) -> Tensor:
        loss, mask = F.cross_entropy(o, t, reduction="none"), t != 2
        return (loss * mask).sum() / mask.sum()

    model, data = segmenter(), pixels((4, 3, 13, 11), counted, 1)
    found = planned_with(offered, model, data, CUT_ENDS["2x2"])
    assert_equal(found, plainly(model, data, 2, picked))


def volume_shuffled(layer: nn.Module) -> Plain:
    return Plain(nn.Sequential(nn.Conv3d(2, 2, 1), layer), torch.randn(1, 2, 4, 4, 4))


@pytest.mark.parametrize("layer", [nn.PixelShuffle(2), nn.PixelUnshuffle(2)], ids=str)
def test_pixels_of_a_volume_cut_in_depth_are_shuffled_whole(layer: nn.Module) -> None:
    for grid in ((2, 1, 1), (2, 2, 1)):
        assert_whole(volume_shuffled(layer).cut(grid), r"1 .*takes dim 2 for channels, which is")
    volume_shuffled(layer).cut((1, 2, 2))


def assert_whole(ranks: list[Rank], why: str) -> None:
    laid = ranks[0].laid
    assert laid is not None and any(re.search(why, line) for line in laid.gathered())


WHOLE: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "rows joined": (lambda x: torch.cat((x, x.mean(2, True)), 2), "joins .* dim 2, which is"),
    "rows repeated": (lambda x: x.repeat(1, 1, 2, 1), "repeats the cells of dim 2, which is tiled"),
    "gathered along a row": (
        lambda x: x.gather(3, x.argmax(1, keepdim=True)),
        "picks cells along dim 3, which is tiled",
    ),
    "scattered from another size": (
        lambda x: x.scatter(1, x[:, :1].long() * 0, F.pad(x.detach(), (0, 0, 0, 1))),
        r"picks only some of the cells of \(2, 4, 8, 9\)",
    ),
    "the largest flag": (lambda x: x * (x > 0).amax(), "compares flags"),
    "noise": (lambda x: x + torch.rand_like(x), "rand_like"),
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_has_no_layer_rule_runs_whole_on_every_rank(name: str) -> None:
    function, why = WHOLE[name]
    model = nn.Sequential(nn.Conv2d(C, C, 3, padding=1), Function(function))
    plain = Plain(model, torch.randn(SHAPE), keyed=True)
    assert_whole(plain.cut((2, 2)), why)


def test_words_that_are_kept_short_are_looked_up_whole() -> None:
    plain = Plain(Worded(max_norm=1.0), torch.randn(SHAPE))
    assert_whole(plain.cut((2, 2)), r"words \(Embedding\) looks at which words")


def test_a_pooling_branch_trains_under_a_plan() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, C, 3, padding=1), Pyramid((1, 2), ENLARGED["bilinear"]), StripPool(C + 4),
        nn.Conv2d(C + 4, CLASSES, 3, padding=1),
    ).double()  # fmt: skip
    data = pixels((4, 3, 13, 11), counted)
    for plan in (
        Plan(micro_batches=2, schedule="sequential", spatial=[(2, 2)]),
        Plan(stages=2, balance=(2, 2), micro_batches=2, spatial=[(1, 3), (2, 1)]),
        Plan(stages=2, balance=(2, 2), micro_batches=2, spatial=[(2, 2)]),
    ):
        found = planned_with(focal, model, data, plan)
        assert_equal(found, plainly(model, data, plan.total, focal))
