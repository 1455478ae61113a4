"""Schedules: their text, the lengths that the papers promise, and the memory they keep to."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gems.engine.executor import Engine
from gems.errors import PlanError, ScheduleError
from gems.model.costs import Cost, Costs, unit
from gems.plans.plan import Plan
from gems.predict.simulate import simulate
from gems.predict.timeline import counted
from gems.schedule import greedy
from gems.schedule.action import Kind, Message, Schedule, parse, parse_action
from gems.schedule.build import build, lowered
from gems.schedule.lower.messages import receipts
from gems.schedule.lower.passes import forward_only, lower
from gems.schedule.machine import ScheduleMachine
from gems.schedule.validate import check

GRID = [(p, m) for p in range(1, 9) for m in range(1, 17)]
STRAIGHT = ("sequential", "gpipe", "1f1b", "interleaved", "zero-bubble")
EVERY = (*STRAIGHT, "gems", "gems-zb", "auto")


def length(plan: Plan) -> float:
    """The step in unit costs, f = i = w = 1."""
    return simulate(build(plan), plan, unit(plan.depth)).seconds


# --- text -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY)
def test_a_schedule_as_text_parses_back(name: str) -> None:
    plan = Plan(stages=4, micro_batches=4, schedule=name, data=2)
    for schedule in (build(plan), lowered(plan)):
        assert parse(str(schedule)) == schedule


@pytest.mark.parametrize("text", ["2F0", "12B34", "1I3@1", "2R0@1", "2F0>3", "2B0<3@1", "7A"])
def test_an_action_is_spelled_as_on_a_whiteboard(text: str) -> None:
    assert str(parse_action(text)) == text


@pytest.mark.parametrize("text", ["", "F0", "2X0", "2F", "2F0>", "2F0@", "2R1>0", "2F0 "])
def test_what_is_no_action_is_refused_with_an_example_of_one(text: str) -> None:
    with pytest.raises(ScheduleError, match="is not an action; write one like 2F0"):
        parse_action(text)


def test_comments_and_blank_lines_are_passed_over_and_a_rank_out_of_turn_is_not() -> None:
    assert parse("# two ranks\n\n0: 0F0 0B0 # done\n1:\n") == parse("0: 0F0 0B0\n1:\n")
    with pytest.raises(ScheduleError, match="expected a line '1: actions of rank 1', got '2: 0F0'"):
        parse("0: 0F0\n2: 0F0\n")


GOLDEN = {
    "sequential": """
        0: 0F0 0B0 0F1 0B1 0F2 0B2
        1: 1F0 1B0 1F1 1B1 1F2 1B2
        2: 2F0 2B0 2F1 2B1 2F2 2B2
    """,
    "gpipe": """
        0: 0F0 0F1 0F2 0B2 0B1 0B0
        1: 1F0 1F1 1F2 1B2 1B1 1B0
        2: 2F0 2F1 2F2 2B2 2B1 2B0
    """,
    "1f1b": """
        0: 0F0 0F1 0F2 0B0 0B1 0B2
        1: 1F0 1F1 1B0 1F2 1B1 1B2
        2: 2F0 2B0 2F1 2B1 2F2 2B2
    """,
    "interleaved": """
        0: 0F0 0F1 0F2 0B0 0B1 0B2
        1: 1F0 1F1 1F2 1B0 1B1 1B2
        2: 2F0 2B0 2F1 2B1 2F2 2B2
    """,
    "zero-bubble": """
        0: 0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2
        1: 1F0 1F1 1I0 1F2 1I1 1W0 1I2 1W1 1W2
        2: 2F0 2I0 2F1 2I1 2F2 2I2 2W0 2W1 2W2
    """,
    "gems": """
        0: 0F0 0B0 2F1@1 2B1@1 0F2 0B2
        1: 1F0 1B0 1F1@1 1B1@1 1F2 1B2
        2: 2F0 2B0 0F1@1 0B1@1 2F2 2B2
    """,
    "gems-zb": """
        0: 0F0 0I0 0W0 2F1@1 2I1@1 2W1@1 0F2 0I2 0W2
        1: 1F0 1I0 1W0 1F1@1 1I1@1 1W1@1 1F2 1I2 1W2
        2: 2F0 2I0 2W0 0F1@1 0I1@1 0W1@1 2F2 2I2 2W2
    """,
    "auto": """
        0: 0F0 0F1 0F2 0B0 0B1 0B2
        1: 1F0 1F1 1F2 1I0 1W0 1I1 1W1 1I2 1W2
        2: 2F0 2I0 2F1 2I1 2F2 2I2 2W0 2W1 2W2
    """,
}


@pytest.mark.parametrize("name", EVERY)
def test_the_order_of_three_stages_and_three_micro_batches_is(name: str) -> None:
    assert build(Plan(stages=3, micro_batches=3, schedule=name)) == parse(GOLDEN[name])


def test_lowered_a_schedule_names_its_messages_and_its_sums() -> None:
    plan = Plan(stages=2, schedule="gems", replications=1)
    assert lowered(plan) == parse(
        """
        0: 0B0<1 0F0 0F0>1 1F1<0@1 0B0 1F1@1 1B1@1 1B1>0@1 1A 0A 0O 1O
        1: 1F0<0 1F0 1B0 1B0>0 1A 0B1<1@1 0F1@1 0F1>1@1 0B1@1 0A 0O 1O
        """
    )


# --- lengths ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("p", "m"), GRID)
def test_layer_parallelism_takes_m_p_times_forward_and_backward(p: int, m: int) -> None:
    assert length(Plan(stages=p, micro_batches=m, schedule="sequential")) == m * p * 3


@pytest.mark.parametrize(("p", "m"), GRID)
def test_gpipe_and_1f1b_take_m_plus_p_minus_1_times_forward_and_backward(p: int, m: int) -> None:
    for name in ("gpipe", "1f1b"):
        plan = Plan(stages=p, micro_batches=m, schedule=name)
        timeline = simulate(build(plan), plan, unit(p))
        assert timeline.seconds == (m + p - 1) * 3
        assert timeline.bubble == pytest.approx((p - 1) / (m + p - 1))


@pytest.mark.parametrize("v", [1, 2, 3])
@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in GRID if m >= p])
def test_interleaved_with_v_chunks_has_a_bubble_of_p_minus_1_over_v_m(
    p: int, m: int, v: int
) -> None:
    plan = Plan(stages=p * v, ranks=p, micro_batches=m, schedule="interleaved")
    timeline = simulate(build(plan), plan, unit(p * v))
    assert timeline.seconds == (v * m + p - 1) * 3
    assert timeline.bubble == pytest.approx((p - 1) / (v * m + p - 1))


@pytest.mark.parametrize(("p", "m"), GRID)
def test_interleaved_runs_with_any_number_of_micro_batches(p: int, m: int) -> None:
    # With groups of p and a smaller last one it waited forever at p=5, m=11, say.
    for v in (2, 3):
        plan = Plan(stages=v * p, ranks=p, micro_batches=m, schedule="interleaved")
        assert check(build(plan), plan) == []


@pytest.mark.parametrize(("p", "m"), GRID)
def test_zero_bubble_reaches_its_closed_form(p: int, m: int) -> None:
    short, long = (m + p - 1) * 2 + 1, m * 3 + (p - 1) * (1 + 1 - 1)
    assert length(Plan(stages=p, micro_batches=m, schedule="zero-bubble")) == (
        short if m <= p else long
    )


@pytest.mark.parametrize(("p", "k"), GRID)
def test_master_takes_k_times_one_forward_and_p_backwards(p: int, k: int) -> None:
    f, b = 1, 2
    plan = Plan(stages=p, micro_batches=k, schedule="gems")
    assert length(plan) == k * (f + p * b) + (p - 1) * f


@pytest.mark.parametrize(
    ("p", "speed_ups"),
    [(2, (1.09, 1.14, 1.17)), (4, (1.14, 1.23, 1.28)), (8, (1.17, 1.28, 1.34))],
)
def test_master_is_faster_than_layer_parallelism_by(p: int, speed_ups: tuple[float, ...]) -> None:
    for t, speed_up in zip((1, 2, 4), speed_ups, strict=True):
        master = length(Plan(stages=p, schedule="gems", replications=t))
        plain = length(Plan(stages=p, schedule="sequential", micro_batches=2 * t))
        assert plain / master == pytest.approx(speed_up, abs=0.005)


ZB_MASTER = [
    *((4, k, master, ours) for k, master, ours in [(2, 21, 15), (4, 39, 27), (8, 75, 51)]),
    *((8, k, master, ours) for k, master, ours in [(2, 41, 27), (4, 75, 47), (8, 143, 87)]),
    (4, 16, 147, 99),
    (8, 16, 279, 167),
]


@pytest.mark.parametrize(("p", "k", "master", "ours"), ZB_MASTER)
def test_bidirectional_zero_bubble_beats_master_with_one_stash(
    p: int, k: int, master: int, ours: int
) -> None:
    assert length(Plan(stages=p, schedule="gems", replications=k // 2)) == master
    plan = Plan(stages=p, schedule="gems-zb", replications=k // 2)
    assert length(plan) == ours
    assert counted(build(plan)) == (1,) * p
    assert 10 * master >= 14 * ours


def test_at_four_stages_and_eight_samples_bidirectional_zero_bubble_is_1_4_times_faster() -> None:
    master = length(Plan(stages=4, schedule="gems", replications=4))
    assert master / length(Plan(stages=4, schedule="gems-zb", replications=4)) >= 1.4


# Stages, times, parts, units one micro-batch after the other, pipelined, and with a split backward.
PARTS = [
    *((2, 1, parts, *units) for parts, *units in [(2, 21, 12, 12), (4, 41, 24, 24)]),
    *((4, 1, parts, *units) for parts, *units in [(2, 39, 26, 18), (4, 75, 29, 25)]),
    *((8, 1, parts, *units) for parts, *units in [(4, 143, 57, 40), (8, 279, 64, 51)]),
    (4, 2, 4, 147, 53, 49),
]


@pytest.mark.parametrize(("p", "times", "parts", "alone", "pipelined", "split"), PARTS)
def test_parts_of_a_batch_are_pipelined_both_ways_in_the_memory_of_one_batch(
    p: int, times: int, parts: int, alone: int, pipelined: int, split: int
) -> None:
    """Story: `--times 1 --parts 4` ran eight micro-batches one after the other, 75 units."""
    assert length(Plan(stages=p, schedule="gems", replications=times * parts)) == alone
    for name, units in (("gems", pipelined), ("gems-zb", split)):
        plan = Plan(stages=p, schedule=name, replications=times * parts, max_in_flight=parts)
        assert length(plan) == units
        assert max(counted(build(plan))) <= parts
        assert check(lowered(plan), plan) == []


@pytest.mark.parametrize("name", ["gems", "gems-zb"])
@pytest.mark.parametrize("spatial", [("2x2",), ("2x2", "1x2")])
@pytest.mark.parametrize("parts", [2, 4])
def test_ranks_of_two_spatial_groups_hold_no_more_than_one_batch_either(
    name: str, spatial: tuple[str, ...], parts: int
) -> None:
    shape = dict(stages=3, schedule=name, replications=parts, spatial=spatial)
    plan = Plan(**shape, max_in_flight=parts)  # type: ignore[arg-type]
    assert max(counted(build(plan))) <= parts
    assert length(plan) <= length(Plan(**shape))  # type: ignore[arg-type]


def test_with_unequal_costs_a_stage_still_takes_its_own_time() -> None:
    costs = Costs((Cost(f=1, i=2, w=3), Cost(f=4, i=5, w=6)))
    plan = Plan(stages=2, micro_batches=2, schedule="sequential")
    assert simulate(build(plan), plan, costs).seconds == 2 * (1 + 4 + 11 + 5)


# --- stashes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("p", "m"), GRID)
def test_one_f_one_b_holds_p_minus_s_micro_batches(p: int, m: int) -> None:
    plan = Plan(stages=p, micro_batches=m, schedule="1f1b")
    assert counted(build(plan)) == tuple(min(p - s, m) for s in range(p))


@pytest.mark.parametrize(("p", "m"), GRID)
def test_gpipe_holds_all_and_layer_parallelism_and_gems_hold_one(p: int, m: int) -> None:
    held = {"gpipe": m, "sequential": 1, "gems": 1, "gems-zb": 1}
    for name, most in held.items():
        assert counted(build(Plan(stages=p, micro_batches=m, schedule=name))) == (most,) * p


@pytest.mark.parametrize(("p", "m"), GRID)
def test_zero_bubble_holds_at_most_p(p: int, m: int) -> None:
    plan = Plan(stages=p, micro_batches=m, schedule="zero-bubble")
    assert max(counted(build(plan))) <= min(p, m)


# --- the greedy orders --------------------------------------------------------------------------


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any placement of up to six stages, in one direction or both, chains or with skips."""
    depth = draw(st.integers(1, 6))
    every = [(a, b) for a in range(depth) for b in range(a + 2, depth)]
    skips = draw(st.lists(st.sampled_from(every), unique=True)) if every else []
    ranks = draw(st.integers(1, depth))
    spare = st.lists(st.integers(0, ranks - 1), min_size=depth - ranks, max_size=depth - ranks)
    explicit = draw(st.permutations([*range(ranks), *draw(spare)]))
    return Plan(
        stages=depth,
        micro_batches=draw(st.integers(1, 6)),
        schedule="auto",
        placement=draw(st.sampled_from(["straight", "fold", tuple(explicit)])),
        bidirectional=draw(st.booleans()),
        edges=tuple(sorted([*((s, s + 1) for s in range(depth - 1)), *skips])),
    )


