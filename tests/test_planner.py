"""The planner: partitions, what tiles cost, which plan, and why."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from random import Random
from unittest import mock

import pytest
import torch
from torch import nn

import gems
from gems import models
from gems.cli.main import main
from gems.errors import PlanError
from gems.files import from_json, to_json
from gems.hardware import Link, Machine, machine
from gems.model.costs import Cost, Costs
from gems.model.estimate import estimate
from gems.model.graph import Block, Graph, Value
from gems.planner.assign import stages, stages_by_name
from gems.planner.candidates import choices, offloading, recomputing, sharding
from gems.planner.coarsen import coarse
from gems.planner.explain import chosen, explain
from gems.planner.in_flight import in_flight
from gems.planner.memo import Memo
from gems.planner.partition import Budget, partition
from gems.planner.request import Request
from gems.planner.search import Search, search
from gems.planner.techniques import levels
from gems.plans.describe import describe
from gems.plans.plan import Plan
from gems.predict.recompute_cost import footprint
from gems.predict.simulate import simulate
from gems.predict.stage_costs import price
from gems.schedule.build import build
from gems.schedule.greedy import least
from gems.torch.planning import Study, plan
from gems.torch.spatial.halo_costs import with_halos
from gems.torch.tracing.trace import trace
from gems.torch.trainer import Trainer
from gems.transport.protocol import Transport
from gems.transport.threads import run

V100 = machine("v100")


def traced(model: nn.Module, *shape: int) -> Graph:
    found = trace(model.train(), torch.empty(shape, device="meta"))
    return with_halos(found, model)


def resnet(side: int = 64, samples: int = 2, depth: int = 14) -> Graph:
    with torch.device("meta"):
        return traced(models.build("resnet_v1", depth=depth), samples, 3, side, side)


# --- partitions --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_a_partition_within_a_budget_is_the_best_of_all_that_fit(seed: int) -> None:
    r = Random(seed)
    n, parts = r.randint(3, 8), r.randint(2, 3)
    weights = [r.randint(1, 9) for _ in range(n)]
    budget = Budget([[r.randint(1, 9) for _ in range(n)] for _ in range(parts)], r.randint(9, 25))

    def load(starts: tuple[int, ...], rows: list[list[int]]) -> list[int]:
        ends = pairwise((*starts, n))
        return [sum(row[a:b]) for row, (a, b) in zip(rows, ends, strict=True)]

    every = [(0, *inner) for inner in combinations(range(1, n), parts - 1)]
    fitting = [s for s in every if max(load(s, [*map(list, budget.bytes)])) <= budget.limit]
    found = tuple(partition(weights, [0.0] * (n + 1), parts, budget=budget))
    assert found in every
    if fitting:
        best = min(max(load(s, [weights] * parts)) for s in fitting)
        assert found in fitting
        assert max(load(found, [weights] * parts)) <= 1.03 * best
    else:
        best = min(max(load(s, [*map(list, budget.bytes)])) for s in every)
        assert max(load(found, [*map(list, budget.bytes)])) <= 1.03 * best


def test_within_a_limit_the_first_stages_get_fewer_blocks_for_they_save_more() -> None:
    with torch.device("meta"):
        graph = traced(models.build("resnet_v1", depth=32), 2, 3, 64, 64)
    costs = estimate(graph, V100)
    wanted = Plan(stages=4, micro_batches=8)
    free = stages(wanted, graph, costs)
    needs = [graph.activations([i for i, s in enumerate(free) if s == k]) for k in range(4)]
    assert in_flight(wanted) == [4, 3, 2, 1]
    limit = 0.6 * 4 * needs[0]
    tight = stages(wanted, graph, costs, limit)
    assert tight.count(0) < free.count(0)
    for s, k in enumerate(in_flight(wanted)):
        mine = [i for i, stage in enumerate(tight) if stage == s]
        assert k * graph.activations(mine) <= limit


def test_spatial_stages_end_before_what_cannot_be_tiled() -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1)]
    layers += [nn.Flatten(), nn.Linear(4 * 64, 64), nn.ReLU(), nn.Linear(64, 5)]
    graph = traced(nn.Sequential(*layers), 2, 3, 8, 8)
    assert [b.whole for b in graph.blocks] == [False] * 3 + [True] * 4
    heavy = Costs(tuple(Cost(f=1 if b.whole else 1e-6) for b in graph.blocks))
    assert stages(Plan(stages=2, spatial=[(2, 1)]), graph, heavy) == [0, 0, 0, 1, 1, 1, 1]
    alone = stages(Plan(stages=1, spatial=[(2, 1)]), graph, heavy)
    assert alone == [0] * 7, "whoever tiles it raises, with the reason"


def test_equal_numbers_of_layers_are_a_word() -> None:
    graph = resnet()
    costs = estimate(graph, V100)
    count = len(graph.layers)
    equal = stages(Plan(stages=4, balance="layers"), graph, costs)
    counts = tuple(count // 4 + (s < count % 4) for s in range(4))
    assert sum(counts) == count and equal == stages(Plan(stages=4, balance=counts), graph, costs)
    assert equal != stages(Plan(stages=4), graph, costs)
    with pytest.raises(PlanError, match=f"cannot divide {count} layers among {count + 1} stages"):
        stages(Plan(stages=count + 1, balance="layers"), graph, costs)


# --- what tiles cost ------------------------------------------------------------------------------


def test_halos_are_what_two_tiles_send_each_other_and_sums_what_all_add_up() -> None:
    layers = [nn.Conv2d(3, 4, 1), nn.Conv2d(4, 6, (3, 5), padding=(1, 2)), nn.BatchNorm2d(6)]
    graph = traced(nn.Sequential(*layers, nn.MaxPool2d(2)), 2, 3, 8, 12)
    conv, norm, pool = graph.blocks[1:]
    # Two rows of 12 cells, one each way, and four columns of 8; 2 samples x 4 channels x 4 bytes.
    assert conv.halos == (2 * 12 * 2 * 4 * 4, 4 * 8 * 2 * 4 * 4)
    assert (conv.exchanges, norm.sums, norm.totals) == (1, 2 * 6 * 4, 1)
    assert (norm.halos, pool.halos, pool.sums) == ((0, 0), (0, 0), 0)


LINK = Link(bandwidth=1000.0, latency=0.5)


def toy(halos: tuple[int, ...] = (), sums: int = 0) -> tuple[Graph, Costs, Machine]:
    block = Block(
        "conv", "conv", ("x",), ("y",), saves=((0, 900),), halos=halos, sums=sums,
        exchanges=int(bool(halos)), totals=int(bool(sums)),
    )  # fmt: skip
    values = [Value(n, (2, 3, 9, 8), (216, 72, 8, 1), "float32", True) for n in "xy"]
    graph = Graph((block,), tuple(values), ("x",), ("y",), (), ())
    costs = Costs((Cost(f=10, i=20, w=30, activations=900, launch=1, workspace=90),))
    return graph, costs, Machine("toy", V100.device, LINK, LINK)


def test_the_largest_tile_sets_the_pace_and_launches_are_not_shared() -> None:
    graph, costs, on = toy()
    cost = price(costs, graph, [0], Plan(spatial=[(2, 1)]), on)[0]
    share = 5 / 9
    assert (cost.f, cost.i, cost.w) == pytest.approx(
        (9 * share + 1, 19 * share + 1, 29 * share + 1)
    )
    assert (cost.activations, cost.workspace) == pytest.approx((900 * share, 90 * share))
    sliced = price(costs, graph, [0], Plan(local_dp=2), on)[0]
    assert sliced.f == pytest.approx(9 / 2 + 1)


def test_a_rank_in_the_middle_pays_for_halos_to_both_sides_and_sums_to_all() -> None:
    graph, costs, on = toy(halos=(600, 400), sums=48)
    ends = price(costs, graph, [0], Plan(spatial=[(2, 1)]), on)[0]
    assert ends.exchange == 300 + 48
    assert ends.f == pytest.approx(9 * 5 / 9 + 1 + 2 * 0.5 + 348 / 1000)
    assert ends.activations == pytest.approx(900 * 5 / 9 + 300)
    middle = price(costs, graph, [0], Plan(spatial=[(3, 2)]), on)[0]
    # 600 / 2 to each of two sides, over half the width; 400 / 2 to one side, over a third.
    assert middle.exchange == pytest.approx(300 + 200 / 3 + 5 * 48)
    assert middle.i == pytest.approx(19 / 6 + 1 + (3 + 5) * 0.5 + middle.exchange / 1000)


# --- the bound ------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "gems", "gems-zb", "zero-bubble", "auto"])
def test_no_order_is_shorter_than_the_bound(schedule: str) -> None:
    r = Random(schedule)
    for _ in range(30):
        p, m = r.randint(2, 5), r.randint(2, 7)
        wanted = Plan(stages=p, micro_batches=m, schedule=schedule)
        costs = Costs(tuple(Cost(r.random(), r.random(), r.random()) for _ in range(p)))
        taken = simulate(build(wanted, costs), wanted, costs).seconds
        assert least(wanted, costs) <= taken * (1 + 1e-9)


def test_no_plan_takes_fewer_bytes_than_its_bound() -> None:
    graph, seen = resnet(64, depth=8), 0
    memo = Memo(graph, estimate(graph, V100), V100, Request(2, 2**22, 4))
    options = list(choices(graph, 2, 4))
    blocks = len(graph.blocks)
    variants = [less for c in options for less in (*sharding(c, blocks), *recomputing(c))]
    variants += [less for c in options for less in offloading(c, blocks, "host")]
    for _, bound, compiled in Search(graph, memo, False, False).bounded((*options, *variants)):
        try:
            found = compiled.prediction
        except PlanError:  # which only an order can tell: no activations wait to be offloaded
            continue
        assert found.bytes >= bound.bytes - 64, describe(bound.plan)  # each kind is rounded
        seen += 1
    assert seen > 100


def test_the_bound_of_even_pipelines_is_what_they_take() -> None:
    for p, m in ((2, 4), (4, 8), (8, 8)):
        wanted = Plan(stages=p, micro_batches=m, schedule="1f1b")
        costs = Costs((Cost(f=1, i=1, w=0),) * p)
        assert (
            least(wanted, costs)
            == simulate(build(wanted), wanted, costs).seconds
            == 2 * (m + p - 1)
        )


# --- larger blocks --------------------------------------------------------------------------------


def test_lumps_keep_all_that_counts_and_their_names_stand_for_their_blocks() -> None:
    graph = resnet()
    costs = estimate(graph, V100)
    small, lumped = coarse(graph, costs, 12)
    assert len(small.blocks) == len(lumped) < len(graph.blocks) / 2
    whole, parts = range(len(graph.blocks)), range(len(small.blocks))
    assert small.activations(parts) == graph.activations(whole)
    assert small.held(parts) == graph.held(whole)
    assert sum(c.seconds for c in lumped.items) == pytest.approx(
        sum(c.seconds for c in costs.items)
    )
    assert sum(b.sums for b in small.blocks) == sum(b.sums for b in graph.blocks)
    for part, block in enumerate(small.blocks):  # also one by one, and with one kept in between
        start = graph.index[block.name]
        after = small.blocks[part + 1].name if part + 1 < len(small.blocks) else None
        run = range(start, graph.index[after] if after else len(graph.blocks))
        assert small.activations([part]) == graph.activations(run)
        assert small.trained([part]) == graph.trained(run)
        assert footprint(small, parts, {part}) == footprint(graph, whole, set(run))
    of_lumps = stages(Plan(stages=3), small, lumped)
    names = [
        [b.name for b, s in zip(small.blocks, of_lumps, strict=True) if s == k] for k in range(3)
    ]
    fine = stages_by_name(graph, names)
    assert fine == sorted(fine) and set(fine) == {0, 1, 2}
    assert coarse(graph, costs, 10_000) == (graph, costs)


# --- the search -----------------------------------------------------------------------------------


def test_every_family_is_tried_and_every_candidate_does_the_same_work() -> None:
    found = list(choices(resnet(samples=4), 8, 16))
    families = {choice.family for choice in found}
    assert {"data parallel", "pipeline", "both ways", "fold", "spatial"} <= families
    assert {"spatial, then pipeline", "spatial, then slices", "pipeline, copies"} <= families
    assert {choice.plan.world for choice in found} == {8}
    assert {choice.plan.total for choice in found} == {16}


def test_less_memory_gives_a_leaner_plan_until_nothing_fits() -> None:
    graph = resnet(256, depth=8)
    costs = estimate(graph, V100)

    def best(memory: float) -> tuple[float, float]:
        found = chosen(search(graph, costs, V100, Request(2, memory, 4)))
        assert found.bytes <= memory
        return found.seconds, found.bytes

    free = best(2**34)
    tight = best(0.6 * free[1])
    assert tight[1] < free[1] and tight[0] >= free[0]
    lean = search(graph, costs, V100, Request(2, 2**34, 4, "memory")).best
    assert lean.bytes <= tight[1]
    with pytest.raises(PlanError, match=r"nothing fits 2 ranks with 64.0 KiB each. The leanest is"):
        chosen(search(graph, costs, V100, Request(2, 2**16, 4)))


def test_the_choice_is_as_fast_as_the_fastest_of_all_that_were_simulated() -> None:
    graph = resnet(128)
    costs = estimate(graph, V100)
    request = Request(4, 2**34, 8)
    found = search(graph, costs, V100, request)
    fastest = min(c.seconds for c in found.fitting)
    assert found.best.seconds <= 1.05 * fastest, "closer than one can tell, and of fewer stages"
    close = [c for c in found.fitting if c.seconds <= 1.05 * fastest]
    assert found.best.plan.depth == min(c.plan.depth for c in close)
    assert all(p.seconds >= fastest for p in found.pruned if p.bytes <= request.memory)
    text = explain(found)
    assert f"* {' ' if text.count('*') else ''}" in text and text.count("*") == 1
    for choice in choices(graph, 4, 8):
        assert choice.family in text
    assert describe(found.best.plan) in text


# --- gems.plan -------------------------------------------------------------------------------


def test_a_plan_has_its_reasons_and_is_the_same_after_a_file() -> None:
    with torch.device("meta"):
        model = models.build("resnet_v1", depth=14)
    found = plan(model, torch.empty(2, 3, 64, 64, device="meta"), ranks=4, machine="v100")
    assert found.world == 4
    assert "plans simulated" in found.explain() and "images of 64 x 64" in found.explain()
    again = from_json(Plan, to_json(found))
    assert again == found and again.why == found.why
    assert "by hand" in Plan(stages=2).explain()
    with pytest.raises(
        PlanError, match=r"objective 'speed' is unknown; choose one of time, memory"
    ):
        plan(model, torch.empty(2, 3, 64, 64), ranks=2, objective="speed")


def test_the_largest_image_is_the_largest_that_fits() -> None:
    with torch.device("meta"):
        model = models.build("resnet_v1", depth=8)
    study = Study(model, torch.empty(1, 3, 32, 32, device="meta"), V100)
    request = Request(2, 4 * 2**20, 2, "memory")
    side = study.largest_side(request)
    assert study.at(side).search(request).fitting
    assert not study.at(side + 32).search(request).fitting
    found = plan(
        model, torch.empty(1, 3, 32, 32, device="meta"), ranks=2, machine=V100, memory="4MiB",
        micro_batches=2, objective="image",
    )  # fmt: skip
    assert f"images of {side} x {side}" in found.why
    with pytest.raises(PlanError, match=f"the largest image that fits is {side} x {side}"):
        plan(
            model, torch.empty(1, 3, 2 * side, 2 * side, device="meta"), ranks=2, machine=V100,
            memory="4MiB", micro_batches=2,
        )  # fmt: skip


def _small_networks() -> list[tuple[str, nn.Module]]:
    with torch.device("meta"):
        return [
            ("resnet", models.build("resnet_v2", depth=11, width=4)),
            ("u-net", models.build("unet", width=4, levels=2)),
        ]


@pytest.mark.parametrize(("name", "model"), _small_networks(), ids=lambda x: str(x)[:6])
def test_more_ranks_and_more_memory_never_give_a_smaller_image(name: str, model: nn.Module) -> None:
    """Story: one rank streamed a U-Net of 1504 cells, for which four ranks had no plan."""
    study = Study(model, torch.empty(1, 3, 64, 64, device="meta"), machine("cpu"), "estimate")
    budgets, sides = (2**20, 2**22), {}
    for memory in budgets:
        for ranks in (1, 2, 4):
            request = Request(ranks, memory, 4, "memory", store=2**25)
            sides[memory, ranks] = study.largest_side(request, most=2048)
        one, two, four = (sides[memory, ranks] for ranks in (1, 2, 4))
        assert one <= two <= four, sides
        # Where activations limit, here in the store, p ranks have p times as much of it.
        assert two >= 0.85 * 2**0.5 * one and four >= 0.85 * 2 * one, sides
    for ranks in (1, 2, 4):
        assert sides[budgets[0], ranks] <= sides[budgets[1], ranks], sides


def test_each_technique_adds_to_the_largest_image_and_the_plan_says_how_much() -> None:
    with torch.device("meta"):
        model = models.build("resnet_v2", depth=11, width=4)
    sample = torch.empty(1, 3, 64, 64, device="meta")
    study = Study(model, sample, machine("cpu"), "estimate")
    request = Request(2, 2**21, 2, "memory", store=2**26)
    sides = study.largest_sides(request, wanted=levels())
    assert [side for _, side in sides] == sorted(side for _, side in sides)
    assert sides[0][1] < sides[-1][1] == study.largest_side(request)
    found = plan(
        model, sample, ranks=2, machine="cpu", memory=2**21, micro_batches=2, objective="image",
        store=2**26,
    )  # fmt: skip
    for name, side in sides:
        assert name in found.why and f"{side} x {side}" in found.why


def test_what_does_not_fit_the_store_does_not_fit() -> None:
    with torch.device("meta"):
        model = models.build("resnet_v2", depth=11, width=4)
    study = Study(model, torch.empty(1, 3, 256, 256, device="meta"), machine("cpu"), "estimate")
    request = Request(1, 2**21, 1)
    best = study.search(request).best
    assert best.prediction.offloaded > 0
    less = replace(request, store=best.prediction.offloaded - 1)
    assert all(c.prediction.offloaded <= less.store for c in study.search(less).fitting)
    with pytest.raises(PlanError, match=r"and stores of 1\.0 KiB"):
        study.plan(replace(request, store=1024))


def test_what_fits_is_found_on_paper_even_if_seconds_are_measured() -> None:
    with torch.device("meta"):
        model = models.build("resnet_v1", depth=8)
    sample, request = torch.empty(1, 3, 32, 32, device="meta"), Request(1, 32 * 2**20, 1, "memory")
    with mock.patch("gems.torch.planning.measure", side_effect=AssertionError("it was run")):
        measured = Study(model, sample, V100, "measure").largest_side(request)
    assert measured == Study(model, sample, V100).largest_side(request)


def test_a_chosen_plan_trains() -> None:
    torch.manual_seed(0)
    model = models.build("resnet_v1", depth=8)
    sample = torch.empty(2, 3, 16, 16)
    trainer = Trainer(
        model, nn.functional.cross_entropy, lambda p: torch.optim.SGD(p, 0.1), sample,
        plan(model, sample, ranks=1, micro_batches=2),
    )  # fmt: skip
    step = trainer.step(torch.randn(4, 3, 16, 16), torch.randint(10, (4,)))
    assert step.loss > 0


def test_the_package_gives_functions_whatever_was_imported_before() -> None:
    # `gems.simulate` used to be the module of that name once anything had imported it.
    assert callable(gems.plan) and callable(gems.simulate)
    assert replace(Plan(), why="because") == Plan()


def test_an_edited_plan_is_told_all_that_is_wrong_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    small = ["--model", "resnet-v1", "--num-layers", "8", "--image-size", "16"]
    assert main(["plan", *small, "--stages", "2", "--out", str(file)]) == 0
    good = file.read_text()
    assert main(["check", "--plan", str(file), *small]) == 0
    assert "its stages fit resnet-v1" in capsys.readouterr().out

    def told(*edits: tuple[str, str]) -> str:
        edited = good
        for old, new in edits:
            assert old in edited
            edited = edited.replace(old, new)
        file.write_text(edited)
        assert main(["check", "--plan", str(file), *small]) == 1
        return capsys.readouterr().err

    assert "did you mean stem.conv" in told(('"stem.conv"', '"stem.cnov"'))
    assert "there is no field schedul" in told(('"schedule"', '"schedul"'))
    assert "schedule '1f1c' is unknown" in told(('"1f1b"', '"1f1c"'))
    both = told(('"local_dp": 1', '"local_dp": 0'), ('"max_in_flight": 0', '"max_in_flight": -1'))
    assert "local_dp" in both and "max_in_flight is -1" in both, "all faults at once"
    assert "but with these stages the model sends" in told(('"edges": [[0, 1]]', '"edges": []'))


@pytest.mark.parametrize("balance", ["time", "memory"])
def test_more_stages_than_blocks_are_rejected_however_they_are_evened_out(balance: str) -> None:
    graph = traced(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), 1, 3, 8, 8)
    with pytest.raises(PlanError, match="2 blocks cannot fill 3 stages"):
        stages(Plan(stages=3, balance=balance), graph, estimate(graph, V100))


def test_state_is_sharded_where_copies_do_not_fit_and_the_gain_is_explained() -> None:
    """Weights, not pictures, are what is large here."""
    graph = resnet(32)
    costs = estimate(graph, V100)
    free = search(graph, costs, V100, Request(4, 2**34, 4))
    copies = next(c for c in free.fitting if c.plan.data == 4)
    found = search(graph, costs, V100, Request(4, 0.75 * copies.bytes, 4))
    shared = [c for c in found.fitting if c.plan.zero]
    assert shared and {c.plan.zero for c in shared} >= {1}
    assert all(c.plan.data > 1 or c.plan.bidirectional or c.plan.cut for c in shared)
    assert all(c.bytes <= 0.75 * copies.bytes for c in shared)
    best = replace(found, fitting=tuple(shared))
    text = explain(best)
    assert f"zero={best.best.plan.zero}: sharding the optimizer's state" in text


# --- offload --------------------------------------------------------------------------------------


def deep() -> torch.nn.Module:
    """BatchNorm, which does not stream, and much more to keep than any one layer has."""
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(3, 8, 3, padding=1)]
    for _ in range(36):
        layers += [torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Conv2d(8, 8, 3, padding=1)]
    head = (torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(8, 2))
    return torch.nn.Sequential(*layers, *head)


def measured(model: torch.nn.Module, chosen: Plan, side: int) -> int:
    """The most bytes that a step really has live on any rank."""
    x, y = torch.randn(1, 3, side, side), torch.zeros(1, dtype=torch.int64)

    def work(transport: Transport) -> int:
        trainer = Trainer(
            copy.deepcopy(model), torch.nn.functional.cross_entropy,
            lambda p: torch.optim.SGD(p, 0.1), x, chosen, transport=transport,
        )  # fmt: skip
        trainer.step(x, y)
        return max(peak.total for peak in trainer.timeline().peaks)

    return max(run(chosen.world, work))


@pytest.mark.parametrize("ranks", [1, 2])
def test_activations_are_offloaded_where_nothing_else_fits(ranks: int) -> None:
    model, cap = deep(), (3 if ranks == 1 else 2) * 2**20
    sample = torch.empty(1, 3, 96, 96, device="meta")
    chosen = plan(model, sample, ranks=ranks, memory=cap, micro_batches=1, state=0.0)
    assert "activations:disk" in chosen.offload and chosen.depth > 1
    assert chosen.cut == (ranks > 1)
    assert re.search(r"activations.* to disk, .* of each rank at most: .* are enough", chosen.why)
    assert measured(model, chosen, 96) <= cap
    roomy = plan(model, sample, ranks=ranks, memory="8GiB", micro_batches=1)
    assert not roomy.offload


def test_gpus_offload_to_their_host() -> None:
    sample = torch.empty(1, 3, 96, 96, device="meta")
    chosen = plan(
        deep(), sample, ranks=1, memory="3MiB", micro_batches=1, state=0.0, machine="v100"
    )
    assert "activations:host" in chosen.offload


def test_a_model_that_does_not_fit_is_loaded_layer_by_layer() -> None:
    """Its state alone is several times the memory."""
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(16)))
    sample = torch.empty(4, 256, device="meta")
    chosen = plan(model, sample, ranks=1, memory="3MiB", micro_batches=2)
    assert "weights:disk" in chosen.offload
    found = search(*Study(model, sample, machine("cpu")).graph, machine("cpu"),
                   Request(1, 3 * 2**20, 2), prune=False)  # fmt: skip
    assert any(c.family == "layer to layer" and c.bytes <= 3 * 2**20 for c in found.fitting)
