"""Images cut under a plan: every schedule, every junction between stages, losses of a cut output,
prediction, arrays that are read box by box, and what it costs in bytes and messages."""

from __future__ import annotations

import copy
from collections.abc import Callable
from math import prod
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from gems import models
from gems.geometry.box import Box, moves
from gems.plans.plan import Plan
from gems.torch.runtime.partitioned_model import PartitionedModel
from gems.torch.spatial.partition import StageLayout, traffic
from gems.torch.trainer import Trainer
from gems.transport.threads import Local, run
from tests.exact import (
    Outcome,
    Recordings,
    alone,
    assert_equal,
    batches,
    close,
    drawing,
    join,
    plainly,
    planned,
    same_state,
    sgd,
    trained,
)
from tests.spatial import Plain

Tensor = torch.Tensor
CLASSES = 5


def classifier() -> nn.Module:
    """Thirteen layers: 21 x 19 to 6 x 5 pixels, then one label."""
    with drawing(0):
        return nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1, stride=2, bias=False), nn.BatchNorm2d(6), nn.ReLU(True),
            nn.Conv2d(6, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
            nn.MaxPool2d(3, 2, 1), nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.GroupNorm(2, 8),
            nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES),
        ).double()  # fmt: skip


def all_but(*names: str) -> tuple[str, ...]:
    """The names of the other layers of the classifier."""
    return tuple(name for name in map(str, range(13)) if name not in names)


