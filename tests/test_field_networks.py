"""The networks of the field, cut: ReLayNet's indices, CosmoFlow's cubes, ResNet-101's depth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from gems.model.graph import crossings
from gems.planner.assign import stages_by_name
from gems.plans.plan import Plan
from gems.torch.tracing.trace import trace
from gems.transport.protocol import Transport
from tests import networks
from tests.exact import alone, assert_equal, join, plainly, planned, trained
from tests.worlds import spawn

CLASSES = 3
RELAYNET = ("relaynet", {"width": 3, "num_classes": CLASSES}, (1, 27, 22))
COSMOFLOW = ("cosmoflow", {"image_size": 32, "width": 1, "dropout": 0.0}, (4, 32, 32, 32))
MLPERF = ("cosmoflow_mlperf", {"image_size": 16, "width": 2, "dropout": 0.0}, (4, 16, 16, 16))
RESNET = ("resnet101", {"width": 2, "num_classes": CLASSES}, (3, 36, 33))

Network = tuple[str, dict[str, Any], tuple[int, ...]]


def network(which: Network, **more: Any) -> nn.Module:
    name, options, _ = which
    torch.manual_seed(0)
    return networks.build(name, **(options | more)).double()


def data_for(which: Network, samples: int) -> list[Any]:
    name, _, shape = which
    draw = torch.Generator().manual_seed(1)
    images = torch.randn(samples, *shape, generator=draw, dtype=torch.float64)
    if name.startswith("cosmoflow"):
        return [(images, torch.randn(samples, 4, generator=draw, dtype=torch.float64))]
    size = (samples, *(shape[1:] if name == "relaynet" else ()))
    return [(images, torch.randint(CLASSES, size, generator=draw))]


def loss_for(which: Network) -> Callable[..., torch.Tensor]:
    return mse_loss if which[0].startswith("cosmoflow") else cross_entropy


CASES: dict[str, tuple[Network, Plan]] = {
    "ReLayNet, both ways": (RELAYNET, Plan(stages=3, replications=1, schedule="gems")),
    "ReLayNet, 2x1 tiles": (
        RELAYNET,
        Plan(stages=1, micro_batches=2, schedule="sequential", spatial=[(2, 1)]),
    ),
    "ReLayNet, 2x1 tiles to whole, d2": (
        RELAYNET,
        Plan(stages=2, micro_batches=2, spatial=[(2, 1)], halo="d2"),
    ),
    "CosmoFlow, pipeline": (COSMOFLOW, Plan(stages=3, micro_batches=2, schedule="1f1b")),
    "CosmoFlow, depth to whole": (
        COSMOFLOW,
        Plan(
            stages=[[f"blocks.{i}" for i in range(3)],
                    [*(f"blocks.{i}" for i in range(3, 7)), "flatten", "hidden", "head"]],
            micro_batches=2, spatial=[(2, 1, 1)],
        ),
    ),
    "CosmoFlow of MLPerf, depth to whole": (
        MLPERF,
        Plan(
            stages=[["blocks"], ["flatten", "hidden", "head"]], micro_batches=2,
            spatial=[(2, 1, 1)],
        ),
    ),
    "ResNet-101, zero-bubble": (
        RESNET, Plan(stages=2, micro_batches=2, schedule="zero-bubble")
    ),
    "ResNet-101, tiles to whole": (RESNET, Plan(stages=2, micro_batches=1, spatial=[(1, 2)])),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_network_of_the_field_trains_like_the_plain_one(case: str) -> None:
    which, plan = CASES[case]
    model, data, loss = network(which), data_for(which, 4), loss_for(which)
    expected = plainly(model, data, plan.total, loss)
    assert all(g is not None for g in expected.gradients[0].values())
    assert_equal(planned(model, data, plan, loss), expected)


def test_pooling_indices_go_straight_to_the_stage_that_unpools() -> None:
    # stage 0   encoder.0 pool ─ skip, indices ────────────► stage 2   decoder.2 head
    # stage 1   all between
    model = network(RELAYNET)
    graph = trace(model, data_for(RELAYNET, 1)[0][0]).graph
    inner = ["encoder.1", "pool:2", "encoder.2", "pool:3", "bottom"]
    inner += ["unpool", "decoder.0", "unpool:2", "decoder.1"]
    stages = [["encoder.0", "pool"], inner, ["unpool:3", "decoder.2", "head"]]
    over = crossings(graph, stages_by_name(graph, stages))[0, 2]
    assert sorted(graph.value[name].dtype for name in over) == ["float64", "int64"]
    plan = Plan(stages=stages, micro_batches=2, schedule="1f1b")
    data = data_for(RELAYNET, 2)
    assert_equal(planned(model, data, plan), plainly(model, data, 2))


def test_the_dropout_of_a_cosmoflow_is_that_of_one_rank() -> None:
    model, data = network(MLPERF, dropout=0.5), data_for(MLPERF, 2)
    plan = Plan(stages=2, micro_batches=2, schedule="1f1b", spatial=[(2, 1, 1)])
    assert_equal(planned(model, data, plan, mse_loss), alone(model, data, 2, mse_loss))


def rank(transport: Transport, plan: Plan) -> Any:
    return trained(transport, network(RELAYNET), data_for(RELAYNET, 4), plan)


def test_pooling_indices_travel_between_processes_too() -> None:
    plan = Plan(stages=2, micro_batches=2, schedule="1f1b", spatial=[(2, 1)])
    expected = plainly(network(RELAYNET), data_for(RELAYNET, 4), 2)
    assert_equal(join(spawn(plan.world, rank, plan)), expected)