def costs_of(depth: int) -> st.SearchStrategy[Costs]:
    seconds, activations = st.floats(0.01, 10), st.integers(0, 1000)
    cost = st.builds(Cost, f=seconds, i=seconds, w=seconds, activations=activations)
    return st.lists(cost, min_size=depth, max_size=depth).map(lambda items: Costs(tuple(items)))


def most_kept(schedule: Schedule, kept: list[list[dict[int, float]]]) -> list[float]:
    """The most that each rank keeps if forward takes a stage's share and backward frees it."""
    most = []
    for rank, row in enumerate(schedule.ranks):
        live = peak = 0.0
        for action in row:
            share = kept[rank][action.micro_batch][action.stage]
            live += share * {"F": 1, "B": -1, "W": -1, "I": 0}[action.kind.value]
            peak = max(peak, live)
        most.append(peak)
    return most


@given(
    st.data(), plans(), st.integers(1, 4), st.booleans(), st.sampled_from(list(greedy.PRIORITIES))
)
def test_under_a_cap_no_rank_keeps_more_samples_and_none_waits_forever(
    data: st.DataObject, plan: Plan, cap: int, split: bool, priority: str
) -> None:
    costs = data.draw(costs_of(plan.depth))
    chosen = greedy.PRIORITIES[priority]
    schedule = greedy.order(plan, costs, samples=cap, split=split, priority=chosen)
    assert check(schedule, plan) == []
    assert max(most_kept(schedule, greedy.shares(plan, None))) <= cap + 1e-9