def segmenter() -> nn.Module:
    """Eight layers: a class for each pixel of 13 x 11."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(True), nn.MaxPool2d(2),
        nn.Conv2d(6, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(),
        nn.Upsample(size=(13, 11), mode="bilinear"), nn.Conv2d(8, CLASSES, 3, padding=1),
    ).double()  # fmt: skip


def on_ranks(plan: Plan, work: Callable[[Local], Any]) -> list[Any]:
    """What each rank gave; they share their recordings, which take longest."""
    with mock.patch("gems.torch.tracing.trace.record", Recordings()):
        return run(plan.world, work)


def labelled(samples: int = 8, steps: int = 2) -> list[Any]:
    return batches((samples, 3, 21, 19), CLASSES, steps, torch.float64)


# --- schedules and junctions ---------------------------------------------------------------------

STAGES: dict[str, Any] = {"stages": 3, "balance": (4, 5, 4), "micro_batches": 4}
TWO: dict[str, Any] = {"stages": 2, "balance": (6, 7), "micro_batches": 4}
PLANS: dict[str, Plan] = {
    "sequential, one stage, 2x2": Plan(micro_batches=2, schedule="sequential", spatial=(2, 2)),
    "sequential, horizontal strips": Plan(**TWO, schedule="sequential", spatial="horizontal:3"),
    "gpipe, vertical strips": Plan(**TWO, schedule="gpipe", spatial="vertical:3"),
    "1f1b, 4 tiles to 2 to whole": Plan(**STAGES, schedule="1f1b", spatial=[(2, 2), (1, 2)]),
    "1f1b, 2 tiles to 4 to whole": Plan(**STAGES, schedule="1f1b", spatial=[(2, 1), (2, 2)]),
    "gpipe, strips to strips across": Plan(**STAGES, schedule="gpipe", spatial=[(3, 1), (1, 3)]),
    "1f1b, tiles to tiles": Plan(**STAGES, schedule="1f1b", spatial=[(2, 2), (2, 2)]),
    "1f1b, 1 tile to 2": Plan(**STAGES, schedule="1f1b", spatial=[(1, 1), (1, 2)]),
    "zero-bubble": Plan(**STAGES, schedule="zero-bubble", spatial=[(2, 1), (1, 2)]),
    "auto": Plan(**STAGES, schedule="auto", spatial=[(2, 2)]),
    "auto, one stash": Plan(**STAGES, schedule="auto", spatial=[(2, 1)], max_in_flight=1),
    "auto, both ways": Plan(**STAGES, schedule="auto", bidirectional=True, spatial=[(2, 1)]),
    "sequential, both ways": Plan(
        **TWO, schedule="sequential", bidirectional=True, spatial=[(1, 2)]
    ),
    "gems": Plan(**TWO, schedule="gems", spatial=[(2, 1)]),
    "gems, 3 stages": Plan(**STAGES, schedule="gems", spatial=[(2, 2), (1, 2)]),
    "gems-zb, 3 stages": Plan(**STAGES, schedule="gems-zb", spatial=[(2, 1), (2, 1)]),
    "gems, one stage": Plan(replications=2, schedule="gems", spatial=[(2, 2)]),
    "gems, 5 stages": Plan(
        stages=5, balance=(2, 2, 3, 3, 3), replications=1, schedule="gems", spatial=[(1, 2), (2, 1)]
    ),
    "tiles to slices": Plan(**TWO, schedule="1f1b", spatial=[(2, 2)], local_dp=2),
    "tiles to 4 slices": Plan(**TWO, schedule="gpipe", spatial=[(2, 2)], local_dp=4),
    "tiles to tiles to slices": Plan(
        **(STAGES | {"micro_batches": 2}), spatial=[(2, 2), (1, 2)], local_dp=2
    ),
    "slices alone": Plan(**(TWO | {"micro_batches": 2}), local_dp=2),
    "slices both ways": Plan(**TWO, schedule="gems", spatial=[(1, 2)], local_dp=2),
    "zero-bubble, slices": Plan(**TWO, schedule="zero-bubble", spatial=[(1, 2)], local_dp=2),
    "data 2": Plan(**(TWO | {"micro_batches": 2}), data=2, spatial=[(1, 2)]),
    "data 2, slices": Plan(**(TWO | {"micro_batches": 1}), data=2, spatial=[(1, 2)], local_dp=2),
    "d2": Plan(**TWO, schedule="1f1b", spatial=[(2, 2)], halo="d2"),
    "d2, all fused": Plan(**TWO, schedule="1f1b", spatial=[(2, 2)], halo="d2", fused_layers=9),
    "d2, two stages": Plan(
        **STAGES, schedule="gems", spatial=[(2, 2), (1, 2)], halo="d2", fused_layers=2
    ),
    "two stages on the same ranks": Plan(
        **STAGES, schedule="gpipe", spatial=[(1, 2), (2, 1)], placement=((0, 1), (1, 0), 2)
    ),
    "all stages on the same ranks": Plan(
        **STAGES, schedule="auto", spatial=[(2, 2), (1, 2)], placement=((3, 1, 0, 2), (2, 3), 0)
    ),
    "whole stages among the tiles": Plan(
        **TWO, schedule="sequential", spatial=[(2, 2)], placement=((0, 1, 2, 3), 1)
    ),
    "more tiles than rows": Plan(
        stages=3, balance=(7, 3, 3), micro_batches=2, schedule="1f1b", spatial=[(2, 1), (7, 1)]
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_cut_image_trains_like_a_whole_one(name: str) -> None:
    plan, model, data = PLANS[name], classifier(), labelled(8, 1)
    assert_equal(planned(model, data, plan), plainly(model, data, plan.total))


@pytest.mark.parametrize("schedule", ["gems", "gems-zb"])
def test_space_pipeline_both_directions_and_data_on_eight_ranks(schedule: str) -> None:
    plan = Plan(
        stages=3, balance=(4, 5, 4), schedule=schedule, replications=2, data=2, spatial=[(1, 2)]
    )
    assert plan.world == 8
    model, data = classifier(), labelled(16)
    assert_equal(planned(model, data, plan), plainly(model, data, plan.total))


def test_all_five_dimensions_at_once() -> None:
    """Tiles, stages, both directions, slices of the batch and copies of all of it."""
    plan = Plan(
        **(TWO | {"micro_batches": 2}), schedule="gems", spatial=[(1, 2)], local_dp=2, data=2
    )
    assert plan.world == 8
    model, data = classifier(), labelled(12)
    assert_equal(planned(model, data, plan), plainly(model, data, plan.total))


UNEVEN = ["1f1b, 4 tiles to 2 to whole", "gems, 3 stages", "data 2", "d2", "tiles to slices"]


@pytest.mark.parametrize("samples", [7, 5])
@pytest.mark.parametrize("name", UNEVEN)
def test_batches_that_do_not_divide(name: str, samples: int) -> None:
    plan, model = PLANS[name], classifier()
    data = [labelled(samples, 1)[0], labelled(8, 1)[0]]
    assert_equal(planned(model, data, plan), plainly(model, data, plan.total))


@pytest.mark.parametrize("name", ["1f1b, 4 tiles to 2 to whole", "gems, 3 stages", "data 2"])
def test_micro_batches_without_samples(name: str) -> None:
    plan, model = PLANS[name], classifier()
    data = [labelled(3, 1)[0], labelled(2, 1)[0]]
    assert_equal(planned(model, data, plan), plainly(model, data, plan.total))


def test_slices_without_samples() -> None:
    """Four slices of micro-batches of two."""
    plan, model = PLANS["tiles to 4 slices"], classifier()
    data = labelled(7)
    assert_equal(planned(model, data, plan), plainly(model, data, plan.total))


def test_another_size_each_step() -> None:
    """Cut points, halos and messages follow the images."""
    model = classifier()
    data = [*labelled(8, 1), *batches((8, 3, 26, 17), CLASSES, 1, torch.float64), *labelled(4, 1)]
    for name in ("1f1b, 4 tiles to 2 to whole", "gems, 3 stages"):
        assert_equal(planned(model, data, PLANS[name]), plainly(model, data, PLANS[name].total))


STRIDED: dict[str, Callable[[Tensor], Tensor]] = {
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(2, 3),
    "expanded": lambda x: x[:, :1].expand(-1, 3, -1, -1),
    "every other row": lambda x: x[:, :, ::2],
}


@pytest.mark.parametrize("name", STRIDED)
def test_images_of_any_strides(name: str) -> None:
    model, plan = classifier(), PLANS["1f1b, 4 tiles to 2 to whole"]
    data = [(STRIDED[name](x), y) for x, y in labelled(8, 1)]
    assert_equal(planned(model, data, plan), plainly(model, data, plan.total))


# --- junctions of every kind ---------------------------------------------------------------------


def pooled_early() -> nn.Module:
    """Whole already inside a spatial stage, which hands on what all of its ranks have."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(3),
        nn.Conv2d(6, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, CLASSES),
    ).double()  # fmt: skip


POOLED = {
    "to one rank": Plan(stages=2, balance=(4, 4), micro_batches=2, spatial=[(2, 2)]),
    "to tiles": Plan(stages=3, balance=(4, 2, 2), micro_batches=2, spatial=[(2, 2), (1, 2)]),
    "to slices": Plan(stages=2, balance=(4, 4), micro_batches=2, spatial=[(2, 1)], local_dp=2),
    "one stage": Plan(micro_batches=2, schedule="sequential", spatial=[(2, 2)]),
    "both ways": Plan(stages=2, balance=(5, 3), replications=2, schedule="gems", spatial=[(1, 2)]),
}


@pytest.mark.parametrize("name", POOLED)
def test_a_value_that_every_tile_has_whole_crosses_once(name: str) -> None:
    plan, model, data = POOLED[name], pooled_early(), labelled(8, 1)
    assert_equal(planned(model, data, plan), plainly(model, data, plan.total))


