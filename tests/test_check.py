"""What `check` finds: every kind of fault, by rank and action, and all of them at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gems.errors import ScheduleError
from gems.hardware import Link
from gems.model.costs import unit
from gems.plans.plan import Plan
from gems.predict.simulate import simulate
from gems.schedule.action import Action, Kind, Schedule, parse
from gems.schedule.build import build, lowered
from gems.schedule.validate import check, require

CHAIN = Plan(stages=2, micro_batches=2, schedule="1f1b")
GEMS = Plan(stages=2, schedule="gems", replications=1)
TEAMS = Plan(stages=2, spatial="1x2", micro_batches=2, schedule="1f1b")  # ranks 0 and 1, then 2


def edited(schedule: Schedule, *changes: tuple[str, str]) -> Schedule:
    """The schedule with pieces of its text replaced; each must be there."""
    text = str(schedule)
    for old, new in changes:
        assert text.count(old) == 1, f"{old!r} in\n{text}"
        text = text.replace(old, new)
    return parse(text)


def test_a_sound_schedule_has_no_problems() -> None:
    for plan in (CHAIN, GEMS, TEAMS):
        assert check(build(plan), plan) == []
        assert check(lowered(plan), plan) == []
        assert require(build(plan), plan) == build(plan)


def test_work_that_is_missing_is_named() -> None:
    found = check(edited(build(CHAIN), (" 0B1", "")), CHAIN)
    assert found == [
        "the gradient of stage 0, micro-batch 1 is computed 0 times",
        "the weight of stage 0, micro-batch 1 is computed 0 times",
    ]


def test_work_that_is_done_twice_is_named() -> None:
    found = check(edited(build(CHAIN), (" 0F1", " 0F1 0F1")), CHAIN)
    assert found == ["the output of stage 0, micro-batch 1 is computed 2 times"]


def test_a_weight_gradient_cannot_be_computed_apart_and_as_part_of_backward() -> None:
    found = check(edited(build(CHAIN), (" 0B1", " 0B1 0W1")), CHAIN)
    assert found == ["the weight of stage 0, micro-batch 1 is computed 2 times"]


def test_work_on_the_wrong_rank_is_sent_home() -> None:
    found = check(edited(build(CHAIN), (" 0F1", ""), (" 1F1", " 0F1 1F1")), CHAIN)
    assert found == ["rank 1: 0F1 belongs on rank 0"]


def test_work_in_the_wrong_replica_is_named() -> None:
    found = check(edited(build(GEMS), ("1F1@1", "1F1")), GEMS)
    assert found == ["rank 0: 1F1 belongs to replica 1, not 0"]


def test_work_outside_the_plan_is_named() -> None:
    found = check(edited(build(CHAIN), (" 0B1", " 0B1 7F0 0F9")), CHAIN)
    assert found == [
        "rank 0: 7F0 is outside the plan's 2 stages and 2 micro-batches",
        "rank 0: 0F9 is outside the plan's 2 stages and 2 micro-batches",
    ]


def test_a_schedule_of_another_world_is_refused_at_once() -> None:
    found = check(build(CHAIN), Plan(stages=2, micro_batches=2, data=2))
    assert found == ["the schedule has 2 ranks, the plan 4"]


def test_receives_in_another_order_than_the_sends_are_a_mismatch_of_that_link() -> None:
    found = check(edited(lowered(CHAIN), ("1F0<0 1F0 1F1<0", "1F1<0 1F0<0 1F0")), CHAIN)
    assert found == [
        "link 0 to 1, message 0: rank 0 sends the output of stage 0 for stage 1, micro-batch 0, "
        "rank 1 expects the output of stage 0 for stage 1, micro-batch 1"
    ]


def test_a_missing_send_and_a_missing_receive_are_named() -> None:
    found = check(edited(lowered(CHAIN), (" 0F1>1", ""), (" 0B0<1", "")), CHAIN)
    assert found == [
        "the output of stage 0 for stage 1, micro-batch 1 is sent 0 times, not 1",
        "the gradient of stage 1 for stage 0, micro-batch 0 is received 0 times, not 1",
    ]


def test_a_message_that_nobody_wants_is_named_even_if_both_ends_agree() -> None:
    twice = (("0F0>1", "0F0>1 0F0>1"), ("1F0<0", "1F0<0 1F0<0"))
    assert check(edited(lowered(CHAIN), *twice), CHAIN) == [
        "the output of stage 0 for stage 1, micro-batch 0 is sent 2 times, not 1",
        "the output of stage 0 for stage 1, micro-batch 0 is received 2 times, not 1",
    ]
    assert check(edited(lowered(CHAIN), ("0F0>1", "0F0>1 0F0>9")), CHAIN) == [
        "the output of stage 0 for stage 9, micro-batch 0 is sent 1 times, not 0"
    ]


def test_ranks_that_wait_for_each_other_are_a_deadlock_told_by_rank_step_and_action() -> None:
    plan = Plan(stages=2, micro_batches=2, schedule="gpipe")
    found = check(parse("0: 0F0 0B0 0F1 0B1\n1: 1F0 1F1 1B0 1B1\n"), plan)
    assert found == [
        "rank 0, step 1: 0B0 waits forever for 1B0",
        "rank 1, step 1: 1F1 waits forever for 0F1",
    ]


def test_a_split_backward_waits_for_an_input_gradient() -> None:
    plan = Plan(stages=1, schedule="zero-bubble")
    assert check(parse("0: 0F0 0W0 0I0"), plan) == ["rank 0, step 1: 0W0 waits forever for 0I0"]


def test_a_receive_that_is_posted_after_its_use_is_a_deadlock() -> None:
    late = edited(lowered(CHAIN), ("1F0<0 1F0 1F1<0", "1F0 1F0<0 1F1<0"))
    assert check(late, CHAIN) == [
        "rank 0, step 6: 0B0 waits forever for 1B0",
        "rank 1, step 0: 1F0 waits forever for 0F0",
    ]


def test_a_sum_before_the_last_backward_is_named() -> None:
    found = check(edited(lowered(CHAIN), (" 0B1 0A", " 0A 0B1")), CHAIN)
    assert found == ["rank 0, step 8: 0B1 comes after 0A"]


def test_sums_that_are_missing_or_doubled_are_named() -> None:
    assert check(edited(lowered(CHAIN), (" 0A", "")), CHAIN) == [
        "rank 0 reduces stages [] but holds [0]",
        "rank 0, step 8: 0O comes before 0A",
    ]
    assert check(edited(lowered(CHAIN), (" 0A", " 0A 0A")), CHAIN) == [
        "rank 0, step 9: a second 0A"
    ]


TIED = Plan(stages=3, micro_batches=1, tied=((0, 2),))
ZERO = Plan(stages=2, micro_batches=1, data=2, zero=1)


def test_the_update_at_the_end_is_written_out() -> None:
    """Ties are reduced once all gradients are there; with zero=1 shards are gathered at last."""
    ends = [row.split("A", 1)[1] for row in str(lowered(TIED)).splitlines()]
    assert ends == [" 0T 0O", " 1O", " 0T 2O"]
    assert str(lowered(ZERO)).splitlines()[0].endswith(" 0A 0O 0G")
    assert check(lowered(TIED), TIED) == check(lowered(ZERO), ZERO) == []


@pytest.mark.parametrize(
    ("plan", "old", "new", "fault"),
    [
        (TIED, " 0T 0O", " 0O", "rank 0 never does 0T"),
        (TIED, " 0T 0O", " 0O 0T", "rank 0, step 5: 0O comes before 0T"),
        (TIED, " 0A 0T", " 0T 0A", "rank 0, step 4: 0T comes before 0A"),
        (TIED, " 1O", " 0T 1O", "rank 1, step 7: 0T has nothing to do there"),
        (ZERO, " 0O 0G", " 0O", "rank 0 never does 0G"),
        (ZERO, " 0O 0G", " 0G 0O", "rank 0, step 5: 0G comes before 0O"),
        (ZERO, " 1G", " 1G 1G", "rank 1, step 7: 1G is the second of its stage"),
        (CHAIN, " 0O", " 0O 0G", "rank 0, step 10: 0G has nothing to do there"),
    ],
)
def test_an_update_out_of_place_is_named(plan: Plan, old: str, new: str, fault: str) -> None:
    assert fault in check(parse(str(lowered(plan)).replace(old, new, 1)), plan)


def test_a_tie_that_one_rank_comes_to_late_is_waited_for() -> None:
    """All ranks of both stages reduce it: it is as late as the last of them."""
    costs = replace(unit(3), tied=((0, 100),))
    tied, link = (
        simulate(lowered(TIED), TIED, costs, Link(latency=0.0, bandwidth=1.0)),
        Link(latency=0.0, bandwidth=1.0),
    )
    alone = Plan(stages=3, micro_batches=1)
    plain = simulate(lowered(alone), alone, unit(3), link)
    (event,) = {(e.start, e.stop) for e in tied.events if e.action == "0T"}
    assert event == (plain.seconds, plain.seconds + link.allreduce_seconds(100, 2))


def test_sums_crosswise_are_named() -> None:
    plan = Plan(stages=2, schedule="gems", replications=1)
    found = check(edited(lowered(plan), (" 1A 0A", " 0A 1A")), plan)
    assert found == ["ranks 0 and 1 reduce stages [0, 1] in different orders"]


def test_all_faults_are_reported_at_once() -> None:
    broken = edited(lowered(CHAIN), (" 0B1 0A", " 0A"), (" 0F1>1", ""), (" 1B1 ", " 1B1 1B1 "))
    with pytest.raises(ScheduleError) as error:
        require(broken, CHAIN)
    assert str(error.value).splitlines() == [
        "this schedule cannot run:",
        "  - the gradient of stage 0, micro-batch 1 is computed 0 times",
        "  - the weight of stage 0, micro-batch 1 is computed 0 times",
        "  - the gradient of stage 1, micro-batch 1 is computed 2 times",
        "  - the weight of stage 1, micro-batch 1 is computed 2 times",
        "  - the output of stage 0 for stage 1, micro-batch 1 is sent 0 times, not 1",
    ]


# --- teams --------------------------------------------------------------------------------------


def row(schedule: Schedule, rank: int, *changes: tuple[str, str]) -> Schedule:
    """The schedule with pieces of one rank's text replaced."""
    own = edited(Schedule((schedule.ranks[rank],)), *changes)
    return with_row(schedule, rank, own.ranks[0])


