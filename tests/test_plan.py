"""Plans: who has what, what cannot be carried out, and files that give the same plan back."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gems.errors import GemsError, PlanError
from gems.files import from_json, to_json, write
from gems.geometry.grid import Grid
from gems.model.costs import Cost, Costs, Edge, of_stages
from gems.model.graph import Block, Graph, Value, Weight, crossings
from gems.planner.partition import by_weight, partition
from gems.plans.plan import Plan
from gems.predict.timeline import Event, Memory, Timeline

# --- who has what -------------------------------------------------------------------------------


def test_straight_puts_stage_s_on_rank_s() -> None:
    plan = Plan(stages=4)
    assert plan.places == ((0, 1, 2, 3),)
    assert (plan.world, plan.replicas, plan.total) == (4, 1, 1)


def test_with_fewer_ranks_straight_goes_round() -> None:
    plan = Plan(stages=6, ranks=3)
    assert plan.places == ((0, 1, 2, 0, 1, 2),)
    assert plan.stages_on == ((0, 3), (1, 4), (2, 5))


def test_fold_goes_there_and_back_again() -> None:
    assert Plan(stages=6, placement="fold").places == ((0, 1, 2, 2, 1, 0),)
    assert Plan(stages=5, placement="fold").places == ((0, 1, 2, 1, 0),)
    assert Plan(stages=5, placement="fold").ranks == 3


def test_bidirectional_lays_a_second_replica_in_reverse() -> None:
    plan = Plan(stages=4, schedule="gems", replications=2)
    assert plan.places == ((0, 1, 2, 3), (3, 2, 1, 0))
    assert plan.replica_groups == ((0, 3), (1, 2), (1, 2), (0, 3))
    assert plan.stages_on == ((0, 3), (1, 2), (1, 2), (0, 3))
    assert plan.micro_batches == 4


def test_the_middle_of_an_odd_number_of_stages_has_one_holder_per_copy() -> None:
    plan = Plan(stages=5, schedule="gems", data=2)
    assert plan.replica_groups == ((0, 4, 5, 9), (1, 3, 6, 8), (2, 7), (1, 3, 6, 8), (0, 4, 5, 9))
    assert plan.stages_on[2] == plan.stages_on[7] == (2,)


def test_hybrid_sums_a_stage_over_every_rank_that_is_s_or_its_mirror_image() -> None:
    p, data = 4, 3
    plan = Plan(stages=p, schedule="gems", data=data)
    for s in range(p):
        assert plan.replica_groups[s] == tuple(
            r for r in range(p * data) if r % p in (s, p - 1 - s)
        )


def test_data_parallel_copies_follow_on_the_next_ranks() -> None:
    plan = Plan(stages=2, data=3, micro_batches=4)
    assert plan.places == ((0, 1), (2, 3), (4, 5))
    assert (plan.world, plan.total) == (6, 12)
    assert plan.one_copy().places == ((0, 1),)


def test_samples_go_to_copies_in_order_and_to_the_two_directions_in_turn() -> None:
    plan = Plan(stages=2, schedule="gems", replications=2, data=2)
    assert [plan.replica_of(i) for i in range(plan.total)] == [0, 1, 0, 1, 2, 3, 2, 3]
    assert [plan.rank_for(0, i) for i in range(plan.total)] == [0, 1, 0, 1, 2, 3, 2, 3]
    one_way = Plan(stages=2, micro_batches=2, data=2)
    assert [one_way.replica_of(i) for i in range(one_way.total)] == [0, 0, 1, 1]


def test_a_placement_can_be_written_out_and_both_directions_mirror_it() -> None:
    plan = Plan(stages=4, placement=[0, 1, 1, 0], schedule="auto", bidirectional=True)  # type: ignore[arg-type]
    assert plan.ranks == 2
    assert plan.places == ((0, 1, 1, 0), (1, 0, 0, 1))


def test_stages_feed_the_next_until_the_model_is_known() -> None:
    plan = Plan(stages=3)
    assert (plan.sources, plan.sinks) == (((), (0,), (1,)), ((1,), (2,), ()))
    skipping = replace(plan, edges=((0, 1), (0, 2), (1, 2)))
    assert (skipping.sources[2], skipping.sinks[0]) == ((0, 1), (1, 2))


def test_stages_by_name_may_be_lists_or_single_names() -> None:
    plan = Plan(stages=[["stem", "layer1"], "head"])  # type: ignore[arg-type]
    assert plan.stages == (("stem", "layer1"), ("head",))
    assert plan.depth == 2


def test_equal_plans_are_equal_and_can_be_keys() -> None:
    assert Plan(stages=4, schedule="gems") == Plan(stages=4, schedule="gems", micro_batches=2)
    assert len({Plan(stages=4), Plan(stages=4), Plan(stages=3)}) == 2


# --- teams --------------------------------------------------------------------------------------

TILED = Plan(stages=3, spatial=[(2, 2), (1, 2)])


def test_teams_of_a_straight_plan_lie_one_after_the_other() -> None:
    assert TILED.spatial_groups == (((0, 1, 2, 3), (4, 5), (6,)),)
    assert (TILED.ranks, TILED.world, TILED.sizes, TILED.cut) == (7, 7, (4, 2, 1), True)
    assert TILED.grids == (Grid(tiles=(2, 2)), Grid(tiles=(1, 2)), Grid())
    assert TILED.replica_groups == ((0, 1, 2, 3), (4, 5), (6,))
    assert TILED.stages_on == ((0,), (0,), (0,), (0,), (1,), (1,), (2,))


def test_the_second_direction_lays_its_tiles_over_the_last_stages_of_the_first() -> None:
    plan = replace(TILED, schedule="gems", bidirectional=True, micro_batches=2)
    assert plan.spatial_groups == (((0, 1, 2, 3), (4, 5), (6,)), ((6, 5, 4, 3), (2, 1), (0,)))
    assert plan.spatial_group_of(0, 1) == plan.spatial_group_for(0, 1) == (6, 5, 4, 3)
    assert plan.replica_groups == (tuple(range(7)), (1, 2, 4, 5), (0, 6))
    assert plan.stages_on[3] == (0,), "rank 3 has a tile of stage 0 in both directions"


def test_copies_of_teams_follow_on_the_next_ranks() -> None:
    plan = replace(TILED, schedule="gems", bidirectional=True, data=2)
    assert plan.spatial_groups[2] == ((7, 8, 9, 10), (11, 12), (13,))
    assert plan.spatial_groups[3] == ((13, 12, 11, 10), (9, 8), (7,))
    assert plan.replica_groups[2] == (0, 6, 7, 13)
    assert plan.one_copy().spatial_groups == plan.spatial_groups[:2]


def test_local_dp_cuts_the_stages_after_the_spatial_ones() -> None:
    plan = Plan(stages=3, spatial=(2, 2), local_dp=2)
    assert plan.grids == (Grid(tiles=(2, 2)), Grid(batch=2), Grid(batch=2))
    assert plan.spatial_groups == (((0, 1, 2, 3), (4, 5), (6, 7)),)
    assert Plan(stages=2, local_dp=3).spatial_groups == (((0, 1, 2), (3, 4, 5)),)


def test_teams_can_be_written_out_and_lie_over_each_other() -> None:
    plan = Plan(stages=3, spatial=[(2, 2), (1, 2)], placement=((0, 1, 2, 3), (0, 1), (0,)))
    assert plan.spatial_groups == (((0, 1, 2, 3), (0, 1), (0,)),)
    assert (plan.ranks, plan.stages_on) == (4, ((0, 1, 2), (0, 1), (0,), (0,)))
    assert plan == replace(plan, placement=((0, 1, 2, 3), (0, 1), 0))


def test_the_place_of_a_stage_is_the_first_rank_of_its_team() -> None:
    assert TILED.places == ((0, 4, 6),)
    assert [TILED.rank_of(s, 0) for s in range(3)] == [TILED.rank_for(s, 0) for s in range(3)]


def test_a_team_of_one_is_no_cut() -> None:
    plan = Plan(stages=2, spatial=[(1, 1), (1,)])
    assert not plan.cut and plan.places == Plan(stages=2).places
    assert not Plan(stages=2).cut and Plan(stages=2).grids == (Grid(), Grid())


def test_lanes_are_the_whole_stages_of_one_copy_on_a_rank_each() -> None:
    edges = ((0, 1), (0, 2), (1, 2))
    options = dict(stages=3, schedule="auto", max_in_flight=2, bidirectional=True, edges=edges)
    cut = Plan(**options, spatial="2x2", local_dp=2, data=3, halo="d2", fused_layers=4)
    assert cut.lanes() == Plan(**options)
    over = Plan(stages=2, spatial=2, placement=((0, 1), 0), schedule="gpipe")
    assert over.lanes() == Plan(stages=2, schedule="gpipe")


WRITTEN = [
    ((), ()),
    ((2, 2), ((2, 2),)),
    ((2, 2, 2), ((2, 2, 2),)),
    ((4,), ((4,),)),
    (4, ((2, 2),)),
    (8, ((2, 4),)),
    (7, ((1, 7),)),
    ("4", ((2, 2),)),
    ("12", ((3, 4),)),
    ("2x3", ((2, 3),)),
    ("2x2x2", ((2, 2, 2),)),
    ("square:4", ((2, 2),)),
    ("square:8", ((2, 4),)),
    ("vertical:4", ((1, 4),)),
    ("horizontal:4", ((4, 1),)),
    ([(2, 2), (1, 2)], ((2, 2), (1, 2))),
    ([4, "1x2"], ((2, 2), (1, 2))),
    (("2x2", " vertical:2"), ((2, 2), (1, 2))),
    ([[2, 2]], ((2, 2),)),
]


@pytest.mark.parametrize(("written", "tiles"), WRITTEN, ids=lambda value: str(value))
def test_a_grid_may_be_written_as(written: Any, tiles: tuple[tuple[int, ...], ...]) -> None:
    plan = Plan(stages=3, spatial=written)
    assert plan.spatial == tiles
    assert replace(plan, data=2).spatial == tiles


@pytest.mark.parametrize(
    "written",
    ["", "2by2", "x2", "2x", "round:4", ":4", "square:", "2.5", [2.5], [("2", 2)], ["-1"]],
)
def test_what_is_no_grid_is_refused_with_examples_of_one(written: Any) -> None:
    with pytest.raises(
        PlanError, match=r"is not a grid; write rows and columns like 2x2 or \(2, 2"
    ):
        Plan(stages=3, spatial=written)


def test_a_grid_has_slices_or_tiles() -> None:
    assert (Grid(3).shape, Grid(3).size, str(Grid(3)), str(Grid())) == (
        (3,),
        3,
        "3 slices",
        "whole",
    )
    assert (Grid(tiles=(2, 3)).shape, Grid(tiles=(2, 3)).size) == ((2, 3), 6)
    assert str(Grid(tiles=(2, 3))) == "2x3"
    with pytest.raises(PlanError, match=r"2 slices of the batch or tiles \(2, 2\), not both"):
        Grid(2, (2, 2))


# --- what cannot be carried out -----------------------------------------------------------------

MISTAKES = [
    (dict(schedule="zb-v"), "schedule 'zb-v' is unknown; choose one of sequential, gpipe, 1f1b"),
    (dict(stages=0), "stages is 0; it must be at least 1"),
    (dict(stages=2, micro_batches=-3), "micro_batches is -3; it must be at least 1"),
    (dict(stages=2, data=0), "data is 0; it must be at least 1"),
    (
        dict(stages=2, schedule="gems", replications=2, micro_batches=3),
        "replications=2 means 4 micro-batches, but micro_batches=3; give one of the two",
    ),
    (dict(stages=2, replications=2), "replications belongs to a bidirectional plan; '1f1b' is not"),
    (
        dict(stages=2, schedule="gems", bidirectional=False),
        "schedule 'gems' is bidirectional; leave bidirectional out",
    ),
    (
        dict(stages=2, max_in_flight=3),
        "max_in_flight=3 applies to schedules 'auto', 'gems' and 'gems-zb', not '1f1b'; remove it",
    ),
    (
        dict(stages=2, schedule="auto", max_in_flight=-1),
        "max_in_flight is -1; give 1 or more, or leave it out",
    ),
    (
        dict(stages=2, placement="ring"),
        "'ring' is unknown; choose one of straight, fold, levels or write",
    ),
    (
        dict(stages=4, placement="fold", ranks=3),
        "a fold of 4 stages takes 2 ranks, not 3; leave ranks out or write out the placement",
    ),
    (dict(stages=2, ranks=4), "4 ranks for 2 stages leave ranks without work; use more stages"),
    (dict(stages=3, placement=(0, 1)), "placement names 2 ranks for 3 stages; give one each"),
    (dict(stages=2, placement=(0, 2)), "(0, 2) must use every rank from 0 to 2 and no other"),
    (dict(stages=2, balance="luck"), "balance 'luck' is unknown; choose one of time"),
    (dict(stages=3, balance=(1, 1, 1), placement="levels"), "placement 'levels' finds boundaries"),
    (dict(stages=3, balance=(4, 5)), "balance has 2 numbers for 3 stages; give one each"),
    (dict(stages=2, balance=(4, 0)), "balance (4, 0) must give every stage at least one layer"),
    (
        dict(stages=(("a",), ("b",)), balance=(1, 1)),
        "balance and explicit stages exclude each other; leave one out",
    ),
    (dict(stages=2, edges=((0, 2),)), "edge 0 to 2 must lead from a stage to a later one of 2"),
    (dict(stages=2, edges=((1, 0),)), "edge 1 to 0 must lead from a stage to a later one of 2"),
    (
        dict(stages=2, spatial=["2x2", "2x1", "1x2"]),
        "spatial has 3 grids for 2 stages; give at most one per stage, or use more stages",
    ),
    (dict(stages=2, spatial=(2, 0)), "the grid of stage 0 is 2x0; every axis must have at least 1"),
    (dict(stages=2, spatial=["2x2", -4]), "the grid of stage 1 is -4x-4; every axis must have"),
    (
        dict(stages=2, spatial=(1, 2, 2, 2)),
        "the grid of stage 0 has 4 axes; give columns, rows and",
    ),
    (dict(stages=2, spatial=[()]), "the grid of stage 0 has 0 axes; give columns, rows and"),
    (dict(stages=2, local_dp=0), "local_dp is 0; it must be at least 1"),
    (
        dict(stages=1, spatial="2x2", local_dp=2),
        "local_dp=2 slices the stages after the spatial ones, but all 1 are spatial; leave one",
    ),
    (dict(stages=2, spatial=4, halo="d3"), "halo 'd3' is unknown; choose one of d1, d2"),
    (dict(stages=2, halo="d2"), "halo='d2' belongs to spatial stages that do not stream; leave it"),
    (dict(spatial="1x2", stream="2x2", halo="d2"), "halo='d2' belongs to spatial stages that do"),
    (
        dict(stages=2, spatial=4, halo="d2", fused_layers=-1),
        "fused_layers is -1; give 1 or more, or leave it out",
    ),
    (
        dict(stages=2, spatial=4, fused_layers=3),
        "fused_layers=3 is for halo='d2', not 'd1'; leave one of them out",
    ),
    (
        dict(stages=3, spatial=4, placement="fold"),
        "stages that are cut over ranks cannot be folded; write out the placement",
    ),
    (
        dict(stages=3, local_dp=2, placement="fold"),
        "stages that are cut over ranks cannot be folded; write out the placement",
    ),
    (
        dict(stages=3, spatial=["2x2", "1x2"], ranks=4),
        "stages cut over 4, 2, 1 ranks take 7, one after the other, not 4; leave ranks out, or",
    ),
    (
        dict(stages=2, spatial="2x2", placement=((0, 1, 2), 3)),
        "stage 0 is cut into 4 parts (2x2) but placed on 3 ranks (0, 1, 2); give one rank per part",
    ),
    (
        dict(stages=2, placement=((0, 1), 2)),
        "stage 0 is cut into 1 parts (whole) but placed on 2 ranks (0, 1); give one rank per part",
    ),
    (
        dict(stages=2, local_dp=2, placement=((0, 0), (0, 1))),
        "stage 0 is placed on ranks (0, 0); give every part a rank of its own",
    ),
    (
        dict(stages=2, spatial=2, placement=((0, 2), 3)),
        "((0, 2), 3) must use every rank from 0 to 3 and no other",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=[m for _, m in MISTAKES])
def test_a_plan_that_cannot_be_carried_out_says_so(arguments: dict, message: str) -> None:
    with pytest.raises(PlanError) as error:
        Plan(**arguments)
    assert message in str(error.value)


def test_all_mistakes_of_a_plan_are_reported_at_once() -> None:
    with pytest.raises(PlanError) as error:
        Plan(stages=2, schedule="none", data=0, balance=(1, 2, 3), placement="ring")
    assert len(str(error.value).splitlines()) == 5


# --- graphs -------------------------------------------------------------------------------------


def value(name: str, *shape: int) -> Value:
    strides = tuple(int(s) for s in range(len(shape)))
    return Value(name, shape, strides, "float32", True)


SKIP = Graph(
    blocks=(
        Block("a", "a", ("x",), ("u",), parameters=("w",), saves=((1, 100), (2, 10))),
        Block("b", "b", ("u",), ("v",), buffers=("n",), saves=((2, 10), (3, 5))),
        Block("c", "c", ("u", "v"), ("y",), parameters=("w",), saves=((4, 1),)),
    ),
    values=(value("x", 2, 3), value("u", 2, 4), value("v", 2, 5), value("y", 2, 1)),
    inputs=("x",),
    outputs=("y",),
    parameters=(Weight("w", (10,), "float32"),),
    buffers=(Weight("n", (), "int64"),),
)


def test_values_cross_straight_from_the_writer_to_every_reader() -> None:
    assert crossings(SKIP, (0, 1, 2)) == {(0, 1): ("u",), (0, 2): ("u",), (1, 2): ("v",)}
    assert crossings(SKIP, (0, 0, 1)) == {(0, 1): ("u", "v")}
    assert crossings(SKIP, (0, 0, 0)) == {}


def test_outputs_of_the_model_travel_to_the_last_stage_where_the_loss_is() -> None:
    two = replace(SKIP, outputs=("v", "y"))
    assert crossings(two, (0, 1, 2))[1, 2] == ("v",)
    apart = (SKIP.blocks[0], replace(SKIP.blocks[1], reads=("x",)))
    early = replace(SKIP, blocks=apart, outputs=("u", "v"))
    assert crossings(early, (0, 1)) == {(0, 1): ("u",)}


def test_costs_of_a_stage_add_up_and_shared_storages_and_weights_count_once() -> None:
    costs = of_stages(Costs((Cost(1, 2, 3), Cost(4, 5, 6), Cost(7, 8, 9))), SKIP, (0, 0, 1))
    assert costs.items == (
        Cost(f=5, i=7, w=9, activations=115, weights=48, gradients=40),
        Cost(f=7, i=8, w=9, activations=1, weights=40, gradients=40),
    )
    assert costs.messages == (Edge(0, 1, 2 * 4 * 4 + 2 * 5 * 4, 2 * 4 * 4 + 2 * 5 * 4),)
    assert (costs[0].b, costs[0].seconds) == (16, 21)


def test_a_team_shares_work_stash_and_messages_but_not_weights() -> None:
    costs = Costs(
        (Cost(4, 8, 12, 100, 7), Cost(1, 2, 3, 10, 5)), (Edge(0, 1, 90, 90),), latency=0.5
    )
    shared = costs.shared((4, 2))
    assert shared.items == (Cost(1, 2, 3, 25, 7), Cost(0.5, 1, 1.5, 5, 5))
    assert shared.part("output", 0, 1) == 23, "in four parts, the largest 23 bytes"
    assert shared.latency == 0.5
    assert costs.shared((1, 1)).items == costs.items


# --- where to cut -------------------------------------------------------------------------------


def test_a_team_gets_as_much_more_as_it_has_ranks() -> None:
    assert partition([1] * 12, [0] * 12, 3, speeds=(4, 1, 1)) == [0, 8, 10]
    assert partition([1] * 12, [0] * 12, 3, speeds=(1, 1, 4)) == [0, 2, 4]
    even = partition([1] * 12, [0] * 12, 3, speeds=(2, 2, 2))
    assert even == partition([1] * 12, [0] * 12, 3) == [0, 4, 8]


def test_what_every_rank_of_a_team_bears_whole_is_not_divided() -> None:
    assert partition([0] * 6, [0] * 6, 2, speeds=(4, 1), whole=[1] * 6) == [0, 3]
    assert partition([4, 4, 4, 4, 4], [0] * 5, 2, speeds=(4, 1), whole=[0, 1, 1, 1, 1]) == [0, 4]


@given(st.data())
def test_no_other_cut_over_teams_has_a_smaller_largest_share(data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, 4))
    n = data.draw(st.integers(parts, 8))
    numbers = st.lists(st.integers(0, 20), min_size=n, max_size=n)
    weights, whole = data.draw(numbers), data.draw(numbers)
    speeds = data.draw(st.lists(st.integers(1, 5), min_size=parts, max_size=parts))

    def largest(starts: Sequence[int]) -> float:
        runs = zip(starts, [*starts[1:], n], speeds, strict=True)
        return max(sum(weights[a:b]) / speed + sum(whole[a:b]) for a, b, speed in runs)

    starts = partition(weights, [0] * n, parts, speeds, whole)
    assert starts[0] == 0 and all(a < b for a, b in pairwise([*starts, n]))
    best = min(largest((0, *rest)) for rest in combinations(range(1, n), parts - 1))
    assert largest(starts) <= 1.03 * best + 1e-9


def test_blocks_are_evened_out_over_teams_by_time_and_by_memory() -> None:
    costs = Costs((Cost(f=10, i=0, w=0, weights=0), Cost(1, 1, 1), Cost(1, 1, 1)))
    assert by_weight(SKIP, costs, 2, "time") == [0, 1, 1]
    assert by_weight(SKIP, costs, 2, "time", (4, 1)) == [0, 0, 1]
    held = Costs((Cost(weights=0), Cost(weights=20), Cost(weights=0)))
    assert by_weight(SKIP, held, 2, "memory") == [0, 1, 1], "110 bytes; 4 x 20, 5 and 1"
    assert by_weight(SKIP, held, 2, "memory", (11, 1)) == [0, 1, 1], "10 and 86, not 90 and 1"


# --- files --------------------------------------------------------------------------------------

THINGS = [
    Plan(stages=4, schedule="gems", replications=2, data=2),
    Plan(stages=(("stem", "layer1"), ("head",)), placement=(1, 0), edges=((0, 1),)),
    Plan(stages=3, balance=(4, 5, 6), schedule="auto", max_in_flight=2),
    Plan(stages=3, spatial=["2x2", "1x2"], halo="d2", fused_layers=3, data=2),
    Plan(stages=3, spatial=4, local_dp=2, placement=((0, 1, 2, 3), (0, 1), (2, 3))),
    Grid(tiles=(2, 2)),
    SKIP,
    Costs((Cost(0.1, 0.2, 0.3, 4, 5), Cost()), (Edge(0, 1, 100, 100),)),
    Timeline(
        events=(Event(0, "0F0", 0.0, 0.25, 0.2), Event(1, "1F0@1", 0.25, 0.5)),
        clock="virtual",
        memory=(((0.0, Memory(1, 2, 3, 4, 5, 6)), (0.5, Memory())), ()),
        peaks=(Memory(activations=9), Memory()),
        max_in_flight=(1, 0),
    ),
]


@pytest.mark.parametrize("thing", THINGS, ids=lambda thing: type(thing).__name__)
def test_what_is_written_to_json_reads_back_equal(thing: object) -> None:
    assert from_json(type(thing), to_json(thing)) == thing


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    depth = draw(st.integers(1, 6))
    names = st.lists(st.text(max_size=5), min_size=1, max_size=3).map(tuple)
    explicit = st.lists(names, min_size=depth, max_size=depth).map(tuple)
    schedule = draw(st.sampled_from(["sequential", "1f1b", "gems", "auto"]))
    ahead = [(a, b) for a in range(depth) for b in range(a + 1, depth)]
    edges = st.lists(st.sampled_from(ahead), unique=True).map(tuple) if ahead else st.just(())
    tiles = st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple)
    spatial = draw(st.lists(tiles, max_size=depth))
    local_dp = draw(st.integers(1, 3)) if len(spatial) < depth else 1
    if Plan(stages=depth, spatial=spatial, local_dp=local_dp).cut:
        places = ["straight"]
    else:
        places = ["straight", "fold", tuple(range(depth))]
    return Plan(
        stages=draw(st.just(depth) | explicit),
        micro_batches=draw(st.integers(1, 9)),
        schedule=schedule,
        data=draw(st.integers(1, 3)),
        placement=draw(st.sampled_from(places)),
        max_in_flight=draw(st.integers(0, 3)) if schedule == "auto" else 0,
        edges=draw(st.none() | edges),
        spatial=spatial,
        local_dp=local_dp,
        halo=draw(st.sampled_from(["d1", "d2"])) if spatial else "d1",
    )


@given(plans())
def test_any_plan_reads_back_equal_and_with_the_same_places(plan: Plan) -> None:
    again = from_json(Plan, to_json(plan))
    assert again == plan
    assert (again.spatial_groups, again.replica_groups, again.chain) == (
        plan.spatial_groups,
        plan.replica_groups,
        plan.chain,
    )
    for teams in plan.spatial_groups:
        assert tuple(map(len, teams)) == plan.sizes
        assert {rank // plan.ranks for team in teams for rank in team} == {
            min(teams[0]) // plan.ranks
        }
    assert {rank for teams in plan.spatial_groups for team in teams for rank in team} == set(
        range(plan.world)
    )


def test_a_file_written_by_hand_may_name_its_grids() -> None:
    plan = from_json(Plan, '{"stages": 3, "spatial": ["2x2", "vertical:2"]}')
    assert plan == TILED
    assert from_json(Plan, '{"stages": 3, "spatial": "2x2"}').spatial == ((2, 2),)
    assert from_json(Plan, '{"stages": 3, "spatial": [2, 2]}').spatial == ((2, 2),)


numbers = st.floats(0, 1e12)


@given(st.builds(Costs, st.lists(st.builds(Cost, *[numbers] * 5), max_size=4).map(tuple)))
def test_any_costs_read_back_equal_to_the_last_bit(costs: Costs) -> None:
    assert from_json(Costs, to_json(costs)) == costs


@pytest.mark.parametrize(
    "text",
    ["", "[]", "3", '{"stage": 4}', '{"stages": {"a": 1}}', '{"ranks": "four"}', '{"edges": 1}'],
)
def test_a_file_that_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(GemsError, match="this is not the JSON of a Plan"):
        from_json(Plan, text)


def test_a_file_of_an_impossible_plan_is_refused_like_the_plan_itself() -> None:
    with pytest.raises(PlanError, match="data is 0"):
        from_json(Plan, '{"stages": 2, "data": 0}')


def test_write_makes_its_folder_and_replaces_what_was_there(tmp_path: Path) -> None:
    path = write(tmp_path / "run" / "plan.json", "old")
    assert write(path, "new").read_text() == "new"
    assert os.listdir(path.parent) == ["plan.json"]


@pytest.mark.parametrize("step", ["open", "replace"])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError("the disk is full")

    path = write(tmp_path / "plan.json", "old")
    monkeypatch.setattr(os, step, fail)
    with pytest.raises(OSError, match="the disk is full"):
        write(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["plan.json"]
