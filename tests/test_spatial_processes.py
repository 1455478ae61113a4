"""Cut images over gloo processes: the same numbers, and an end in sight when one of them dies."""

from __future__ import annotations

import pickle
from random import Random
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from gems import models
from gems.plans.plan import Plan
from gems.transport.protocol import Transport
from tests.exact import alone, assert_equal, batches, join, plainly, trained
from tests.test_loud import LOST, Run, assert_said, run  # noqa: F401 - a fixture
from tests.test_spatial_generated import network as generated
from tests.test_spatial_generated import some_cut
from tests.worlds import spawn

Tensor = torch.Tensor
CLASSES = 5


def classifier() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, stride=2), nn.BatchNorm2d(6), nn.ReLU(True),
        nn.Conv2d(6, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, CLASSES),
    )  # fmt: skip


def dropping() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.Dropout(0.3), nn.Conv2d(6, 6, 3), nn.Dropout2d(0.3),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, CLASSES),
    )  # fmt: skip


NETWORKS: dict[str, Any] = {
    "classifier": classifier,
    "dropping": dropping,
    "unet": lambda: models.build("unet", width=2, levels=3, num_classes=CLASSES),
}


def network(name: str) -> nn.Module:
    torch.manual_seed(0)
    return NETWORKS[name]().double()


def data_for(name: str, samples: int = 8) -> list[Any]:
    """The U-Net's are classes of pixels, of which some do not count."""
    data = batches((samples, 3, 21, 19), CLASSES, 2, torch.float64)
    if name != "unet":
        return data
    draw = torch.Generator().manual_seed(2)
    found = []
    for x, _ in data:
        y = torch.randint(CLASSES, (samples, 21, 19), generator=draw)
        y[:, :7][torch.rand((samples, 7, 19), generator=draw) < 0.5] = -100
        found.append((x, y))
    return found


def rank(transport: Transport, name: str, plan: Plan) -> Any:
    return trained(transport, network(name), data_for(name), plan, cross_entropy)


CASES: dict[str, tuple[str, Plan]] = {
    "2 ranks, 2x1": (
        "classifier",
        Plan(micro_batches=3, schedule="sequential", spatial=[(2, 1)]),
    ),
    "5 ranks, 2x2 and one": (
        "classifier",
        Plan(stages=2, balance=(7, 4), micro_batches=4, schedule="1f1b", spatial=[(2, 2)]),
    ),
    "7 ranks, 2x2 to 1x2 to one, both ways": (
        "classifier",
        Plan(
            stages=3, balance=(3, 4, 4), replications=2, schedule="gems",
            spatial=[(2, 2), (1, 2)],
        ),
    ),
    "4 ranks, tiles to slices, d2": (
        "classifier",
        Plan(
            stages=2, balance=(7, 4), micro_batches=2, spatial=[(1, 2)], local_dp=2, halo="d2",
            fused_layers=3,
        ),
    ),
    "4 ranks, U-Net, 2x2, pixels": (
        "unet",
        Plan(micro_batches=2, schedule="sequential", spatial=[(2, 2)]),
    ),
    "5 ranks, U-Net, 1x2 to 1x2 to one, zero-bubble": (
        "unet",
        Plan(stages=3, micro_batches=3, schedule="zero-bubble", spatial=[(1, 2), (1, 2)]),
    ),
    "3 ranks, dropout": (
        "dropping",
        Plan(stages=2, balance=(3, 4), micro_batches=2, spatial=[(1, 2)]),
    ),
    "8 ranks, space, pipeline, both ways, data": (
        "classifier",
        Plan(
            stages=3, balance=(3, 4, 4), replications=1, schedule="gems", data=2, spatial=[(1, 2)]
        ),
    ),
    "8 ranks, all five": (
        "classifier",
        Plan(
            stages=2, balance=(7, 4), replications=1, schedule="gems", data=2, spatial=[(1, 2)],
            local_dp=2, halo="d2",
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_processes_train_a_cut_image_like_a_whole_one(case: str) -> None:
    name, plan = CASES[case]
    found = join(spawn(plan.world, rank, name, plan))
    if name == "dropping":
        assert_equal(found, alone(network(name), data_for(name), plan.total))
    else:
        assert_equal(found, plainly(network(name), data_for(name), plan.total))


# --- generated networks --------------------------------------------------------------------------

GRIDS: dict[int, list[tuple[int, ...]]] = {
    1: [(4,)],
    2: [(2, 2), (2, 2), (4, 1), (1, 4)],
    3: [(2, 2, 1), (1, 4, 1)],
}


def generated_rank(transport: Transport, numbers: range) -> None:
    """The networks of test_spatial_generated.py, each process comparing what all of them found."""
    for number in numbers:
        plain = generated(number)
        shape = tuple(plain.inputs[0].shape)
        cut = some_cut(Random(f"process {number}"), shape, GRIDS[len(shape) - 2])
        mine = plain.rank(transport, **cut)
        plain.compare([pickle.loads(x) for x in transport.all_gather_object(pickle.dumps(mine))])


def test_generated_networks_over_four_processes() -> None:
    spawn(4, generated_rank, range(1000, 1040))


# --- a rank that dies ----------------------------------------------------------------------------

# The network of scripts/train.py: convolutions by tiles, the rest whole.
BY_NAME = [["stem", "body.0", "body.1", "body.2", "body.3"], ["mean", "head"]]
TILES = {"stages": BY_NAME, "micro_batches": 4, "spatial": [[2, 2]]}
BOTH_WAYS = {"stages": BY_NAME, "replications": 2, "schedule": "gems", "spatial": [[1, 2]]}


@pytest.mark.parametrize(
    ("plan", "world", "dead"),
    [(TILES, 5, 0), (TILES, 5, 3), (TILES, 5, 4), (BOTH_WAYS, 3, 1)],
    ids=["first tile", "last tile", "the rank behind", "both ways"],
)
def test_a_rank_killed_in_a_spatial_stage_ends_all_others(
    run: Run,  # noqa: F811
    plan: dict[str, Any],
    world: int,
    dead: int,
) -> None:
    """In the middle of backward, while its neighbours wait for the edges of its tile."""
    ends = run(plan, "killed", dead, world=world)
    assert ends.pop(dead).code == -9
    assert_said(ends, *LOST)