def test_work_that_one_rank_of_a_team_leaves_out_is_named() -> None:
    assert check(row(build(TEAMS), 1, (" 0F1", "")), TEAMS) == [
        "the output of stage 0, micro-batch 1 is computed 0 times on rank 1"
    ]
    assert check(row(lowered(TEAMS), 0, (" 0B1 0A", " 0A")), TEAMS) == [
        "the gradient of stage 0, micro-batch 1 is computed 0 times on rank 0",
        "the weight of stage 0, micro-batch 1 is computed 0 times on rank 0",
    ]


def test_work_that_one_rank_does_for_another_is_sent_home() -> None:
    twice = row(row(build(TEAMS), 1, (" 0F1", "")), 0, (" 0F1", " 0F1 0F1"))
    assert check(twice, TEAMS) == [
        "the output of stage 0, micro-batch 1 is computed 2 times on rank 0",
        "the output of stage 0, micro-batch 1 is computed 0 times on rank 1",
    ]
    assert check(row(build(TEAMS), 2, ("1F0 ", "0F0 1F0 ")), TEAMS) == [
        "rank 2: 0F0 belongs on ranks 0, 1"
    ]


def test_a_message_that_one_rank_of_a_team_forgets_is_named() -> None:
    assert check(row(lowered(TEAMS), 1, (" 0F1>1", "")), TEAMS) == [
        "the output of stage 0 for stage 1, micro-batch 1 is sent 0 times on rank 1, not 1"
    ]
    assert check(row(lowered(TEAMS), 0, (" 0B0<1", "")), TEAMS) == [
        "the gradient of stage 1 for stage 0, micro-batch 0 is received 0 times on rank 0, not 1"
    ]


