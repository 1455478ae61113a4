"""Real architectures over stages: the same numbers, and skips that go straight to their readers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from gems.model.graph import crossings
from gems.planner.assign import stages_by_name, written
from gems.plans.plan import Plan
from gems.schedule.build import lowered
from gems.torch.tracing.profile import measure
from gems.torch.tracing.trace import trace
from tests import networks
from tests.exact import alone, assert_equal, batches, plainly, planned

# Thin, and on small images, but with every block of the real thing.
NETWORKS: dict[str, tuple[str, dict[str, Any], int]] = {
    "ResNet-50": ("resnet50", {"width": 2, "num_classes": 5}, 64),
    "ResNet-110-v2": ("resnet110_v2", {"width": 2, "num_classes": 5}, 8),
    "DenseNet-121": ("densenet121", {"growth": 2, "width": 4, "num_classes": 5}, 64),
    "AmoebaNet-D": ("amoebanet_d", {"num_layers": 3, "num_filters": 8, "num_classes": 5}, 64),
    "U-Net": ("unet", {"width": 2, "levels": 4, "num_classes": 5}, 19),
    "EfficientNet": (
        "efficientnet_b0",
        {"stem": 4, "head": 8, "num_classes": 5, "dropout": 0.0, "drop_path": 0.0}
        | {"groups": ((1, 4, 1, 1, 3), (6, 4, 2, 2, 3), (6, 6, 2, 2, 5), (6, 8, 2, 1, 3))},
        16,
    ),
    "ConvNeXt": (
        "convnext_tiny",
        {"depths": (1, 1, 3, 1), "dims": (4, 4, 6, 8), "num_classes": 5, "scale": 0.1},
        32,
    ),
    "ViT": (
        "vit_base",
        {"image_size": 16, "patch": 4, "width": 8, "depth": 4, "heads": 2, "num_classes": 5},
        16,
    ),
}
PLANS = {
    "bidirectional": Plan(stages=3, replications=2, schedule="gems"),
    "bidirectional zero-bubble": Plan(stages=4, replications=2, schedule="gems-zb"),
    "zero-bubble": Plan(stages=3, micro_batches=4, schedule="zero-bubble"),
    "fold": Plan(stages=4, micro_batches=4, schedule="auto", placement="fold"),
    "1f1b × data 2": Plan(stages=2, micro_batches=2, schedule="1f1b", data=2),
    "two stages": Plan(stages=2, micro_batches=4, schedule="1f1b"),
    "two ways": Plan(
        stages=2, micro_batches=4, schedule="auto", bidirectional=True, max_in_flight=1
    ),
}
# Recording takes most of a test's time, so the deepest networks get fewer plans and ranks.
DEEP = {
    "ResNet-50": ("bidirectional", "fold"),
    "ResNet-110-v2": ("two ways", "fold"),
    "DenseNet-121": ("two ways",),
    "AmoebaNet-D": ("two stages", "fold"),
}
CASES = [(name, plan) for name in NETWORKS for plan in DEEP.get(name, tuple(PLANS)[:-2])]


def network(name: str, **more: Any) -> Any:
    kind, options, _ = NETWORKS[name]
    torch.manual_seed(0)
    return networks.build(kind, **(options | more)).double()


def data_for(name: str, steps: int = 2) -> list[Any]:
    side = NETWORKS[name][2]
    # Few pixels are left at the end of deep ones, and BatchNorm over few values amplifies rounding.
    samples = 8 if name in DEEP else 5
    data = batches((samples, 3, side, side), 5, steps, torch.float64)
    if name == "U-Net":  # a class for each pixel
        draw = torch.Generator().manual_seed(2)
        data = [(x, torch.randint(5, (len(x), side, side), generator=draw)) for x, _ in data]
    return data


@pytest.mark.parametrize(("name", "plan"), CASES)
def test_a_real_architecture_trains_like_the_plain_one(name: str, plan: str) -> None:
    model, data = network(name), data_for(name)
    assert_equal(planned(model, data, PLANS[plan]), plainly(model, data, PLANS[plan].total))


DROPPING = {
    "EfficientNet": {"dropout": 0.2, "drop_path": 0.4},
    "ViT": {"dropout": 0.2},
    "AmoebaNet-D": {"drop_path": 0.3},
}


@pytest.mark.parametrize("plan", ["bidirectional zero-bubble", "1f1b × data 2"])
@pytest.mark.parametrize("name", DROPPING)
def test_dropout_and_stochastic_depth_are_those_of_one_rank(name: str, plan: str) -> None:
    model, data = network(name, **DROPPING[name]), data_for(name)
    found = planned(model, data, PLANS[plan])
    assert_equal(found, alone(model, data, PLANS[plan].total))
    again = planned(model, data, PLANS[plan], seed=1)
    assert again.losses != found.losses, "another seed drops other things"


# --- skips ------------------------------------------------------------------------------------


def unet(levels: int = 3) -> Any:
    torch.manual_seed(0)
    return networks.build("unet", width=4, levels=levels, num_classes=5).double()


def by_level(levels: int) -> list[list[str]]:
    """A stage for each level on the way down, the lowest, and each level on the way up."""
    down = [[f"encoder.{i}"] for i in range(levels)]
    up = [[f"up.{i}", f"decoder.{i}"] for i in range(levels - 1)]
    down[1] = ["pool", *down[1]]
    for i in range(2, levels):
        down[i].insert(0, f"pool:{i}")
    up[-1].append("head")
    return [*down, *up]


def test_a_level_wise_partition_of_a_unet_keeps_long_skips_on_their_rank() -> None:
    # rank 0   encoder.0 ─ skip ─ up.1 decoder.1 head         stages 0 and 4
    # rank 1   encoder.1 ─ skip ─ up.0 decoder.0              stages 1 and 3
    # rank 2   encoder.2                                      stage  2
    plan = Plan(stages=by_level(3), micro_batches=3, schedule="auto", placement="fold")
    model = unet()
    graph = trace(model, torch.empty(1, 3, 16, 16, dtype=torch.float64)).graph
    stage_of = stages_by_name(graph, plan.stages)
    assert set(crossings(graph, stage_of)) == {(0, 1), (0, 4), (1, 2), (1, 3), (2, 3), (3, 4)}
    full = written(plan, graph, stage_of)
    moved = {(a.message.source, a.message.target) for _, a in lowered(full) if a.way == ">"}
    assert moved == {(0, 1), (1, 2), (2, 3), (3, 4), (4, 3), (3, 2), (2, 1), (1, 0)}

    data = batches((3, 3, 16, 16), 5, 2, torch.float64)
    data = [(x, y[:, None, None].expand(-1, 16, 16)) for x, y in data]
    assert_equal(planned(model, data, plan), plainly(model, data, 3))


def test_the_level_wise_partition_moves_fewer_bytes_than_a_straight_one() -> None:
    graph = trace(unet(), torch.empty(1, 3, 32, 32, dtype=torch.float64)).graph

    def moved(plan: Plan) -> int:
        stage_of = stages_by_name(graph, plan.stages)
        return sum(
            graph.value[name].bytes
            for (a, b), names in crossings(graph, stage_of).items()
            for name in names
            if plan.rank_for(a, 0) != plan.rank_for(b, 0)
        )

    levels = by_level(3)
    folded, straight = Plan(stages=levels, placement="fold"), Plan(stages=levels)
    assert moved(folded) < 0.7 * moved(straight)


def test_a_long_skip_goes_straight_from_its_producer_to_its_reader() -> None:
    model = unet()
    graph = trace(model, torch.empty(1, 3, 16, 16, dtype=torch.float64)).graph
    plan = Plan(stages=by_level(3), micro_batches=2, schedule="gpipe")
    plan = written(plan, graph, stages_by_name(graph, plan.stages))
    found = crossings(graph, stages_by_name(graph, plan.stages))
    skip = "encoder.0.5"  # the output of the first level's last layer
    assert [pair for pair, names in found.items() if skip in names] == [(0, 1), (0, 4)]
    schedule = lowered(plan)
    assert "0F0>4" in {str(a) for a in schedule.ranks[0]}
    assert "4F0<0" in {str(a) for a in schedule.ranks[4]}
    between = {str(a) for rank in (1, 2, 3) for a in schedule.ranks[rank]}
    assert not between & {"1F0>4", "2F0>4"}, "nobody relays it"
    data = batches((2, 3, 16, 16), 5, 2, torch.float64)
    data = [(x, y[:, None, None].expand(-1, 16, 16)) for x, y in data]
    assert_equal(planned(model, data, plan), plainly(model, data, 2))


def test_a_value_with_many_readers_is_sent_once_to_each_stage() -> None:
    """A dense block reads its first value in every layer."""
    model = networks.build("densenet121", growth=2, width=4, layers=(4,), num_classes=5).double()
    graph = trace(model, torch.empty(1, 3, 16, 16, dtype=torch.float64)).graph
    stage_of = [min(3, i * 4 // len(graph.blocks)) for i in range(len(graph.blocks))]
    for (a, _), names in crossings(graph, stage_of).items():
        assert len(set(names)) == len(names)
        for name in names:
            assert stage_of[graph.producer[name]] == a, "only its producer sends a value"


def test_measured_costs_cut_a_model_as_well() -> None:
    model, data = network("U-Net"), data_for("U-Net", 1)
    traced = trace(model, data[0][0][:2])
    costs = measure(traced, model, torch.device("cpu"))
    assert len(costs) == len(traced.graph.blocks)
    assert all(cost.f > 0 for cost in costs.items)
    plan = Plan(stages=3, micro_batches=3, schedule="gpipe")
    assert_equal(
        planned(model, data, plan, cross_entropy, costs="measure"), plainly(model, data, 3)
    )