@given(st.data(), plans(), st.floats(1, 4), st.booleans())
def test_under_a_cap_of_bytes_no_rank_keeps_more_of_them(
    data: st.DataObject, plan: Plan, room: float, split: bool
) -> None:
    costs = data.draw(costs_of(plan.depth))
    kept = greedy.shares(plan, costs)
    largest = max(sum(part.values()) for row in kept for part in row)
    schedule = greedy.order(plan, costs, memory=room * largest, split=split)
    assert check(schedule, plan) == []
    assert max(most_kept(schedule, kept)) <= room * largest * (1 + 1e-9)


@given(plans())
def test_auto_lowers_to_a_proven_schedule_on_any_placement(plan: Plan) -> None:
    assert check(lowered(plan), plan) == []


def test_a_cap_smaller_than_one_micro_batch_is_refused_with_the_bytes() -> None:
    costs = Costs((Cost(activations=100), Cost(activations=2000)))
    with pytest.raises(PlanError, match=r"rank 1 may hold 1,500 bytes .* needs 2,000; use more"):
        greedy.order(Plan(stages=2), costs, memory=1500)


def test_auto_is_as_short_as_zero_bubble_and_keeps_to_its_stashes() -> None:
    for p, m in [(2, 4), (4, 8), (4, 2)]:
        free = Plan(stages=p, micro_batches=m, schedule="auto")
        published = length(Plan(stages=p, micro_batches=m, schedule="zero-bubble"))
        assert length(free) <= 1.02 * published
        capped = Plan(stages=p, micro_batches=m, schedule="auto", max_in_flight=1)
        assert counted(build(capped)) == (1,) * p