def test_receives_that_are_swapped_are_a_mismatch_of_every_link_they_come_over() -> None:
    swapped = row(lowered(TEAMS), 2, ("1F0<0 1F0 1F1<0", "1F1<0 1F0<0 1F0"))
    assert check(swapped, TEAMS) == [
        f"link {rank} to 2, message 0: rank {rank} sends the output of stage 0 for stage 1, "
        "micro-batch 0, rank 2 expects the output of stage 0 for stage 1, micro-batch 1"
        for rank in (0, 1)
    ]


def test_a_team_that_works_crosswise_waits_for_itself_forever() -> None:
    crosswise = row(build(TEAMS), 1, ("0F0 0F1", "0F1 0F0"))
    assert check(crosswise, TEAMS) == [
        "rank 0, step 0: 0F0 waits forever for rank 1, which is at 0F1",
        "rank 1, step 0: 0F1 waits forever for rank 0, which is at 0F0",
        "rank 2, step 0: 1F0 waits forever for 0F0",
    ]


def test_a_backward_that_only_one_rank_splits_is_no_work_of_a_team() -> None:
    found = check(row(build(TEAMS), 0, ("0B0", "0I0 0W0")), TEAMS)
    assert found[0] == "rank 0, step 2: 0I0 waits forever for rank 1, which is at 0B0"


def test_a_rank_that_lacks_a_message_holds_up_its_team() -> None:
    late = row(lowered(TEAMS), 1, (" 0B0<1", ""), (" 0B1<1 0B0 ", " 0B0 0B0<1 0B1<1 "))
    assert check(late, TEAMS)[:2] == [
        "rank 0, step 6: 0B0 waits forever for rank 1, which waits too",
        "rank 1, step 4: 0B0 waits forever for 1B0",
    ]


