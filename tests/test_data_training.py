"""Training from slides, volumes and noise: any plan, the same numbers, each rank its own box."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from gems import models
from gems.data.augment import Augment
from gems.data.loader import Loader
from gems.data.sample import sample_slides
from gems.data.slides import Slides
from gems.data.source import Box, Image, Source, Target, Task
from gems.data.synthetic import Synthetic
from gems.plans.plan import Plan
from gems.torch.trainer import Trainer
from gems.transport.protocol import Transport
from gems.transport.threads import run
from tests.exact import Recordings, close, plainly, sgd
from tests.worlds import spawn

TILE, BATCH, STEPS = 32, 4, 3


@dataclass
class Watched:
    """A source that notes what is read of it."""

    source: Source
    images: list[tuple[int, Box]] = field(default_factory=list)
    masks: list[tuple[int, Box]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.shape, self.classes, self.names = (
            self.source.shape,
            self.source.classes,
            self.source.names,
        )
        self.task: Task = self.source.task

    def __len__(self) -> int:
        return len(self.source)

    def read(self, index: int, box: Box) -> Image:
        self.images.append((index, box))
        return self.source.read(index, box)

    def target(self, index: int, box: Box) -> Target:
        self.masks.append((index, box))
        return self.source.target(index, box)


def source_of(kind: str, folder: Path) -> Source:
    """Few samples, so that an epoch ends within the steps and its last batch is short."""
    if kind == "volume":
        return Synthetic((7, 8, 9), classes=3, channels=1, samples=6)
    slide = folder / "slides" / "ihc.tif"
    if kind == "slide":
        return Slides(slide, TILE, mpp=1.3, stride=60, labels=folder / "labels.csv")
    return Slides(slide, TILE, mpp=2.7, tissue=0, masks=folder / "masks", names=("no", "yes"))


def network(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "mask":
        return models.build("unet", width=2, levels=2, num_classes=2).double()
    conv, norm, pool = (
        (nn.Conv3d, nn.BatchNorm3d, nn.AdaptiveAvgPool3d)
        if kind == "volume"
        else (nn.Conv2d, nn.BatchNorm2d, nn.AdaptiveAvgPool2d)
    )
    return nn.Sequential(
        conv(1 if kind == "volume" else 3, 4, 3, padding=1, stride=2), norm(4), nn.ReLU(),
        conv(4, 6, 3, padding=1), nn.ReLU(), pool(1), nn.Flatten(), nn.Linear(6, 3),
    ).double()  # fmt: skip


def loader_of(source: Source, workers: int) -> Loader:
    return Loader(source, BATCH, seed=3, augment=Augment(), workers=workers, dtype=np.float64)


def steps_of(loader: Loader) -> Any:
    return itertools.islice(itertools.chain.from_iterable(map(loader.epoch, (0, 1))), STEPS)


def rank(
    transport: Transport, model: nn.Module, kind: str, plan: Plan, folder: Path, workers: int
) -> Any:
    """What a rank saw and read: each makes its own source and loader."""
    source = Watched(source_of(kind, folder))
    size = -(-BATCH // plan.total)
    sample = torch.empty(size, *source.shape, dtype=torch.float64)
    trainer = Trainer(copy.deepcopy(model), cross_entropy, sgd, sample, plan, transport=transport)
    with loader_of(source, workers) as loader:
        losses = [trainer.step(images, targets).loss for images, targets in steps_of(loader)]
    return losses, trainer.state_dict(), source.images, source.masks


def check(kind: str, plan: Plan, folder: Path, ranks: list[Any]) -> None:
    source = source_of(kind, folder)
    data = [
        (torch.from_numpy(np.asarray(x)), torch.from_numpy(np.asarray(y)))
        for x, y in steps_of(loader_of(source, 0))
    ]
    assert len({len(x) for x, _ in data}) == 2  # one batch is short
    expected = plainly(network(kind), data, plan.total)
    for losses, state, _, _ in ranks:
        assert np.allclose(losses, expected.losses, rtol=1e-10, atol=0)
        for name, tensor in expected.state.items():
            close(name, state[name], tensor)


def pixels(read: list[tuple[int, Box]]) -> int:
    return sum(int(np.prod([s.stop - s.start for s in box])) for _, box in read)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A slide of tissue, with few tiles labelled."""
    pytest.importorskip("skimage")
    folder = tmp_path_factory.mktemp("training")
    sample = sample_slides(folder, tile=64)
    lines = sample.labels.read_text().splitlines()
    sample.labels.write_text("\n".join((lines[0], *lines[10:50:7])) + "\n")
    return folder


CASES: dict[str, tuple[str, Plan]] = {
    "slide, one rank": ("slide", Plan(micro_batches=2, schedule="sequential")),
    "slide, 2x2 and one": (
        "slide",
        Plan(stages=2, balance=(3, 5), micro_batches=2, spatial=[(2, 2)]),
    ),
    "slide, both ways": ("slide", Plan(stages=2, schedule="gems", replications=1)),
    "mask, 1x2": ("mask", Plan(micro_batches=2, schedule="sequential", spatial=[(1, 2)])),
    "mask, two stages": ("mask", Plan(stages=2, micro_batches=2)),
    "volume, cut in depth": (
        "volume",
        Plan(micro_batches=2, schedule="sequential", spatial=[(2, 1, 1)]),
    ),
}


@pytest.fixture(scope="module")
def threads(folder: Path) -> Callable[[str], list[Any]]:
    """What the ranks of a case saw and read: run once, looked at by several tests."""

    @functools.cache
    def ran(name: str) -> list[Any]:
        kind, plan = CASES[name]
        model = network(kind)  # here: threads share the random numbers that weights are drawn from
        with mock.patch("gems.torch.tracing.trace.record", Recordings()):
            return run(plan.world, lambda t: rank(t, model, kind, plan, folder, 0))

    return ran


@pytest.mark.parametrize("name", CASES)
def test_any_plan_trains_from_a_loader_as_the_plain_model_does(
    name: str, folder: Path, threads: Callable[[str], list[Any]]
) -> None:
    check(*CASES[name], folder, threads(name))


def test_processes_with_workers_do_so_too(folder: Path) -> None:
    plan = Plan(micro_batches=2, schedule="sequential", spatial=[(2, 1)])
    ranks = spawn(2, rank, network("slide"), "slide", plan, folder, 2)
    check("slide", plan, folder, ranks)


def test_each_rank_reads_its_own_tile_and_later_stages_read_nothing(
    folder: Path, threads: Callable[[str], list[Any]]
) -> None:
    ranks = threads("slide, 2x2 and one")
    samples = sum(len(y) for _, y in steps_of(loader_of(source_of("slide", folder), 0)))
    for _, _, images, _ in ranks[:4]:
        assert len(images) == samples
        assert pixels(images) <= samples * (TILE // 2 + 1) ** 2  # with the edge of the first layer
    assert not ranks[4][2]


def test_masks_are_read_where_the_loss_is(threads: Callable[[str], list[Any]]) -> None:
    first, last = threads("mask, two stages")
    assert first[2] and not first[3] and last[3] and not last[2]
    for _, _, images, masks in threads("mask, 1x2"):
        assert pixels(masks) == pixels(last[3]) // 2 < pixels(images) < 0.6 * pixels(first[2])
