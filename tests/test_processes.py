"""Over gloo processes: the same numbers as the plain model, and bytes as they should be."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gems import models
from gems.plans.plan import Plan
from gems.predict.timeline import Memory
from gems.torch.trainer import Trainer
from gems.transport.protocol import Transport
from tests.exact import alone, assert_equal, batches, join, plainly, sgd, trained
from tests.worlds import spawn

Tensor = torch.Tensor


class Pointers(nn.Module):
    """Integers travel between stages: where each maximum was."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.pool, self.unpool = nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x, where = self.pool(self.a(x))
        x = self.unpool(self.b(x).relu(), where)
        chosen = x.argmax(1, keepdim=True)
        return self.head((x + x.gather(1, chosen)).mean((2, 3)))


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(192, 16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 16),
            nn.Dropout(0.3), nn.Linear(16, 5),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Logits(nn.Module):
    """A U-Net whose pixels are averaged, so that labels are per image."""

    def __init__(self) -> None:
        super().__init__()
        self.net = models.build("unet", width=2, levels=3, num_classes=5)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).mean((2, 3))


NETWORKS: dict[str, Any] = {
    "resnet": lambda: models.build("resnet_v1", depth=8, width=4, num_classes=5),
    "unet": Logits,
    "pointers": Pointers,
    "dropping": Dropping,
}


def network(name: str) -> nn.Module:
    torch.manual_seed(0)
    return NETWORKS[name]().double()


def data(steps: int = 2, samples: int = 7) -> list[Any]:
    return batches((samples, 3, 8, 8), 5, steps, torch.float64)


def rank(transport: Transport, name: str, plan: Plan) -> Any:
    return trained(transport, network(name), data(), plan)


CASES = {
    "sequential, 3 ranks": ("resnet", Plan(stages=3, micro_batches=3, schedule="sequential")),
    "gpipe, 3 ranks, U-Net": ("unet", Plan(stages=3, micro_batches=3, schedule="gpipe")),
    "1f1b, 4 ranks": ("resnet", Plan(stages=4, micro_batches=7, schedule="1f1b")),
    "interleaved, 2 ranks": (
        "unet",
        Plan(stages=4, ranks=2, micro_batches=4, schedule="interleaved"),
    ),
    "zero-bubble, 3 ranks": ("resnet", Plan(stages=3, micro_batches=4, schedule="zero-bubble")),
    "gems, 3 ranks": ("resnet", Plan(stages=3, replications=2, schedule="gems")),
    "gems-zb, 4 ranks, U-Net": ("unet", Plan(stages=4, replications=2, schedule="gems-zb")),
    "gems, 4 ranks, two parts a batch": (
        "resnet",
        Plan(stages=4, replications=4, schedule="gems", max_in_flight=2),
    ),
    "fold, 2 ranks, integers": (
        "pointers",
        Plan(stages=4, micro_batches=3, schedule="auto", placement="fold"),
    ),
    "gems × data 2": ("resnet", Plan(stages=2, replications=1, schedule="gems", data=2)),
    "both ways, integers": (
        "pointers",
        Plan(stages=3, micro_batches=4, schedule="auto", bidirectional=True, max_in_flight=2),
    ),
    "dropout, 2 ranks both ways": ("dropping", Plan(stages=2, replications=2, schedule="gems-zb")),
    "dropout, 2 × data 2": ("dropping", Plan(stages=2, micro_batches=2, data=2)),
}


@pytest.mark.parametrize("case", CASES)
def test_processes_train_like_the_plain_model(case: str) -> None:
    name, plan = CASES[case]
    found = join(spawn(plan.world, rank, name, plan))
    oracle = alone if name == "dropping" else plainly
    assert_equal(found, oracle(network(name), data(), plan.total))


# --- bytes ------------------------------------------------------------------------------------