def test_the_parts_of_all_ranks_of_a_team_are_waited_for() -> None:
    sends_late = row(
        lowered(TEAMS), 1, (" 0F0>1", ""), (" 0F1>1", ""), (" 0B0 ", " 0B0 0F0>1 0F1>1 ")
    )
    assert check(sends_late, TEAMS) == [
        "rank 0, step 6: 0B0 waits forever for 1B0",
        "rank 1, step 4: 0B0 waits forever for 1B0",
        "rank 2, step 1: 1F0 waits forever for 0F0",
    ]


def test_two_teams_that_wait_for_each_other_are_a_deadlock() -> None:
    # Each of the two ranks begins with another direction's stage: neither team is ever complete.
    plan = Plan(stages=1, spatial=2, schedule="gems", replications=1)
    assert plan.spatial_groups == (((0, 1),), ((1, 0),))
    assert check(parse("0: 0F0 0B0 0F1@1 0B1@1\n1: 0F1@1 0B1@1 0F0 0B0\n"), plan) == [
        "rank 0, step 0: 0F0 waits forever for rank 1, which is at 0F1@1",
        "rank 1, step 0: 0F1@1 waits forever for rank 0, which is at 0F0",
    ]


# --- mutations ----------------------------------------------------------------------------------

NAMES = ("sequential", "gpipe", "1f1b", "zero-bubble", "gems", "gems-zb", "auto")


@st.composite
def places_in_schedules(draw: st.DrawFn) -> tuple[Plan, Schedule, int, int]:
    """A proven schedule, and one of its actions as rank and step."""
    stages = draw(st.integers(1, 4))
    spatial = draw(st.sampled_from([[], [], ["1x2"], ["1x3", 2]]))[:stages]
    plan = Plan(
        stages=stages,
        spatial=spatial,
        local_dp=draw(st.integers(1, 2)) if len(spatial) < stages else 1,
        micro_batches=draw(st.integers(1, 4)),
        schedule=draw(st.sampled_from(NAMES)),
        data=draw(st.integers(1, 2)),
    )
    schedule = lowered(plan)
    rank = draw(st.integers(0, plan.world - 1))
    return plan, schedule, rank, draw(st.integers(0, len(schedule.ranks[rank]) - 1))


def with_row(schedule: Schedule, rank: int, row: tuple[Action, ...]) -> Schedule:
    return Schedule((*schedule.ranks[:rank], row, *schedule.ranks[rank + 1 :]))


@given(places_in_schedules())
def test_no_action_can_be_left_out(place: tuple[Plan, Schedule, int, int]) -> None:
    plan, schedule, rank, step = place
    row = schedule.ranks[rank]
    assert check(with_row(schedule, rank, row[:step] + row[step + 1 :]), plan)


@given(places_in_schedules())
def test_no_action_can_be_done_twice(place: tuple[Plan, Schedule, int, int]) -> None:
    plan, schedule, rank, step = place
    row = schedule.ranks[rank]
    assert check(with_row(schedule, rank, (*row[: step + 1], row[step], *row[step + 1 :])), plan)


def test_check_ends_for_every_swap_of_neighbours() -> None:
    """Story: rank 0 was at an action that rank 1 leads, rank 1 at one that rank 0 leads, and each
    woke the other for ever."""
    plan = Plan(stages=2, replications=1, schedule="gems", spatial=[(1, 2), (1, 2)])
    schedule = lowered(plan)
    for rank, row in enumerate(schedule.ranks):
        for at in range(len(row) - 1):
            swapped = (*row[:at], row[at + 1], row[at], *row[at + 2 :])
            check(with_row(schedule, rank, swapped), plan)


@given(places_in_schedules())
def test_two_neighbours_that_check_lets_swap_still_run(
    place: tuple[Plan, Schedule, int, int],
) -> None:
    plan, schedule, rank, step = place
    row = schedule.ranks[rank]
    assume(step + 1 < len(row))
    swapped = with_row(schedule, rank, (*row[:step], row[step + 1], row[step], *row[step + 2 :]))
    if not check(swapped, plan):
        ran = simulate(swapped, plan, unit(plan.depth)).events
        collectives = (Kind.ALL_REDUCE, Kind.TIED, Kind.ALL_GATHER)
        assert len(ran) == sum(a.computes or a.kind in collectives for _, a in schedule)
    else:
        assert_it_matters(swapped, plan)


def assert_it_matters(schedule: Schedule, plan: Plan) -> None:
    """A refused swap is a deadlock, messages out of order, or a sum out of turn: nothing less."""
    assert any(
        word in fault
        for fault in check(schedule, plan)
        for word in ("waits forever", "sends", "comes after", "comes before", "different orders")
    )