# --- what a published order does not know -------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (Plan(stages=4, ranks=2), "one stage on each rank, but 4 stages are placed on 2 ranks"),
        (Plan(stages=3, schedule="gpipe", bidirectional=True), "'gpipe' has one direction; use"),
        (Plan(stages=3, ranks=2, schedule="interleaved"), "a multiple of 2 stages on 2 ranks"),
        (Plan(stages=4, placement="fold", schedule="zero-bubble"), "use 'interleaved', 'gpipe'"),
    ],
)
def test_a_placement_that_a_published_order_does_not_know_is_refused(
    plan: Plan, message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        build(plan)


# --- teams: stages that several ranks run together ----------------------------------------------


def team_plan(draw: st.DrawFn, name: str) -> Plan:
    """Up to four stages cut into tiles or slices, straight or laid over each other."""
    depth = draw(st.integers(1, 4))
    tiles = st.lists(st.integers(1, 3), min_size=1, max_size=2).map(tuple)
    spatial = draw(st.lists(tiles, max_size=min(depth, 2)))
    cut = Plan(
        stages=depth,
        spatial=spatial,
        local_dp=draw(st.integers(1, 2)) if len(spatial) < depth else 1,
    )
    placement = "straight"
    if cut.cut and draw(st.booleans()):
        ranks = st.permutations(range(draw(st.integers(max(cut.sizes), cut.ranks))))
        teams = [draw(ranks)[:size] for size in cut.sizes]
        used = sorted({rank for team in teams for rank in team})
        placement = tuple(tuple(used.index(rank) for rank in team) for team in teams)
    every = [(a, b) for a in range(depth) for b in range(a + 2, depth)]
    skips = draw(st.lists(st.sampled_from(every), unique=True)) if every else []
    return Plan(
        stages=depth,
        spatial=spatial,
        local_dp=cut.local_dp,
        placement=placement,
        schedule=name,
        bidirectional=draw(st.booleans()) if name in ("sequential", "auto") else None,
        micro_batches=draw(st.integers(1, 4)),
        data=draw(st.integers(1, 2)),
        edges=tuple(sorted([*((s, s + 1) for s in range(depth - 1)), *skips])),
    )


team_plans = st.composite(lambda draw: team_plan(draw, draw(st.sampled_from(EVERY))))


@pytest.mark.parametrize("name", EVERY)
@given(st.data())
def test_any_cut_under_any_schedule_lowers_to_a_proven_one(name: str, data: st.DataObject) -> None:
    plan = team_plan(data.draw, name)
    costs = data.draw(costs_of(plan.depth))
    assert check(build(plan, costs), plan.one_copy()) == []
    assert check(lowered(plan, costs), plan) == []


@given(team_plans())
def test_all_ranks_of_a_team_do_the_work_of_its_stage_in_one_order(plan: Plan) -> None:
    rows = [[a for a in row if a.computes] for row in lowered(plan).ranks]
    for replica, teams in enumerate(plan.spatial_groups):
        for stage, team in enumerate(teams):
            mine = (
                [a for a in rows[rank] if (a.stage, a.replica) == (stage, replica)] for rank in team
            )
            assert len(set(map(tuple, mine))) == 1


def test_lowered_a_team_sends_and_receives_rank_by_rank() -> None:
    plan = Plan(stages=3, spatial=["2x1", "1x1"], local_dp=2, schedule="1f1b")
    assert plan.spatial_groups == (((0, 1), (2,), (3, 4)),)
    assert lowered(plan) == parse(
        """
        0: 0B0<1 0F0 0F0>1 0B0 0A 0O
        1: 0B0<1 0F0 0F0>1 0B0 0A 0O
        2: 1B0<2 1F0<0 1F0 1F0>2 1B0 1B0>0 1A 1O
        3: 2F0<1 2F0 2B0 2B0>1 2A 2O
        4: 2F0<1 2F0 2B0 2B0>1 2A 2O
        """
    )


def test_a_rank_of_both_teams_still_sends_to_the_others_and_hears_from_them() -> None:
    plan = Plan(stages=2, spatial="1x2", schedule="sequential", placement=((0, 1), 1))
    assert lowered(plan) == parse(
        """
        0: 0B0<1 0F0 0F0>1 0B0 0A 0O
        1: 1F0<0 0F0 1F0 1B0 1B0>0 1A 0B0 0A 0O 1O
        """
    )


@pytest.mark.parametrize("name", ["sequential", "gems"])
@pytest.mark.parametrize("spatial", [["2x2", "1x2"], ["2x2"], ["1x3", "1x3"], [2, 2, 2]])
def test_sample_by_sample_every_rank_of_a_cut_plan_keeps_one_stash(
    name: str, spatial: list[str]
) -> None:
    for depth in range(len(spatial), 6):
        plan = Plan(stages=depth, spatial=spatial, schedule=name, micro_batches=6)
        assert counted(build(plan)) == (1,) * plan.ranks


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in GRID if p < 5 and m < 9])
def test_a_cut_pipeline_is_as_long_as_a_whole_one_whose_stages_cost_the_same(
    p: int, m: int
) -> None:
    for name in STRAIGHT:
        whole = Plan(stages=p, micro_batches=m, schedule=name)
        tiled = Plan(stages=p, micro_batches=m, schedule=name, spatial=["2x2", "1x2"][:p])
        assert length(tiled) == length(whole)
        kept = counted(build(whole))
        expected = [n for n, size in zip(kept, tiled.sizes, strict=True) for _ in range(size)]
        assert list(counted(build(tiled))) == expected