def u_net() -> nn.Module:
    torch.manual_seed(0)
    return models.build("unet", width=4, levels=3, num_classes=CLASSES).double()


BY_LEVEL = [
    ["encoder.0"],
    ["pool", "encoder.1"],
    ["pool:2", "encoder.2"],
    ["up.0", "decoder.0"],
    ["up.1", "decoder.1", "head"],
]
SKIPPING: dict[str, Plan] = {
    "tiles down, whole up": Plan(
        stages=BY_LEVEL, micro_batches=2, schedule="gpipe", spatial=[(2, 2), (1, 2)]
    ),
    "tiles all the way": Plan(
        stages=BY_LEVEL, micro_batches=2, schedule="1f1b", spatial=[(1, 2)] * 5
    ),
    "levels keep their ranks": Plan(
        stages=BY_LEVEL, micro_batches=2, schedule="auto",
        spatial=[(2, 2), (1, 2), (1, 1), (1, 2), (2, 2)],
        placement=((0, 1, 2, 3), (4, 5), 6, (4, 5), (0, 1, 2, 3)),
    ),
    "both ways": Plan(
        stages=BY_LEVEL, replications=1, schedule="gems", spatial=[(1, 2), (1, 2)]
    ),
    "up by slices": Plan(
        stages=BY_LEVEL, micro_batches=1, schedule="gpipe", spatial=[(2, 1)], local_dp=2,
        placement=((0, 1), (2, 3), (2, 3), (2, 3), (0, 1)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SKIPPING)
def test_skips_go_from_tiles_to_any_later_stage(name: str) -> None:
    plan, model = SKIPPING[name], u_net()
    data = pixels(
        (4, 3, 18, 14), lambda draw, n: torch.randint(CLASSES, (n, 18, 14), generator=draw)
    )
    assert_equal(planned(model, data, plan), plainly(model, data, plan.total))


class Pointers(nn.Module):
    """Positions of maxima cross between stages, and a value that wants no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x, where = F.max_pool2d(self.a(x), 2, return_indices=True)
        y = F.max_unpool2d(self.b(x).relu(), where, 2, output_size=(21, 19))
        return self.head((y * (1 + y.detach())).mean((2, 3)))


POOL = "max_pool2d_with_indices"
BACK = ("max_unpool2d", "detach", "add", "mul", "mean", "head")
POINTERS: dict[str, tuple[Any, list[tuple[int, int]]]] = {
    "there and back in one stage": ([["a"], [POOL, "b", "relu", *BACK]], [(1, 2), (2, 2)]),
    "there by tiles, back whole": ([["a", POOL], ["b", "relu", *BACK]], [(1, 2)]),
    "there by tiles, back by others": ([["a", POOL], ["b", "relu", *BACK]], [(1, 2), (2, 2)]),
}


@pytest.mark.parametrize("name", POINTERS)
def test_integers_cross_between_stages(name: str) -> None:
    torch.manual_seed(0)
    stages, spatial = POINTERS[name]
    model, plan = Pointers().double(), Plan(stages=stages, micro_batches=2, spatial=spatial)
    assert_equal(planned(model, labelled(), plan), plainly(model, labelled(), 2))


class Crossed(nn.Module):
    """A number, a whole value and tiles cross from stage to stage, and every stage reads images."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.c, self.head = nn.Conv2d(3, 4, 3, padding=1, stride=2), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a = self.a(x)
        scale, means = a.abs().mean(), a.mean((2, 3))
        b = self.b(a.relu()) * scale + x.mean(1, keepdim=True)
        c = F.interpolate(self.c(y), size=x.shape[2:], mode="bilinear")
        return self.head((b + c * a).mean((2, 3)) + means * scale)


@pytest.mark.parametrize("spatial", [[(1, 2)], [(2, 1), (2, 1)], [(2, 2), (1, 2), (2, 1)]])
def test_numbers_whole_values_and_images_in_every_stage(spatial: Any) -> None:
    torch.manual_seed(0)
    model, plan = Crossed().double(), Plan(stages=3, micro_batches=2, spatial=spatial)
    draw = torch.Generator().manual_seed(2)
    data = [
        ((x, torch.randn((4, 3, 33, 29), generator=draw, dtype=torch.float64)), y)
        for x, y in labelled(4)
    ]
    assert_equal(planned(model, data, plan), plainly(model, data, plan.total))


class Told(nn.Module):
    """An image and numbers beside it; several outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3, stride=2), nn.Conv2d(4, 4, 3)
        self.mix, self.head = nn.Linear(2, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor, told: Tensor) -> dict[str, Tensor]:
        y = self.a(x) * self.mix(told)[:, :, None, None]
        z = self.b(y.relu())
        return {"label": self.head(z.mean((2, 3))), "mean": y.mean((1, 2, 3)), "map": z}


def told_loss(output: dict[str, Tensor], target: Tensor) -> Tensor:
    loss = F.cross_entropy(output["label"], target) + output["mean"].pow(2).mean()
    return loss + 0.1 * output["map"].square().mean()


TOLD = {
    "one stage": Plan(micro_batches=2, schedule="sequential", spatial=[(2, 2)]),
    "two stages": Plan(stages=2, micro_batches=2, spatial=[(2, 2)]),
    "two cut stages": Plan(stages=2, micro_batches=2, spatial=[(1, 2), (2, 1)]),
    "both directions": Plan(stages=2, replications=1, schedule="gems", spatial=[(1, 2)]),
}


@pytest.mark.parametrize("name", TOLD)
def test_several_inputs_and_outputs(name: str) -> None:
    plan = TOLD[name]
    torch.manual_seed(0)
    model = Told().double()
    draw = torch.Generator().manual_seed(2)
    data = [
        ((x, torch.randn(len(x), 2, generator=draw, dtype=torch.float64)), y)
        for x, y in labelled(4)
    ]
    found = planned(model, data, plan, told_loss)
    assert_equal(found, plainly(model, data, plan.total, told_loss))


# --- options of training -------------------------------------------------------------------------


class Recomputed(nn.Module):
    """A block that runs again in backward, norms, exchanges and all."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.block = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.block, self.stem(x), use_reentrant=False)
        return self.head(x.mean((2, 3)))


class Tied(nn.Module):
    """One convolution in two stages, a frozen one, and one that no gradient reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.twice = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)
        self.frozen = nn.Conv2d(6, 6, 3, padding=1).requires_grad_(False)
        self.lost, self.head = nn.Conv2d(6, 6, 1), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(self.stem(x)).relu()
        x = self.frozen(x)
        x = x + self.twice(x) + self.lost(x).argmax(1, keepdim=True)
        return self.head(x.mean((2, 3)))


WAYS = {
    "2x2 and one": Plan(stages=2, micro_batches=2, spatial=[(2, 2)]),
    "two cuts": Plan(stages=2, micro_batches=2, spatial=[(2, 1), (1, 2)]),
    "both ways": Plan(stages=2, replications=1, schedule="gems", spatial=[(1, 2)]),
    "d2": Plan(stages=2, micro_batches=2, spatial=[(2, 1)], halo="d2", fused_layers=3),
    "slices": Plan(stages=2, micro_batches=2, spatial=[(2, 1)], local_dp=2),
}


@pytest.mark.parametrize("way", WAYS)
def test_tied_and_frozen_layers(way: str) -> None:
    torch.manual_seed(0)
    model, data = Tied().double(), labelled(4)
    assert_equal(planned(model, data, WAYS[way]), plainly(model, data, WAYS[way].total))


@pytest.mark.parametrize("way", WAYS)
def test_a_recomputed_block_takes_its_statistics_once(way: str) -> None:
    """Plainly, a norm in a checkpoint would count every sample twice; on one rank it does not."""
    torch.manual_seed(0)
    model, data = Recomputed().double(), labelled(4)
    assert_equal(planned(model, data, WAYS[way]), alone(model, data, WAYS[way].total))


def test_clipping_counts_every_weight_once() -> None:
    plan, model, data = PLANS["1f1b, 4 tiles to 2 to whole"], classifier(), labelled()
    found = planned(model, data, plan, F.cross_entropy, sgd, clip=0.05)
    expected = plainly(model, data, plan.total, F.cross_entropy, sgd, 0.05)
    same_state(found.state, expected.state, 1e-8)  # torch adds 1e-6 to the norm


def test_an_update_over_several_steps() -> None:
    plan, model, data = PLANS["gems"], classifier(), labelled(8, 4)
    joined = [
        (torch.cat((a, c)), torch.cat((b, d)))
        for (a, b), (c, d) in zip(data[::2], data[1::2], strict=True)
    ]
    found = planned(model, data, plan, accumulate=2)
    same_state(found.state, plainly(model, joined, 2 * plan.total).state)


def test_dropout_is_that_of_one_rank_wherever_it_is_cut() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.Dropout(0.3), nn.ReLU(), nn.Conv2d(6, 6, 3, stride=2),
        nn.Dropout2d(0.3), nn.BatchNorm2d(6), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Dropout(0.2), nn.Linear(6, CLASSES),
    ).double()  # fmt: skip
    for plan in (
        Plan(stages=3, balance=(4, 2, 4), micro_batches=4, spatial=[(2, 2), (1, 2)]),
        Plan(stages=2, balance=(5, 5), replications=2, schedule="gems", spatial=[(2, 1)]),
        Plan(stages=2, balance=(4, 6), micro_batches=4, spatial=[(2, 1)], local_dp=2),
        Plan(stages=2, balance=(6, 4), micro_batches=4, spatial=[(2, 1)], halo="d2"),
    ):
        assert_equal(planned(model, labelled(), plan), alone(model, labelled(), 4))


def test_state_is_the_plain_models_and_goes_back_into_it() -> None:
    """Keys and tensors of the plain model; what one plan saved, another goes on with."""
    model, data = classifier(), labelled()
    first = planned(model, data[:1], PLANS["1f1b, 4 tiles to 2 to whole"])
    plain = classifier()
    plain.load_state_dict(first.state)
    same_state(first.state, plainly(model, data[:1], 4).state)

    def resumed(transport: Local) -> Any:
        plan = PLANS["d2"]
        mine = Trainer(
            classifier(), F.cross_entropy, sgd, data[0][0][:2], plan, transport=transport
        )
        mine.load_state_dict(first.state)
        mine.step(*data[1])
        return mine.state_dict()

    for state in on_ranks(PLANS["d2"], resumed):
        same_state(state, plainly(plain, data[1:], 4).state)


def test_a_model_on_the_meta_device_starts_the_same_on_every_tile() -> None:
    def started(transport: Local) -> Any:
        with torch.device("meta"):
            model = classifier()
        plan = PLANS["1f1b, 4 tiles to 2 to whole"]
        mine = Trainer(model, F.cross_entropy, sgd, labelled()[0][0][:2], plan, transport=transport)
        return {n: p.detach().clone() for n, p in mine.model.named_parameters() if not p.is_meta}

    found = run(7, started)
    for tile in found[1:4]:
        assert tile.keys() == found[0].keys()
        for name, p in tile.items():
            assert torch.equal(p, found[0][name]), name


# --- losses of a cut output ----------------------------------------------------------------------


def pixels(shape: tuple[int, ...], target: Callable[..., Any], steps: int = 2) -> list[Any]:
    draw = torch.Generator().manual_seed(3)
    return [
        (torch.randn(shape, generator=draw, dtype=torch.float64), target(draw, shape[0]))
        for _ in range(steps)
    ]


def classes(draw: torch.Generator, n: int) -> Tensor:
    """Some pixels do not count; unevenly, so that means of ranks' means would be off."""
    found = torch.randint(CLASSES, (n, 13, 11), generator=draw)
    found[:, :4][torch.rand((n, 4, 11), generator=draw) < 0.7] = 255
    return found


def counted(draw: torch.Generator, n: int) -> Tensor:
    return torch.randint(CLASSES, (n, 13, 11), generator=draw)


def numbers(draw: torch.Generator, n: int) -> Tensor:
    return torch.rand((n, CLASSES, 13, 11), generator=draw, dtype=torch.float64)


def chances(draw: torch.Generator, n: int) -> Tensor:
    return numbers(draw, n).softmax(1)


def masked(draw: torch.Generator, n: int) -> dict[str, Tensor]:
    return {"value": numbers(draw, n), "mask": numbers(draw, n)[:, :1] > 0.4}


WEIGHT = torch.tensor([1.0, 2.0, 0.5, 3.0, 1.0], dtype=torch.float64)
HEAVY = WEIGHT.view(CLASSES, 1, 1)
BY_PIXEL = torch.linspace(0, 1, 13 * 11, dtype=torch.float64).view(13, 11)


class Dice(nn.Module):
    """A ratio of sums over all pixels, with a weight of its own as a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", WEIGHT.clone())

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        p = output.softmax(1)
        hit, all_ = (p * target).sum((0, 2, 3)), (p + target).sum((0, 2, 3))
        return 1 - ((2 * hit + 1) / (all_ + 1) * self.weight).mean()


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.near, self.right = nn.MSELoss(), nn.CrossEntropyLoss(label_smoothing=0.1)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return self.right(output, target) + 0.5 * self.near(output.softmax(1), target)


def masked_mean(output: Tensor, target: dict[str, Tensor]) -> Tensor:
    off = (output - target["value"]).square() * target["mask"]
    return off.sum() / target["mask"].sum()


LOSSES: dict[str, tuple[Any, Any]] = {
    "cross entropy": (F.cross_entropy, counted),
    "cross entropy, weights and pixels that do not count": (
        lambda o, t: F.cross_entropy(o, t, weight=WEIGHT, ignore_index=255),
        classes,
    ),
    "cross entropy, smoothed": (
        lambda o, t: F.cross_entropy(o, t, WEIGHT, ignore_index=255, label_smoothing=0.2),
        classes,
    ),
    "CrossEntropyLoss": (nn.CrossEntropyLoss(weight=WEIGHT, ignore_index=255), classes),
    "cross entropy of chances": (
        lambda o, t: F.cross_entropy(o, t, weight=WEIGHT, label_smoothing=0.1),
        chances,
    ),
    "nll": (
        lambda o, t: F.nll_loss(F.log_softmax(o, 1), t, weight=WEIGHT, ignore_index=255),
        classes,
    ),
    "BCE with logits": (
        lambda o, t: F.binary_cross_entropy_with_logits(o, t, pos_weight=HEAVY),
        numbers,
    ),
    "BCEWithLogitsLoss": (nn.BCEWithLogitsLoss(pos_weight=HEAVY), numbers),
    "BCE with logits, weighed by the pixel": (
        lambda o, t: F.binary_cross_entropy_with_logits(o, t, weight=BY_PIXEL),
        numbers,
    ),
    "BCE": (lambda o, t: F.binary_cross_entropy(o.sigmoid(), t), numbers),
    "MSE": (F.mse_loss, numbers),
    "MSELoss": (nn.MSELoss(), numbers),
    "L1Loss": (nn.L1Loss(), numbers),
    "smooth L1": (lambda o, t: F.smooth_l1_loss(o, t, beta=0.3), numbers),
    "HuberLoss": (nn.HuberLoss(delta=0.3), numbers),
    "KL": (lambda o, t: F.kl_div(o.log_softmax(1), t, reduction="batchmean"), chances),
    "sum": (lambda o, t: F.mse_loss(o, t, reduction="sum") / 1000, numbers),
    "by hand": (lambda o, t: ((o - t) ** 2).mean(), numbers),
    "by hand, per channel": (lambda o, t: ((o - t) ** 2).mean((0, 2, 3)).max(), numbers),
    "masked": (masked_mean, masked),
    "by position": (lambda o, t: F.huber_loss(o, t, "mean", 0.3), numbers),
    "by name": (lambda o, t: F.cross_entropy(input=o, target=t, reduction="mean"), counted),
    "of some channels": (lambda o, t: F.mse_loss(o[:, 1:3], t[:, 1:3]), numbers),
    "worst pixel": (lambda o, t: (o - t).abs().amax((1, 2, 3)).mean(), numbers),
    "Dice": (Dice().double(), chances),
    "both": (Both(), chances),
    "without a target": (lambda o, _: (o.softmax(1) * o.log_softmax(1)).sum(1).mean(), numbers),
}
CUT_ENDS = {
    "2x2": Plan(micro_batches=2, schedule="sequential", spatial=[(2, 2)]),
    "two stages, d2": Plan(
        stages=2, balance=(5, 4), micro_batches=2, spatial=[(1, 3), (2, 1)], halo="d2",
        fused_layers=2,
    ),
}  # fmt: skip


def planned_with(loss: Any, model: nn.Module, data: list[Any], plan: Plan) -> Outcome:
    """Every rank has a loss of its own, which may be a module."""

    def work(transport: Local) -> Outcome:
        return trained(transport, copy.deepcopy(model), data, plan, copy.deepcopy(loss))

    return join(on_ranks(plan, work))


FEW = ("cross entropy, smoothed", "BCEWithLogitsLoss", "Dice", "masked")
ENDS = [(name, "2x2") for name in LOSSES] + [(name, "two stages, d2") for name in FEW]


@pytest.mark.parametrize(("name", "cut"), ENDS)
def test_the_loss_of_a_cut_output(name: str, cut: str) -> None:
    loss, target = LOSSES[name]
    plan, model = CUT_ENDS[cut], segmenter()
    data = pixels((4, 3, 13, 11), target, 1)
    assert_equal(planned_with(loss, model, data, plan), plainly(model, data, plan.total, loss))


@pytest.mark.parametrize("schedule", ["gems", "gems-zb", "zero-bubble"])
def test_the_loss_of_a_cut_output_under_other_schedules(schedule: str) -> None:
    loss, target = LOSSES["cross entropy, weights and pixels that do not count"]
    plan = Plan(
        stages=2, balance=(5, 4), micro_batches=4, schedule=schedule, spatial=[(2, 1), (1, 2)]
    )
    model, data = segmenter(), pixels((6, 3, 13, 11), target)
    assert_equal(planned_with(loss, model, data, plan), plainly(model, data, plan.total, loss))


@pytest.mark.parametrize("name", ["cross entropy, smoothed", "MSELoss", "Dice", "masked"])
def test_the_loss_of_slices_of_the_batch(name: str) -> None:
    loss, target = LOSSES[name]
    plan = Plan(stages=2, balance=(5, 4), micro_batches=2, spatial=[(1, 2)], local_dp=2)
    model, data = segmenter(), pixels((5, 3, 13, 11), target)
    assert_equal(planned_with(loss, model, data, plan), plainly(model, data, plan.total, loss))


def test_a_loss_without_a_layer_rule_runs_whole_on_every_rank() -> None:
    def sorted_loss(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).flatten(2).sort(2)[0][..., :3].mean()

    model, data, plan = segmenter(), pixels((4, 3, 13, 11), numbers), CUT_ENDS["2x2"]
    found = planned_with(sorted_loss, model, data, plan)
    assert_equal(found, plainly(model, data, plan.total, sorted_loss))


# --- prediction ----------------------------------------------------------------------------------

PREDICTING = [
    "sequential, one stage, 2x2", "1f1b, 4 tiles to 2 to whole", "gems, 3 stages",
    "tiles to slices", "data 2", "d2, all fused", "all stages on the same ranks",
]  # fmt: skip


def predicted(model: nn.Module, plan: Plan, images: Any, data: list[Any] = ()) -> list[Any]:
    """What every rank says, after some training, and the state by then."""

    def work(transport: Local) -> Any:
        mine = Trainer(
            copy.deepcopy(model), F.cross_entropy, sgd, data[0][0][:1], plan, transport=transport
        )
        mine.step(*data[0])
        return mine.predict(images), mine.state_dict()

    return on_ranks(plan, work)


@pytest.mark.parametrize("name", PREDICTING)
def test_prediction_is_that_of_the_model_in_evaluation_mode(name: str) -> None:
    model, data = classifier(), labelled()
    images = data[1][0][:7]
    for output, state in predicted(model, PLANS[name], images, data):
        model.load_state_dict(state)
        with torch.no_grad():
            close(name, output, copy.deepcopy(model).eval()(images))


@pytest.mark.parametrize("cut", CUT_ENDS)
def test_prediction_of_an_output_that_is_cut(cut: str) -> None:
    model, data = segmenter(), pixels((4, 3, 13, 11), counted)
    images = data[1][0][:3]
    for output, state in predicted(model, CUT_ENDS[cut], images, data):
        model.load_state_dict(state)
        with torch.no_grad():
            close(cut, output, copy.deepcopy(model).eval()(images))


# --- arrays that are read box by box -------------------------------------------------------------


class Slide:
    """Images on disk, so to speak: shape, type, slices, and a note of every box that was read."""

    def __init__(self, pixels: Any) -> None:
        self.pixels, self.shape, self.dtype = pixels, pixels.shape, pixels.dtype
        self.boxes: list[Box] = []

    def __getitem__(self, index: Any) -> Any:
        spans = [s.indices(n)[:2] for s, n in zip(index, self.shape, strict=True)]
        self.boxes.append(Box(tuple(a for a, _ in spans), tuple(b for _, b in spans)))
        return self.pixels[index]


def on_slides(plan: Plan, model: nn.Module, data: list[Any]) -> list[Any]:
    """Train on arrays: for every rank its losses, gradients and state, the boxes it read of images
    and of targets, and the trainer."""

    def work(transport: Local) -> Any:
        mine = Trainer(
            copy.deepcopy(model), F.cross_entropy, sgd, data[0][0][:1], plan, transport=transport
        )
        slides, labels, losses = [], [], []
        for x, y in data:
            slides.append(Slide(x.numpy()))
            labels.append(Slide(y.numpy()))
            losses.append(mine.step(slides[-1], labels[-1] if y.dim() > 1 else y).loss)
        boxes = [slide.boxes for slide in slides], [slide.boxes for slide in labels]
        return losses, mine.state_dict(), boxes, mine

    return on_ranks(plan, work)


def only_cut(mine: Trainer) -> PartitionedModel:
    return next(iter(mine.session.runner.programs.recordings.values()))


@pytest.mark.parametrize("halo", ["d1", "d2"])
def test_a_rank_reads_its_own_box_and_its_halo_and_nothing_else(halo: str) -> None:
    plan = Plan(
        stages=2, balance=(3, 6), micro_batches=2, spatial=[(2, 2)], halo=halo,
        fused_layers=9 if halo == "d2" else 0,
    )  # fmt: skip
    model, data = segmenter(), pixels((4, 3, 13, 11), counted)
    ranks = on_slides(plan, model, data)
    plain = plainly(model, data, plan.total)
    reach = 1  # of the one convolution in the first stage
    for rank, (losses, state, (slides, _), _) in enumerate(ranks):
        assert losses == pytest.approx(plain.losses, rel=1e-10)
        same_state(state, plain.state)
        for boxes in slides:
            if rank == 4:
                assert not boxes, "the second stage reads no image"
                continue
            # Two micro-batches of two samples; a tile of 7 or 6 rows, 6 or 5 columns; no more.
            top, left = 7 * (rank // 2), 6 * (rank % 2)
            tile = Box((0, 0, top, left), (2, 3, (7, 13)[rank // 2], (6, 11)[rank % 2]))
            low = (0, 0, max(0, top - reach), max(0, left - reach))
            high = (2, 3, min(13, tile.stop[2] + reach), min(11, tile.stop[3] + reach))
            assert boxes == [Box(low, high), Box((2, *low[1:]), (4, *high[1:]))]


def test_targets_are_read_like_the_output_is_cut() -> None:
    plan = CUT_ENDS["2x2"]
    model, data = segmenter(), pixels((4, 3, 13, 11), counted, 1)
    ranks = on_slides(plan, model, data)
    plain = plainly(model, data, plan.total)
    read = []
    for losses, state, (_, labels), _ in ranks:
        assert losses == pytest.approx(plain.losses, rel=1e-10)
        same_state(state, plain.state)
        read += labels[0]
    assert sum(box.size for box in read) == 4 * 13 * 11, "every pixel once, by one rank"
    assert all(box.size < 2 * 13 * 11 for box in read)


def test_numpy_arrays_of_other_types() -> None:
    plan = PLANS["1f1b, 4 tiles to 2 to whole"]
    draw = np.random.default_rng(0)
    images = draw.standard_normal((8, 3, 21, 19)).astype(np.float32)
    labels = torch.from_numpy(draw.integers(CLASSES, size=8))
    model = classifier().float()

    def work(transport: Local) -> Any:
        mine = Trainer(
            copy.deepcopy(model), F.cross_entropy, sgd, torch.empty(2, 3, 21, 19), plan,
            transport=transport,
        )  # fmt: skip
        return mine.step(images, labels).loss, mine.predict(images[:3])

    plain = plainly(model, [(torch.from_numpy(images), labels)], plan.total)
    for loss, output in on_ranks(plan, work):
        assert loss == pytest.approx(plain.losses[0], rel=1e-5)
        assert output.shape == (3, CLASSES)


# --- bytes that are kept -------------------------------------------------------------------------


def conv_stack(layers: int = 5) -> nn.Module:
    with drawing(0):
        return nn.Sequential(
            *(
                layer
                for i in range(layers)
                for layer in (nn.Conv2d(3 if not i else 6, 6, 3, padding=1), nn.ReLU())
            )
        ).double()


def strips(laid: StageLayout, member: int) -> int:
    """Bytes that a rank keeps beside its own cells: what it is sent, and edges of what enters."""
    total = 0
    for have, pieces in laid.exchanges():
        for move in (move for want in pieces for move in moves(have, want)):
            if move.target == member != move.source:
                total += 8 * move.box.size
    entering = laid.layouts["input"]
    extra = entering.boxes()[member].size - entering.own_boxes()[member].size
    return total + 8 * extra


def kept(
    spatial: Any, model: nn.Module, images: Tensor, given: Any
) -> list[tuple[int, StageLayout | None]]:
    """The most bytes that each rank of a first stage stashed, and its layout."""
    plan = Plan(stages=2, balance=(len(model), 1), schedule="sequential", spatial=spatial)
    whole = nn.Sequential(*copy.deepcopy(model), nn.Conv2d(6, 6, 1)).double()
    target = torch.zeros(len(images), 6, *images.shape[2:], dtype=torch.float64)

    def work(transport: Local) -> Any:
        mine = Trainer(copy.deepcopy(whole), F.mse_loss, sgd, images, plan, transport=transport)
        mine.step(given(images), target)
        return mine.timeline().peaks[transport.rank].activations, only_cut(mine).laid.get(0)

    return on_ranks(plan, work)[:-1]


def assert_small(
    model: nn.Module, images: Tensor, grid: tuple[int, int], given: Any = Tensor.numpy
) -> None:
    ((whole, _),) = kept((), model, images, given)
    for member, (activations, laid) in enumerate(kept([grid], model, images, given)):
        assert laid is not None
        assert activations <= 1.05 / prod(grid) * whole + strips(laid, member), f"rank {member}"


@pytest.mark.parametrize("given", [Tensor.numpy, Tensor.detach], ids=["array", "tensor"])
@pytest.mark.parametrize("grid", [(2, 1), (1, 4), (2, 2), (3, 2)])
def test_the_stash_of_p_tiles_is_one_pth_and_strips(grid: tuple[int, int], given: Any) -> None:
    """No rank keeps a second copy of its tile: what backward needs is the tile and the strips."""
    assert_small(conv_stack(), torch.randn(1, 3, 48, 36, dtype=torch.float64), grid, given)


STASHING: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 3, padding=1)
    ),
    "group norm": lambda: nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.GELU(), nn.Conv2d(6, 6, 3, padding=1)
    ),
    "max pool": lambda: nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.MaxPool2d(3, 1, 1), nn.Conv2d(6, 6, 3, padding=1)
    ),
    "average pool": lambda: nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.AvgPool2d(3, 1, 1), nn.Conv2d(6, 6, 3, padding=1)
    ),
    "in place": lambda: nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(True),
        nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(True),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STASHING)
def test_the_stash_of_other_layers_is_one_pth_and_strips(name: str) -> None:
    torch.manual_seed(0)
    assert_small(STASHING[name](), torch.randn(2, 3, 48, 36, dtype=torch.float64), (2, 2))


# --- messages and bytes that are sent inside stages ----------------------------------------------


def sent_and_taken(laid: StageLayout, tiles: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """For each rank (messages, cells) that it sends in forward, and that it is sent."""
    found = [[[0, 0], [0, 0]] for _ in range(tiles)]
    for have, pieces in laid.exchanges():
        pairs = set()
        for move in (move for want in pieces for move in moves(have, want)):
            if move.source != move.target:
                pairs.add((move.source, move.target))
                found[move.source][0][1] += move.box.size
                found[move.target][1][1] += move.box.size
        for source, target in pairs:
            found[source][0][0] += 1
            found[target][1][0] += 1
    return [(tuple(a), tuple(b)) for a, b in found]


MESSAGING: dict[str, Callable[[], nn.Module]] = {
    "convolutions": lambda: conv_stack(3),
    "strides and pools": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 5, padding=2, stride=2), nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(4, 4, 3, dilation=2),
    ),
    "up and down": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(4, 4, 3, stride=2), nn.Upsample(size=(9, 31)),
        nn.Conv2d(4, 2, 2),
    ),
    "reflect": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3, padding=2, padding_mode="reflect"),
        nn.ReplicationPad2d(3), nn.Conv2d(4, 4, 3),
    ),
    "circular": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular")
    ),
}  # fmt: skip


@pytest.mark.parametrize("fused", [1, 2])
@pytest.mark.parametrize("name", MESSAGING)
def test_bytes_and_messages_are_those_that_geometry_says(name: str, fused: int) -> None:
    """Backward sends what forward received, one message for one message."""
    torch.manual_seed(0)
    plain = Plain(MESSAGING[name](), torch.randn(2, 3, 19, 17))
    for grid, points in (((2, 2), None), ((4, 1), [(2, 3, 16)]), ((1, 3), [(9, 9)])):
        ranks = plain.cut(grid, fused=fused, points=points)
        expected = sent_and_taken(ranks[0].laid, prod(grid))
        assert [sent for sent, _ in expected] == (
            traffic(ranks[0].laid.exchanges()) or [(0, 0)] * prod(grid)
        )
        for rank, (sent, taken) in zip(ranks, expected, strict=True):
            assert (rank.forward.messages, rank.forward.bytes) == (sent[0], 8 * sent[1])
            assert (rank.backward.messages, rank.backward.bytes) == (taken[0], 8 * taken[1])


def test_a_batch_norm_sends_two_numbers_per_channel_there_and_back() -> None:
    torch.manual_seed(0)
    plain = Plain(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)), torch.randn(2, 3, 9, 7))
    for rank in plain.cut((2, 2)):
        assert (rank.forward.messages, rank.forward.bytes) == (3, 3 * 2 * 4 * 8)
        assert (rank.backward.messages, rank.backward.bytes) == (3, 3 * 2 * 4 * 8)


def test_fused_layers_save_messages() -> None:
    plain = Plain(conv_stack(4), torch.randn(1, 3, 20, 16))
    messages = [plain.cut((2, 1), fused=n)[0].forward.messages for n in (1, 2, 4)]
    assert messages == [3, 1, 0], "the image comes with its halo; then each run fetches once"


def test_a_trainer_counts_the_same_bytes() -> None:
    plan = Plan(stages=1, micro_batches=2, schedule="sequential", spatial=[(2, 2)])
    images = torch.randn(4, 3, 17, 13, dtype=torch.float64)

    def work(transport: Local) -> Any:
        mine = Trainer(conv_stack(3), None, None, images[:2], plan, transport=transport)
        mine.predict(images)
        cut = next(c for c in mine.session.runner.programs.recordings.values() if c.bound)
        group = cut.bound[0, 0, 1, 2, 3].group
        return group.traffic, sent_and_taken(cut.laid[0], 4)[transport.rank][0]

    for counted, (messages, cells) in run(4, work):
        assert (counted.messages, counted.bytes) == (2 * messages, 2 * 8 * cells)


# --- buffers -------------------------------------------------------------------------------------


class Remembers(nn.Module):
    """Keeps its last image, as a memory bank or Keras's variables on torch do."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, CLASSES)
        self.register_buffer("last", torch.zeros(2, 4, 8, 6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        self.last.copy_(x.detach())
        return self.head(torch.relu(x).mean((2, 3)))


@pytest.mark.parametrize("spatial", [[(1, 2)], [(2, 2)]])
def test_a_buffer_that_is_assigned_from_a_tiled_image_has_all_of_it(spatial: Any) -> None:
    """Story: the call writes no value of the graph, and raised IndexError."""
    with drawing(0):
        model = Remembers().double()
    data = batches((4, 3, 8, 6), CLASSES, 2, torch.float64)
    plan = Plan(stages=2, micro_batches=2, schedule="1f1b", spatial=spatial)
    assert_equal(planned(model, data, plan), plainly(model, data, 2))
