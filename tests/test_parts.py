"""What all ranks of a team keep to compute from it again is kept in parts (ZeRO-R's P_a)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gems.errors import PlanError
from gems.plans.plan import Plan
from gems.predict.memory_trace import live
from gems.schedule.action import Kind
from gems.torch.spatial.group import SpatialGroup
from gems.torch.spatial.partitioned_activations import PartitionedActivations
from gems.torch.trainer import Trainer
from gems.transport.protocol import Transport
from gems.transport.threads import run
from tests.exact import assert_equal, batches, drawing, plainly, planned, sgd

Tensor = torch.Tensor
SAMPLES, PARTS = 2, 3  # of a micro-batch; of the second stage
WHOLE = SAMPLES * 6 * 8  # bytes of what it receives


def net() -> nn.Module:
    """An image up to the pool, then a value that every tile has."""
    with drawing(0):
        return nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
            nn.Flatten(), nn.Linear(6, 21), nn.Tanh(), nn.Linear(21, 13), nn.Tanh(),
            nn.Linear(13, 5),
        ).double()  # fmt: skip


def data() -> list[Any]:
    return batches((4 * SAMPLES, 3, 6, 6), 5, 2, torch.float64)


INPUTS = Plan(
    stages=3, balance=(5, 3, 2), spatial=("2x1", "3x1"), schedule="gpipe", micro_batches=4,
    recompute=("never", "always", "never"), partition_activations=True,
)  # fmt: skip
RUNS = Plan(
    stages=2, balance=(5, 5), spatial=("2x1", "2x1"), schedule="gpipe", micro_batches=4,
    recompute=("never", ("5", "6", "8", "9")), partition_activations=True,
)  # fmt: skip
PLANS = {
    "inputs": INPUTS,
    "inputs, put away": replace(INPUTS, offload="activations:disk"),
    "runs": RUNS,
    "runs, put away, split": replace(RUNS, offload="activations", schedule="zero-bubble"),
    "slices": Plan(
        stages=2, balance=(5, 5), spatial="2x2", local_dp=2, micro_batches=4,
        recompute=("always", ("",)), partition_activations=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [n for n in PLANS if n != "slices"])
def test_values_in_parts_come_to_the_plain_model(name: str) -> None:
    assert_equal(planned(net(), data(), PLANS[name]), plainly(net(), data(), 4))


@pytest.mark.parametrize("shared", (False, True))
def test_stored_inputs_are_divided_by_the_team_as_predicted(shared: bool) -> None:
    plan = replace(INPUTS, partition_activations=shared)

    def work(transport: Transport) -> tuple[list[int], list[int]]:
        sample = torch.empty(SAMPLES, 3, 6, 6, dtype=torch.float64)
        trainer = Trainer(net(), F.cross_entropy, sgd, sample, plan, transport=transport)
        trainer.step(*data()[0])
        rank = transport.rank
        row = live(trainer.schedule, trainer.plan, trainer.costs)[rank][0]
        actions = trainer.schedule.ranks[rank]
        said = [m.activations for a, m in zip(actions, row, strict=True) if forward(a)]
        assert trainer.session.measured is not None
        pairs = zip(
            trainer.session.measured.events, trainer.session.measured.memory[0], strict=True
        )
        return said, [m.activations for event, (_, m) in pairs if forward(event.parsed())]

    def forward(action: Any) -> bool:
        return action.computes and action.kind is Kind.FORWARD

    for rank, (said, seen) in enumerate(run(plan.world, work)):
        if rank in (2, 3, 4):
            each = WHOLE // (PARTS if shared else 1)
            assert said == seen == [each * n for n in (1, 2, 3, 4)]


def test_p_a_goes_to_the_host_as_well() -> None:
    found = planned(net(), data(), PLANS["inputs, put away"]).timeline
    for row in found.memory[2:5]:
        assert (
            max(m.offloaded for _, m in row) % (WHOLE // PARTS)
            == 0
            < max(m.offloaded for _, m in row)
        )


def test_parts_are_put_together_with_the_strides_they_had() -> None:
    def work(transport: Transport) -> None:
        ranks = tuple(range(transport.world))
        group = SpatialGroup((transport.world,), ranks, transport.rank, transport)
        sharding = PartitionedActivations(group)
        x = torch.arange(2 * 3 * 5 * 7.0).view(2, 3, 5, 7)
        last = x.contiguous(memory_format=torch.channels_last)
        for y in (x, last, x.permute(3, 1, 0, 2), x[0, 0, 0, 0], torch.arange(3) > 1):
            form, part = sharding.shard(y)
            found = form.unshard(part)
            assert part.numel() == -(-y.numel() // group.size)
            assert torch.equal(found, y) and found.stride() == y.stride()
        form, part = sharding.shard(x[:, :, ::2])  # with holes, which nobody keeps
        assert torch.equal(form.unshard(part), x[:, :, ::2])

    run(4, work)


def test_it_is_refused_where_nothing_is_kept_by_all() -> None:
    with pytest.raises(PlanError, match="no stage is both on several ranks and recomputed"):
        Plan(stages=2, recompute="always", partition_activations=True)
    with pytest.raises(PlanError, match="no stage is both on several ranks and recomputed"):
        Plan(stages=2, spatial="2x1", recompute=("never", "always"), partition_activations=True)
    with pytest.raises(PlanError, match="is in tiles already, like the image"):
        planned(net(), data(), PLANS["slices"])
