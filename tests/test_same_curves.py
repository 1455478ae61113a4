"""Training on real tissue gives the same loss curve and metrics under any plan, and learns."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from gems.data.loader import Loader
from gems.data.sample import Sample, sample_slides
from gems.data.slides import Slides
from gems.data.source import split
from gems.models import build
from gems.plans.plan import Plan
from gems.torch.losses import loss
from gems.torch.metrics import Scores
from gems.torch.optimizers import optimizer
from gems.torch.trainer import Trainer
from gems.transport.threads import run
from tests.exact import Recordings, drawing
from tests.runs import Run, on_ranks, trained

STEPS, BATCH, TILE = 20, 8, 32
PLANS = {
    "one rank": Plan(stages=1, micro_batches=2, schedule="sequential"),
    "two stages": Plan(stages=2, micro_batches=2),
    "both directions": Plan(stages=2, replications=1, schedule="gems"),
    "tiles, then a stage": Plan(stages=2, micro_batches=2, spatial=[(2, 1)]),
}


@dataclass(frozen=True)
class Task:
    """A network, and what the tissue is cut into for it."""

    network: str
    options: tuple[tuple[str, Any], ...]
    metrics: str
    headline: str
    rate: float

    def model(self) -> torch.nn.Module:
        with drawing(0):
            return build(self.network, **dict(self.options)).double()


TASKS = {
    "classify": Task(
        "resnet_v2", (("depth", 11), ("width", 4), ("num_classes", 2)), "classification",
        "accuracy", 0.05,
    ),
    "segment": Task(
        "unet", (("levels", 2), ("width", 4), ("num_classes", 2)), "segmentation", "dice", 0.2
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def tissue(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    return sample_slides(tmp_path_factory.mktemp("tissue"), tile=TILE)


class Wide:
    """A batch in float64, read box by box as the one it is made of."""

    def __init__(self, batch: Any) -> None:
        self.batch, self.shape, self.dtype = batch, batch.shape, np.dtype(np.float64)

    def __getitem__(self, key: Any) -> Any:
        return self.batch[key].astype(np.float64)


@dataclass(frozen=True)
class Curve:
    losses: list[float]
    metrics: dict[str, float]
    chance: float


def source_of(task: str, tissue: Sample) -> Slides:
    if task == "classify":
        return Slides(tissue.slide, TILE, labels=tissue.labels)
    return Slides(tissue.slide, TILE, masks=tissue.masks, names=tissue.names, tissue=0)


def curve(transport: Any, task: str, plan: Plan, tissue: Sample) -> Curve:
    """What one rank sees: the losses of all steps, metrics of what was held out."""
    wanted, (train, rest) = TASKS[task], split(source_of(task, tissue), 0.25)
    trainer = Trainer(
        wanted.model(),
        loss("cross-entropy"),
        lambda parameters: optimizer("sgd", parameters, wanted.rate),
        torch.empty(BATCH // plan.total, 3, TILE, TILE, dtype=torch.float64),
        plan,
        transport=transport,
    )
    losses: list[float] = []
    with Loader(train, BATCH) as batches:
        epoch = 0
        while len(losses) < STEPS:
            for images, targets in batches.epoch(epoch):
                losses.append(trainer.step(Wide(images), targets).loss)
                if len(losses) == STEPS:
                    break
            epoch += 1
    scores, seen = Scores(wanted.metrics, 2), []
    with Loader(rest, 16, shuffle=False) as batches:
        for images, targets in batches.epoch():
            known = torch.as_tensor(targets[:])
            seen.append(known.flatten())
            scores.add(trainer.predict(Wide(images)), known)
    share = torch.cat(seen).double().mean().item()
    return Curve(losses, scores.summary(), max(share, 1 - share))


def under(task: str, plan: str, tissue: Sample) -> Curve:
    """On ranks as threads, which all see the same."""
    with mock.patch("gems.torch.tracing.trace.record", Recordings()):
        ranks = run(PLANS[plan].world, lambda t: curve(t, task, PLANS[plan], tissue))
    assert all(rank == ranks[0] for rank in ranks)
    return ranks[0]


@cache
def on_one_rank(task: str, tissue: Sample) -> Curve:
    return under(task, "one rank", tissue)


@pytest.mark.parametrize("plan", [name for name in PLANS if name != "one rank"])
@pytest.mark.parametrize("task", TASKS)
def test_the_loss_curve_and_the_metrics_do_not_depend_on_the_plan(
    task: str, plan: str, tissue: Sample
) -> None:
    expected, found = on_one_rank(task, tissue), under(task, plan, tissue)
    assert found.losses == pytest.approx(expected.losses, rel=1e-9, abs=1e-9)
    assert found.metrics == pytest.approx(expected.metrics, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("task", TASKS)
def test_it_learns_from_tissue_what_holds_for_tissue_it_has_not_seen(
    task: str, tissue: Sample
) -> None:
    """Chance is the share of the larger class: what guessing it always would score."""
    found = on_one_rank(task, tissue)
    assert found.losses[-1] < 0.7 * found.losses[0]
    assert found.metrics["accuracy"] > found.chance + 0.05


def test_gems_train_over_processes_gives_the_curve_of_one_rank_in_float32(
    tmp_path: Path, tissue: Sample
) -> None:
    """As close as rounding allows: a few steps, before differences of 1e-7 have grown."""
    base = ["--app", "medical", "--datapath", str(tissue.slide), "--labels", str(tissue.labels)]
    base += ["--image-size", str(TILE), "--model", "resnet-v2", "--num-layers", "11"]
    base += ["--num-filters", "4", "--steps", "6", "--augment", "--no-save"]
    alone = trained(tmp_path / "one", "--batch-size", 8, "--parts", 2, base=base)
    both = ["--split-size", 2, "--times", 1, "--batch-size", 4, "--out", tmp_path / "two"]
    assert on_ranks(2, "train", *base, *both) == [0, 0]
    found = Run(tmp_path / "two")
    assert found.plan["schedule"] == "gems" and alone.plan["schedule"] == "1f1b"
    assert found.losses == pytest.approx(alone.losses, rel=1e-4)
    for name in ("accuracy", "auc"):
        assert found.of(name, "eval") == pytest.approx(alone.of(name, "eval"), abs=0.04)
