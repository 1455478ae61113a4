"""Bytes that the simulator predicts, beside those that the engine counts in the same step."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn.functional import cross_entropy

from gems import models
from gems.plans.plan import Plan
from gems.predict.simulate import simulate
from gems.predict.timeline import KINDS, Timeline
from gems.torch.trainer import Trainer
from gems.transport.threads import Local, run
from tests.exact import Recordings

SIDE, SAMPLES = 32, 16
BLOCKS = ("block1_1", "block2_2", "block3_2")  # of two each; stem and head are saved
WHOLE = {
    "one rank": Plan(),
    "1f1b": Plan(stages=3, micro_batches=4),
    "gpipe": Plan(stages=4, micro_batches=8, schedule="gpipe"),
    "interleaved": Plan(stages=4, ranks=2, schedule="interleaved", micro_batches=4),
    "zero-bubble": Plan(stages=3, schedule="zero-bubble", micro_batches=4),
    "gems": Plan(stages=4, schedule="gems", replications=2),
    "gems-zb, odd": Plan(stages=3, schedule="gems-zb", replications=2),
    "fold": Plan(stages=4, placement="fold", schedule="gpipe", micro_batches=4),
    "two copies": Plan(stages=2, data=2, micro_batches=2),
    "two copies, both ways": Plan(stages=2, data=2, schedule="gems", replications=1),
    "zero 1": Plan(stages=2, data=2, micro_batches=2, zero=1),
    "zero 2, both ways": Plan(stages=3, schedule="gems", replications=2, zero=2),
    "zero 2, fold": Plan(stages=4, placement="fold", schedule="gpipe", data=2, zero=2),
    "zero 3, units": Plan(stages=5, ranks=1, schedule="sequential", data=4, zero=3),
    "zero 3, zero-bubble": Plan(
        stages=2, schedule="zero-bubble", data=2, micro_batches=2, zero=3, recompute="always"
    ),
    "zero 3, interleaved": Plan(
        stages=4, ranks=2, schedule="interleaved", micro_batches=2, data=2, zero=3
    ),
    "1f1b, inputs": Plan(stages=3, micro_batches=4, recompute="always"),
    "gpipe, except the last": Plan(
        stages=2, micro_batches=4, schedule="gpipe", recompute="except_last", data=2
    ),
    "zero-bubble, fewer blocks": Plan(
        stages=3, schedule="zero-bubble", micro_batches=4, recompute=("always", BLOCKS, "never")
    ),
    "fold, inputs and blocks": Plan(
        stages=4,
        placement="fold",
        schedule="gpipe",
        recompute=("always", BLOCKS, ("",), "except_last"),
    ),
    "auto, inputs": Plan(
        stages=2, schedule="auto", micro_batches=4, recompute="always", max_in_flight=1
    ),
    "gpipe, away": Plan(stages=2, schedule="gpipe", micro_batches=8, offload="activations:disk"),
    "units, away": Plan(stages=5, ranks=1, schedule="sequential", offload="activations"),
    "zero-bubble, away": Plan(
        stages=4,
        schedule="zero-bubble",
        micro_batches=8,
        offload="activations",
        recompute=("never", "always", BLOCKS, "never"),
    ),
}
CUT = {
    "rows": Plan(spatial=(2, 1)),
    "tiles to whole": Plan(stages=2, spatial=(2, 2), micro_batches=2),
    "tiles to tiles": Plan(stages=3, spatial=[(2, 2), (1, 2)], micro_batches=2),
    "tiles to slices, both ways": Plan(
        stages=2, spatial=(2, 1), local_dp=2, micro_batches=2, schedule="gems"
    ),
    "tiles, zero 3": Plan(stages=2, spatial=(2, 1), local_dp=2, micro_batches=2, zero=3),
    "tiles, inputs": Plan(
        stages=3, spatial=[(2, 2), (1, 2)], micro_batches=2, schedule="gpipe", recompute="always"
    ),
    "tiles, away": Plan(
        stages=2, spatial=(2, 1), micro_batches=8, schedule="gpipe", offload="activations"
    ),
    "the same tiles, inputs away": Plan(
        stages=4,
        spatial=[(2, 2)] * 4,
        placement=((0, 1, 2, 3),) * 4,
        schedule="sequential",
        recompute="always",
        offload="activations,weights",
    ),
    "tiles, fewer blocks": Plan(stages=2, spatial=(2, 2), micro_batches=2, recompute=BLOCKS),
}


def stepped(plan: Plan, model: str, side: int, **options: Any) -> tuple[Timeline, Timeline]:
    """A step as the engine counts it, and as the simulator predicts it."""

    images, labels = torch.randn(SAMPLES, 3, side, side), torch.randint(10, (SAMPLES,))

    torch.manual_seed(0)
    drawn = models.build(model, **options)

    def work(transport: Local) -> tuple[Timeline, Trainer]:
        trainer = Trainer(
            copy.deepcopy(drawn), cross_entropy,
            lambda p: torch.optim.SGD(p, 0.01, momentum=0.9),
            torch.empty(SAMPLES // plan.total, 3, side, side), plan, transport=transport,
        )  # fmt: skip
        for _ in range(2):  # the optimizer's state is there from the second step on
            trainer.step(images, labels)
        return trainer.timeline(), trainer

    with mock.patch("gems.torch.tracing.trace.record", Recordings()):
        measured, trainer = run(plan.world, work)[0]
    predicted = simulate(trainer.schedule, trainer.plan, trainer.costs, trainer.machine, state=1.0)
    return measured, predicted


@pytest.mark.parametrize("name", WHOLE)
def test_bytes_of_every_kind_and_moment_are_predicted_exactly(name: str) -> None:
    measured, predicted = stepped(WHOLE[name], "resnet_v1", SIDE, depth=14)
    assert predicted.peaks == measured.peaks
    assert predicted.max_in_flight == measured.max_in_flight
    for rank, (seen, said) in enumerate(zip(measured.memory, predicted.memory, strict=True)):
        # Before the update the engine waits for its sums, and has let go of all messages by then.
        seen, said = (list(dict.fromkeys(m for _, m in row)) for row in (seen, said))
        waited = [memory for memory in seen if memory not in said]
        assert said == [m for m in seen if m not in waited] and len(waited) <= 1, f"rank {rank}"


@pytest.mark.parametrize("name", CUT)
def test_bytes_of_cut_images_are_predicted_to_a_few_per_cent(name: str) -> None:
    measured, predicted = stepped(CUT[name], "resnet_v1", 64, depth=14)
    assert predicted.max_in_flight == measured.max_in_flight
    for seen, said in zip(measured.peaks, predicted.peaks, strict=True):
        assert said.total == pytest.approx(seen.total, rel=0.05)
        for kind in KINDS:
            slack = 0.05 * seen.total
            assert getattr(said, kind) == pytest.approx(getattr(seen, kind), abs=slack), kind
