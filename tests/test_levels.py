"""The level-wise partition: an encoder level and its decoder level on one rank, skips included."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from gems import models
from gems.cli.main import main
from gems.errors import PlanError
from gems.hardware import machine
from gems.model.costs import Cost, Costs
from gems.model.estimate import estimate
from gems.model.graph import Block, Graph, Value, crossings
from gems.planner.assign import stages, written
from gems.planner.candidates import choices
from gems.planner.compile import compile_plan
from gems.planner.explain import explain
from gems.planner.levels import has_long_skips, level_pairs, skips
from gems.planner.request import Request
from gems.planner.search import search
from gems.plans.plan import Plan
from gems.schedule.build import lowered
from gems.torch.tracing.trace import trace
from gems.transport.protocol import Transport
from tests.exact import assert_equal, batches, join, plainly, planned, trained
from tests.worlds import spawn

V100 = machine("v100")
NETWORKS = {
    "unet": [{"levels": n} for n in (2, 3, 4, 5)] + [{"levels": 4, "norm": "none"}],
    "relaynet": [{"levels": n} for n in (2, 3, 4)],
}
SETTINGS = [(name, i) for name, all_ in NETWORKS.items() for i in range(len(all_))]


@cache
def network(name: str, which: int) -> tuple[Graph, Costs]:
    with torch.device("meta"):
        model = models.build(name, **NETWORKS[name][which]).train()
    graph = trace(model, torch.empty(1, 3 if name == "unet" else 1, 64, 64, device="meta")).graph
    return graph, estimate(graph, V100)


def long_skips(graph: Graph) -> Iterator[tuple[int, int]]:
    """By name, as no code of ours may: what the decoder reads of the encoder, maxima included."""
    for reader, block in enumerate(graph.blocks):
        for name in block.reads if block.name.startswith(("cat", "unpool")) else ():
            writer = graph.blocks[graph.producer[name]].name
            if writer.startswith(("encoder", "pool")):
                yield graph.producer[name], reader


def leaving(graph: Graph, plan: Plan, stage_of: list[int]) -> int:
    ranks = [plan.rank_of(stage, 0) for stage in stage_of]
    return sum(ranks[a] != ranks[b] for a, b in long_skips(graph))


def sent(graph: Graph, plan: Plan, stage_of: list[int]) -> int:
    """Bytes that leave their rank, forward, per micro-batch."""
    return sum(
        graph.value[name].bytes
        for (a, b), names in crossings(graph, stage_of).items()
        for name in names
        if plan.rank_of(a, 0) != plan.rank_of(b, 0)
    )


def folds(depth: int, balance: str = "time") -> tuple[Plan, Plan]:
    """The even partition, and the level-wise one, on the same ranks."""
    fold, levels = (
        Plan(stages=depth, placement=name, schedule="auto", micro_batches=4, balance=balance)
        for name in ("fold", "levels")
    )
    return fold, levels


# --- which blocks ---------------------------------------------------------------------------------


@pytest.mark.parametrize("balance", ["time", "memory"])
@pytest.mark.parametrize(("name", "which"), SETTINGS)
def test_no_long_skip_leaves_its_rank(name: str, which: int, balance: str) -> None:
    graph, costs = network(name, which)
    expected = (2 if name == "relaynet" else 1) * NETWORKS[name][which]["levels"]
    assert len(list(long_skips(graph))) == expected - (name == "unet")
    left = 0
    for depth in (3, 4, 5, 6, 7, 8, 11, 12, 15):
        fold, levels = folds(depth, balance)
        stage_of = stages(levels, graph, costs)
        assert sorted(set(stage_of)) == list(range(depth)) and stage_of == sorted(stage_of)
        assert leaving(graph, levels, stage_of) == 0, depth
        left += leaving(graph, fold, stages(fold, graph, costs))
    assert left > 0, "the even partition keeps them only by chance"


def test_levels_are_more_even_than_stages_and_send_less() -> None:
    """Of a rank, not of each stage, is what is evened out."""
    graph, costs = network("unet", 3)
    for depth in (4, 7, 8, 15):
        loads, bytes_ = [], []
        for plan in folds(depth):
            stage_of = stages(plan, graph, costs)
            by_rank = [0.0] * plan.ranks
            for cost, stage in zip(costs.items, stage_of, strict=True):
                by_rank[plan.rank_of(stage, 0)] += cost.seconds
            loads.append(max(by_rank) * plan.ranks / sum(by_rank))
            bytes_.append(sent(graph, plan, stage_of))
        assert loads[1] < loads[0] and loads[1] < 1.15
        assert bytes_[1] < 0.6 * bytes_[0]


@pytest.mark.parametrize(("name", "side"), [("unet", 1024), ("relaynet", 512)])
def test_the_table_of_the_manual_is_true(name: str, side: int) -> None:
    with torch.device("meta"):
        model = models.build(name).train()
    sample = torch.empty(1, 3 if name == "unet" else 1, side, side, device="meta")
    graph = trace(model, sample).graph
    costs, text = estimate(graph, V100), Path("docs/planning.md").read_text(encoding="utf-8")
    for ranks in (2, 4, 8) if name == "unet" else (4, 8):
        cells = []
        for plan in (Plan(stages=ranks), *folds(2 * ranks - 1)):
            stage_of = stages(plan, graph, costs)
            size = sent(graph, plan, stage_of) / 2**20
            cells.append(f"{leaving(graph, plan, stage_of)}, {size:.0f}")
        shown = {"unet": "U-Net", "relaynet": "ReLayNet"}[name]
        assert f"| {shown}, {side}² | {ranks} | {' | '.join(cells)} |" in text


def hourglass(times: list[int], sizes: list[int]) -> tuple[Graph, Costs]:
    """A chain of blocks, of which each of the first half is read once more by its mirror image."""
    n = len(times)
    back = {n - 1 - i: (f"v{i}",) for i in range(n // 2 - 1)}
    blocks = tuple(
        Block(f"b{i}", f"b{i}", ((f"v{i - 1}" if i else "x"), *back.get(i, ())), (f"v{i}",))
        for i in range(n)
    )
    values = [Value("x", (1,), (1,), "uint8", False)]
    values += [Value(f"v{i}", (sizes[i],), (1,), "uint8", True) for i in range(n)]
    graph = Graph(blocks, tuple(values), ("x",), (f"v{n - 1}",), (), ())
    return graph, Costs(tuple(Cost(t, 0, 0, 0) for t in times))


@pytest.mark.parametrize("seed", range(20))
def test_the_partition_is_the_most_even_of_all_that_keep_skips(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    times = torch.randint(1, 9, (12,), generator=draw).tolist()
    graph, costs = hourglass(times, torch.randint(1, 9, (12,), generator=draw).tolist())
    plan = Plan(stages=5, placement="levels", schedule="auto")

    def load(starts: tuple[int, ...]) -> float:
        ends = (*starts[1:], 12)
        by_stage = [sum(times[a:b]) for a, b in zip(starts, ends, strict=True)]
        return max(by_stage[0] + by_stage[4], by_stage[1] + by_stage[3], by_stage[2])

    def keeps(starts: tuple[int, ...]) -> bool:
        stage_of = [sum(a <= i for a in starts) - 1 for i in range(12)]
        ranks = [plan.rank_of(stage, 0) for stage in stage_of]
        return all(ranks[i] == ranks[11 - i] for i in range(5))

    every = [(0, *inner) for inner in combinations(range(1, 12), 4)]
    best = min(load(starts) for starts in every if keeps(starts))
    stage_of = stages(plan, graph, costs)
    found = tuple(stage_of.index(stage) for stage in range(5))
    assert keeps(found) and load(found) <= 1.05 * best


def test_within_a_limit_no_rank_has_more_bytes() -> None:
    graph, costs = network("unet", 1)
    _, plan = folds(5)

    def needs(stage_of: list[int]) -> float:
        by_rank = [0.0] * plan.ranks
        for i, stage in enumerate(stage_of):
            by_rank[plan.rank_of(stage, 0)] += graph.first_saved[i] + 4 * costs[i].weights
        return max(by_rank)

    free, lean = stages(plan, graph, costs), stages(folds(5, "memory")[1], graph, costs)
    assert needs(lean) < needs(free)
    limit = (needs(lean) + needs(free)) / 2
    tight = stages(plan, graph, costs, limit)
    assert needs(tight) <= limit and tight != lean
    assert leaving(graph, plan, tight) == 0
    assert stages(plan, graph, costs, 1.0) == lean, "if nothing fits, bytes are evened out"


class Conditioned(nn.Module):
    """An embedding that every level reads, as in diffusion models, and residuals inside levels."""

    def __init__(self, levels: int, wide: int) -> None:
        super().__init__()
        self.embed = nn.Linear(4, wide)
        self.down = nn.ModuleList(nn.Conv2d(wide, wide, 3, padding=1) for _ in range(levels))
        self.up = nn.ModuleList(nn.Conv2d(2 * wide, wide, 3, padding=1) for _ in range(levels))
        self.stem = nn.Conv2d(3, wide, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        shift = self.embed(x.mean((2, 3)).repeat(1, 2)[:, :4])[:, :, None, None]
        x, kept = self.stem(x), []
        for block in self.down:
            x = x + torch.relu(block(x) + shift)
            kept.append(x)
        for block in self.up:
            x = torch.relu(block(torch.cat((kept.pop(), x), 1)) + shift)
        return x.mean((2, 3))


@pytest.mark.parametrize("levels", [6, 40])
def test_what_every_level_reads_is_no_long_skip_in_large_models_too(levels: int) -> None:
    model = Conditioned(levels, 8)
    graph = trace(model, torch.empty(1, 3, 32, 32)).graph
    assert len(graph.blocks) > 150 or levels == 6
    costs = estimate(graph, V100)
    _, plan = folds(7)
    stage_of = stages(plan, graph, costs)
    ranks = [plan.rank_of(stage, 0) for stage in stage_of]
    large = [s for s in skips(graph) if s.bytes > 1000]
    assert len(large) >= 2 * levels - 1
    assert all(ranks[s.writer] == ranks[s.reader] for s in large)
    assert any(ranks[s.writer] != ranks[s.reader] for s in skips(graph)), "the embedding"


def test_a_model_without_levels_is_rejected_with_what_to_use() -> None:
    """Each block reads the two before it: every boundary is passed by two values."""
    graph, costs = hourglass([1] * 8, [1] * 8)
    blocks = [
        Block(b.name, b.name, (f"v{i - 1}", f"v{i - 2}")[: min(i, 2)] or ("x",), b.writes)
        for i, b in enumerate(graph.blocks)
    ]
    graph = Graph(tuple(blocks), graph.values, ("x",), ("v7",), (), ())
    assert not any(b - a > 1 for a, b, _ in level_pairs(graph) if a > 1)
    with pytest.raises(PlanError, match=r"needs 3 pairs of boundaries.*use fewer stages, or plac"):
        stages(Plan(stages=7, placement="levels", schedule="auto"), graph, costs)


# --- the planner ----------------------------------------------------------------------------------


def test_the_planner_prices_levels_beside_the_even_partition() -> None:
    graph, costs = network("unet", 1)
    assert has_long_skips(graph, 4)
    families = [c.family for c in choices(graph, 4, 4)]
    assert {"fold", "levels", "levels, copies"} <= set(families)
    request = Request(4, 2**34, 4)
    assert "levels " in explain(search(graph, costs, V100, request))
    graph, costs = network("unet", 3)
    fold, levels = (
        compile_plan(plan, graph, costs, V100, request).prediction.seconds for plan in folds(7)
    )
    assert levels < fold
    with torch.device("meta"):
        chain = trace(models.build("resnet_v1", depth=20), torch.empty(1, 3, 32, 32)).graph
    assert "levels" not in {c.family for c in choices(chain, 4, 4)}


def test_a_level_wise_plan_is_proven_by_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("unet", "relaynet"):
        options = ["--model", name, "--image-size", "32", "--num-filters", "2", "--batch-size", "4"]
        plan = ["--stages", "5", "--placement", "levels", "--schedule", "auto", "--parts", "4"]
        assert main(["check", *options, *plan]) == 0
    assert "no deadlock" in capsys.readouterr().out


# --- the same numbers -----------------------------------------------------------------------------


def small(name: str) -> nn.Module:
    torch.manual_seed(0)
    return models.build(name, width=2, levels=3, num_classes=3).double()


def data_for(name: str, samples: int) -> list[Any]:
    draw = torch.Generator().manual_seed(2)
    images = batches((samples, 3 if name == "unet" else 1, 16, 16), 3, 2, torch.float64)
    return [(x, torch.randint(3, (samples, 16, 16), generator=draw)) for x, _ in images]


PLANS = {
    "unet": Plan(stages=5, placement="levels", schedule="auto", micro_batches=3),
    "relaynet": Plan(stages=4, placement="levels", schedule="gpipe", micro_batches=3),
    "unet, both ways": Plan(
        stages=5, placement="levels", schedule="auto", micro_batches=4, bidirectional=True
    ),
    "relaynet, copies": Plan(
        stages=3, placement="levels", schedule="auto", micro_batches=2, data=2, balance="memory"
    ),
}


@pytest.mark.parametrize("case", PLANS)
def test_threads_train_like_the_plain_model(case: str) -> None:
    name, plan = case.partition(",")[0], PLANS[case]
    data = data_for(name, plan.total)
    found = planned(small(name), data, plan)
    assert_equal(found, plainly(small(name), data, plan.total))


def rank(transport: Transport, name: str, plan: Plan) -> tuple[Any, int]:
    """What a rank sees of two steps, and the bytes that it sends to others in both."""
    sizes, isend = [], transport.isend

    def counting(buffer: Tensor, target: int) -> Any:
        sizes.append(buffer.numel() * buffer.element_size())
        return isend(buffer, target)

    with mock.patch.object(transport, "isend", counting):
        found = trained(transport, small(name), data_for(name, plan.total), plan)
    return found, sum(sizes)


@pytest.mark.parametrize("name", ["unet", "relaynet"])
def test_processes_train_like_the_plain_model_and_send_no_skip(name: str) -> None:
    plan = PLANS[name]
    data = data_for(name, plan.total)
    results = spawn(plan.world, rank, name, plan)
    found = join([outcome for outcome, _ in results])
    assert_equal(found, plainly(small(name), data, plan.total))

    graph = trace(small(name), data[0][0][:1]).graph
    stage_of = stages(plan, graph, estimate(graph, machine("cpu")))
    assert leaving(graph, plan, stage_of) == 0
    full = written(plan, graph, stage_of)
    between = {(a.message.source, a.message.target) for _, a in lowered(full) if a.way == ">"}
    assert all(abs(a - b) == 1 for a, b in between), "each rank sends to its neighbours alone"
    forward_and_backward = 2 * plan.total * sent(graph, plan, stage_of)
    assert sum(size for _, size in results) == len(data) * forward_and_backward