def measured(transport: Transport, plan: Plan, steps: int) -> Any:
    """The last step's timeline, what one micro-batch keeps on each stage, and what is left over."""
    trainer = Trainer(
        network("resnet"), F.cross_entropy, sgd, data()[0][0][:1], plan, transport=transport
    )
    for images, labels in data(steps, plan.total):
        trainer.step(images, labels)
    activations = dict(trainer.session.state.activation_bytes)
    engine = trainer.session.engine
    messages = engine.messages
    left = (len(messages.sending), len(messages.inbox), len(messages.at_hand))
    left += (len(trainer.session.state.saved),)
    return (
        trainer.timeline(),
        activations,
        left,
        trainer.session.adapter.resident_memory(),
        engine.meter.now,
    )


def most(timeline: Any, rank: int, kind: str) -> int:
    return max(getattr(memory, kind) for _, memory in timeline.memory[rank])


@pytest.mark.parametrize("stages", [3, 4])
def test_gems_never_keeps_more_than_one_micro_batch_per_rank(stages: int) -> None:
    plan = Plan(stages=stages, replications=3, schedule="gems")
    results = spawn(plan.world, measured, plan, 2)
    timeline = results[0][0]
    assert timeline.max_in_flight == (1,) * stages
    for number, (_, activations, _, _, _) in enumerate(results):
        own = {size for (stage, _), size in activations.items()}
        assert most(timeline, number, "activations") == max(own)


def test_gems_never_keeps_more_micro_batches_than_a_batch_has() -> None:
    plan = Plan(stages=3, replications=4, schedule="gems", max_in_flight=2)
    results = spawn(plan.world, measured, plan, 1)
    timeline = results[0][0]
    assert timeline.max_in_flight == (2,) * 3
    for number, (_, activations, _, _, _) in enumerate(results):
        assert most(timeline, number, "activations") <= 2 * max(activations.values())


def test_1f1b_keeps_as_many_as_there_are_stages_to_come() -> None:
    plan = Plan(stages=4, micro_batches=8, schedule="1f1b")
    results = spawn(plan.world, measured, plan, 1)
    timeline = results[0][0]
    assert timeline.max_in_flight == (4, 3, 2, 1)
    for stage, (_, activations, _, _, _) in enumerate(results):
        assert most(timeline, stage, "activations") == (4 - stage) * activations[stage, 0]


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble", "gems"])
def test_nothing_is_left_over_after_a_step(schedule: str) -> None:
    plan = Plan(stages=3, micro_batches=6, schedule=schedule)
    for timeline, _, left, resident, now in spawn(3, measured, plan, 2):
        assert left == (0, 0, 0, 0), "no message, no stash"
        assert (now.activations, now.boundary, now.communication) == (0, 0, 0)
        assert now.weights == resident.weights and now.optimizer == resident.optimizer
        for peak in timeline.peaks:
            assert isinstance(peak, Memory)
            assert peak.total > resident.weights


@pytest.mark.parametrize("schedule", ["sequential", "gems", "zero-bubble"])
def test_more_micro_batches_hold_no_more_messages(schedule: str) -> None:
    """Receives are posted early, so that it was known before a send that it would be received; what
    was sent then was held until the step ended: 15 GiB of 20 for 32 images on eight ranks."""

    def held(m: int) -> list[int]:
        plan = Plan(stages=3, micro_batches=m, schedule=schedule)
        timeline = spawn(3, measured, plan, 1)[0][0]
        return [most(timeline, rank, "communication") for rank in range(3)]

    assert held(10) == held(6)


def test_buffers_that_were_sent_are_let_go_before_the_step_ends() -> None:
    """All of them at once would be one per micro-batch; what came back tells that they arrived."""
    plan = Plan(stages=2, micro_batches=8, schedule="1f1b")
    timeline = spawn(2, measured, plan, 1)[0][0]
    rows = [memory.communication for _, memory in timeline.memory[0]]
    largest = max(b - a for a, b in pairwise(rows))
    assert max(rows) <= 3 * largest