@pytest.mark.parametrize("name", EVERY)
def test_what_costs_nothing_is_still_done_after_what_it_needs(name: str) -> None:
    # All starts are equal; the ranks of two teams have only the order of the lanes to go by.
    plan = Plan(
        stages=3,
        spatial=["1x2", "1x2"],
        placement=((0, 1), (1, 2), 1),
        micro_batches=3,
        schedule=name,
    )
    free = Costs((Cost(f=0, i=0, w=0),) * 3)
    assert check(lowered(plan, free), plan) == []


def test_tiles_of_one_cell_change_nothing() -> None:
    for name in EVERY:
        plan = Plan(stages=3, micro_batches=4, schedule=name, data=2)
        single = Plan(stages=3, micro_batches=4, schedule=name, data=2, spatial=["1x1", "1"])
        assert lowered(single) == lowered(plan)


def test_a_cut_plan_refuses_what_its_schedule_does_not_know() -> None:
    with pytest.raises(PlanError, match="'gpipe' has one direction"):
        build(Plan(stages=3, spatial=4, schedule="gpipe", bidirectional=True))
    costs = Costs((Cost(activations=100), Cost(activations=2000)))
    with pytest.raises(PlanError, match="rank 1 may hold 1,500 bytes") as error:
        build(Plan(stages=2, spatial=4, schedule="auto"), costs, memory=1500)
    assert "here every stage counts as one rank" in str([error.value, *_notes(error.value)])


