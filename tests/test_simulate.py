"""Schedules in time: what a message costs, and what a step would take with a core per rank."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gems.errors import ScheduleError
from gems.hardware import Link, Machine, machine
from gems.model.costs import Cost, Costs, Edge, unit
from gems.plans.plan import Plan
from gems.predict.simulate import simulate, virtual
from gems.predict.timeline import Event, Timeline
from gems.schedule.action import parse
from gems.schedule.build import build, lowered

TWO = Costs((Cost(), Cost()), messages=(Edge(0, 1, 100, 100),))
LINK = Link(bandwidth=50.0, latency=0.5)  # a message of 100 bytes takes 2.5 s


def starts(timeline: Timeline) -> dict[str, float]:
    return {event.action: event.start for event in timeline.events}


def test_a_message_takes_its_latency_and_its_bytes() -> None:
    plan = Plan(stages=2)
    timeline = simulate(lowered(plan), plan, TWO, LINK)
    assert starts(timeline) == {"0F0": 0, "1F0": 3.5, "1B0": 4.5, "0B0": 9, "1A": 6.5, "0A": 11}
    assert timeline.seconds == 11
    assert timeline.clock == "simulated"


def test_links_are_free_unless_given() -> None:
    plan = Plan(stages=2)
    assert simulate(lowered(plan), plan, TWO).seconds == 6
    assert simulate(build(plan), plan, TWO).seconds == 6


def test_messages_of_one_link_queue_and_those_of_two_links_do_not() -> None:
    queued = Plan(stages=2, micro_batches=2, schedule="gpipe")
    at = starts(simulate(lowered(queued), queued, TWO, LINK))
    assert (at["1F0"], at["1F1"]) == (3.5, 6)  # 0F1 is done at 2, but the link is busy until 3.5
    fan = Plan(stages=3, edges=((0, 1), (0, 2)))
    costs = Costs((Cost(),) * 3, messages=(Edge(0, 1, 100, 100), Edge(0, 2, 100, 100)))
    at = starts(simulate(lowered(fan), fan, costs, LINK))
    assert (at["1F0"], at["2F0"]) == (3.5, 3.5)


def test_a_skip_goes_straight_to_its_reader_and_delays_nobody_else() -> None:
    plan = Plan(stages=3, edges=((0, 1), (0, 2), (1, 2)))
    costs = Costs(
        (Cost(),) * 3, messages=(Edge(0, 1, 0, 0), Edge(0, 2, 500, 500), Edge(1, 2, 0, 0))
    )
    at = starts(simulate(lowered(plan), plan, costs, LINK))
    assert at["1F0"] == 1.5
    assert at["2F0"] == 1 + 0.5 + 500 / 50


def test_a_stage_waits_for_its_own_message_not_for_the_next_one_to_the_same_rank() -> None:
    # Stages 1 and 2 are both on rank 1. The message for stage 2 is sent second and used to hide
    # the arrival of the one for stage 1.
    plan = Plan(stages=3, placement=(0, 1, 1), schedule="gpipe", edges=((0, 1), (0, 2), (1, 2)))
    costs = Costs((Cost(),) * 3, messages=(Edge(0, 1, 0, 0), Edge(0, 2, 500, 500)))
    at = starts(simulate(lowered(plan), plan, costs, LINK))
    assert (at["1F0"], at["2F0"]) == (1.5, 12)


def test_copies_of_the_pipeline_run_side_by_side() -> None:
    one = Plan(stages=2, micro_batches=4)
    two = replace(one, data=2)
    lengths = [simulate(lowered(plan), plan, unit(2)).seconds for plan in (one, two)]
    assert lengths[0] == lengths[1] == 15


def test_messages_between_nodes_take_the_slower_link() -> None:
    # Two devices per node: stages 0 and 1 on one, 2 and 3 on the other.
    fast, slow = Link(bandwidth=100, latency=0.0), Link(bandwidth=10, latency=0.5)
    cluster = Machine("toy", machine("cpu").device, fast, fast, node=2, between=slow)
    plan = Plan(stages=4, schedule="gpipe")
    costs = Costs((Cost(),) * 4, messages=tuple(Edge(s, s + 1, 50, 50) for s in range(3)))
    at = starts(simulate(lowered(plan), plan, costs, cluster))
    assert [at[f"{s}F0"] for s in range(4)] == [0, 1.5, 1.5 + 1 + 5.5, 1.5 + 1 + 5.5 + 1.5]


# --- teams --------------------------------------------------------------------------------------


def test_a_stage_that_is_cut_takes_a_part_of_its_time_on_every_rank() -> None:
    plan = Plan(stages=2, spatial=(2, 2))
    costs = Costs((Cost(4, 4, 4), Cost()), messages=(Edge(0, 1, 100, 100),)).shared(plan.sizes)
    timeline = simulate(lowered(plan), plan, costs, LINK)
    # Each of four links carries 25 bytes in 0.5 + 0.5 s.
    assert starts(timeline) == {"0F0": 0, "1F0": 2, "1B0": 3, "0B0": 6, "1A": 5, "0A": 8}
    first = [(e.rank, e.start, e.stop) for e in timeline.events if e.action == "0F0"]
    assert first == [(rank, 0, 1) for rank in range(4)]
    assert timeline.busy(3) == 3 and timeline.ranks == 5


def test_between_teams_a_message_travels_in_parts_side_by_side() -> None:
    plan = Plan(stages=2, spatial=["2x2", "1x2"])
    costs = Costs((Cost(), Cost()), messages=(Edge(0, 1, 100, 100),)).shared(plan.sizes)
    at = starts(simulate(lowered(plan), plan, costs, LINK))
    assert at["1F0"] == 1 / 4 + 0.5 + 25 / 50


def test_a_rank_does_not_send_to_itself() -> None:
    whole = Plan(stages=2, local_dp=2, placement=((0, 1), (0, 1)), schedule="gpipe")
    at = starts(simulate(lowered(whole), whole, TWO, LINK))
    assert at["1F0"] == 3.5, "the other's part takes its time"
    alone = Plan(stages=2, placement=(0, 0), schedule="gpipe")
    assert starts(simulate(lowered(alone), alone, TWO, LINK))["1F0"] == 1


def test_a_team_begins_when_its_last_rank_is_free() -> None:
    # Stage 1 is on rank 1 alone, so rank 0 waits with 0F1 until rank 1 has done 1F0.
    plan = Plan(stages=2, spatial="1x2", placement=((0, 1), 1), schedule="gpipe", micro_batches=2)
    order = parse("0: 0F0 0F1 0B1 0B0\n1: 0F0 1F0 0F1 1F1 1B1 0B1 1B0 0B0\n")
    timeline = simulate(order, plan, Costs((Cost(f=1), Cost(f=5))))
    at = {(e.rank, e.action): (e.start, e.stop) for e in timeline.events}
    assert at[0, "0F1"] == at[1, "0F1"] == (6, 7)
    assert at[0, "0B1"] == at[1, "0B1"] == (14, 16)
    assert timeline.seconds == 20 and timeline.busy(0) == 6


def test_ranks_of_a_team_begin_together_and_end_each_in_its_own_virtual_time() -> None:
    plan = Plan(stages=1, spatial=2, schedule="gpipe")
    seen = [("0F0", 0, 1.0), ("0F0", 1, 3.0), ("0B0", 0, 2.0), ("0B0", 1, 2.0)]
    events = tuple(Event(rank, action, 0, 9, cpu) for action, rank, cpu in seen)
    laid = virtual(Timeline(events), lowered(plan), plan)
    at = {(e.rank, e.action): (e.start, e.stop) for e in laid.events if e.action != "0A"}
    assert at == {(0, "0F0"): (0, 1), (1, "0F0"): (0, 3), (0, "0B0"): (3, 5), (1, "0B0"): (3, 5)}


# --- the virtual clock --------------------------------------------------------------------------


def test_the_virtual_clock_lays_cpu_time_out_as_if_every_rank_had_a_core() -> None:
    plan = Plan(stages=2, micro_batches=2, schedule="gpipe")
    schedule = lowered(plan)
    cpu = {"F": 1.0, "B": 2.0}
    # One core ran the two ranks in turn: the wall clock says 12.
    events, now = [], 0.0
    for action in ("0F0", "0F1", "1F0", "1F1", "1B1", "1B0", "0B1", "0B0"):
        stop = now + cpu[action[1]]
        events.append(Event(int(action[0]), action, now, stop, cpu[action[1]]))
        now = stop
    measured = Timeline(tuple(events), "wall", max_in_flight=(2, 2))
    laid = virtual(measured, schedule, plan)
    assert measured.seconds == 12
    assert laid.seconds == (2 + 2 - 1) * 3
    assert (laid.clock, laid.max_in_flight) == ("virtual", (2, 2))


def test_a_rank_that_waits_is_idle_in_the_virtual_step_however_long_it_waited() -> None:
    plan = Plan(stages=2)
    times = {"0F0": (0, 1), "1F0": (1, 9), "1B0": (9, 11), "0B0": (11, 13)}
    events = [Event(int(a[0]), a, start, stop, 1.0) for a, (start, stop) in times.items()]
    laid = virtual(Timeline(tuple(events)), lowered(plan), plan)
    assert laid.seconds == 4
    assert laid.busy(1) == 2


def test_a_schedule_that_cannot_finish_is_refused_by_rank_step_and_action() -> None:
    plan = Plan(stages=2)
    with pytest.raises(ScheduleError, match=r"rank 0, step 0: 0B0 can never run; check\(\) lists"):
        simulate(parse("0: 0B0 0F0\n1: 1F0 1B0"), plan, unit(2))