def _notes(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


@given(team_plans())
def test_prediction_runs_forward_only_on_every_rank_of_a_team(plan: Plan) -> None:
    schedule = forward_only(plan)
    run = ScheduleMachine(schedule, plan)
    assert len(list(run)) == sum(map(len, schedule.ranks)) and run.stuck() == []
    done = Counter((rank, a.stage, a.micro_batch) for rank, a in schedule if a.computes)
    wanted = ((s, i) for s in range(plan.depth) for i in range(plan.total))
    assert done == Counter((r, s, i) for s, i in wanted for r in plan.spatial_group_for(s, i))


# --- receipts -----------------------------------------------------------------------------------


def test_a_message_back_proves_what_its_sender_had_posted() -> None:
    plan = Plan(stages=2, micro_batches=2, schedule="1f1b")
    schedule = lowered(plan)
    there, back = (
        [Message(what, source, 1 - source, i) for i in (0, 1)]
        for what, source in (("output", 0), ("gradient", 1))
    )
    assert receipts(schedule, plan)[0] == {(back[0], 1): there}
    assert receipts(schedule, plan)[1] == {(there[1], 0): [back[0]]}


def test_each_rank_of_a_team_proves_what_it_has_posted_itself() -> None:
    plan = Plan(stages=2, spatial="1x2", schedule="1f1b")
    there, back = Message("output", 0, 1, 0), Message("gradient", 1, 0, 0)
    for rank in (0, 1):
        assert receipts(lowered(plan), plan)[rank] == {(back, 2): [there]}
    assert receipts(lowered(plan), plan)[2] == {}, "nothing comes after its gradient"


@given(team_plans())
def test_receipts_hold_in_any_schedule(plan: Plan) -> None:
    schedule = lowered(plan)
    for rank in range(plan.world):
        proven: set[tuple[Message, int]] = set()
        for (message, other), posted in receipts(schedule, plan)[rank].items():
            row = schedule.ranks[other]
            sent = next(at for at, a in enumerate(row) if a.way == ">" and a.message == message)
            before = {a.message for a in row[:sent] if a.way == "<"}
            assert other != rank and set(posted) <= before
            assert rank in plan.spatial_group_for(message.target, message.micro_batch)
            own = schedule.ranks[rank]
            unit = (message.target, message.micro_batch, message.part)
            forward = message.what == "output"
            taken = next(
                at
                for at, a in enumerate(own)
                if a.computes
                and a.unit == unit
                and (a.kind is Kind.FORWARD) == forward
                and a.kind not in (Kind.RECOMPUTE, Kind.WEIGHT)
            )
            for mine in posted:
                assert any(a.way == ">" and a.message == mine for a in own[:taken]), "sent by then"
                assert rank in plan.spatial_group_for(mine.source, mine.micro_batch)
                assert (mine, other) not in proven, "each once"
                proven.add((mine, other))


IN_PARTS = "0: 0F0.0 0F0.1 0B0.0 0B0.1\n1: 1F0.0 1B0.0 1F0.1 1B0.1\n"


def test_a_schedule_with_parts_parses_validates_and_simulates_as_with_micro_batches() -> None:
    """A part is a unit of its own, with the rules of a micro-batch."""
    plan, order = Plan(stages=2), parse(IN_PARTS)
    assert str(order) == IN_PARTS and check(order, plan) == []
    ranks = lower(order, plan)
    assert parse(str(ranks)) == ranks and check(ranks, plan) == []
    assert "1F0.0<0 1F0.0 1F0.1<0 1B0.0 1B0.0>0 1F0.1" in str(ranks)
    timeline = simulate(ranks, plan, unit(2))
    two = Plan(stages=2, micro_batches=2)
    whole = lower(parse(IN_PARTS.replace("0.", "")), two)
    assert timeline.seconds == simulate(whole, two, unit(2)).seconds
    assert timeline.max_in_flight == (2, 1)


@pytest.mark.parametrize(
    "text, problem",
    [
        (
            "0: 0F0.0 0F0.1 0B0.0\n",
            "gradient of stage 0, micro-batch 0, part 1 is computed 0 times",
        ),
        ("0: 0F0.1 0B0.1\n", "output of stage 0, micro-batch 0, part 0 is computed 0 times"),
        ("0: 0F0.0 0F0 0B0.0\n", "micro-batch 0 is run both as a whole and in parts"),
        ("0: 0F0.0 0B0.1 0F0.1 0B0.0\n", "0B0.1 waits forever for 0F0.1"),
    ],
)
def test_parts_that_are_missing_mixed_or_out_of_order_are_problems(text: str, problem: str) -> None:
    assert any(problem in found for found in check(parse(text), Plan(stages=1)))


def test_the_engine_rejects_parts_which_no_adapter_knows() -> None:
    order = lower(parse("0: 0F0.0 0B0.0\n"), plan := Plan(stages=1))
    adapter: Any = None
    transport: Any = SimpleNamespace(rank=0)
    with pytest.raises(ScheduleError, match=r"0F0\.0 is of a part, but adapters run whole"):
        Engine(plan, order, adapter, transport)
