"""Under NCCL no plan that can be written hangs: cold, warm, or with few hardware queues. And seeded
mistakes of each kind are found, by rank and action. Simulated: nothing here needs a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch

import gems
from gems.cli.main import main
from gems.engine.executor import Engine
from gems.errors import PlanError, ScheduleError
from gems.plans.fields import SCHEDULES
from gems.plans.plan import Plan
from gems.schedule import communicators as made
from gems.schedule import nccl
from gems.schedule.action import Schedule, parse
from gems.schedule.build import build, lowered
from gems.schedule.communicators import Communicator, Operation, communicators, issued
from gems.schedule.lower.passes import forward_only, lower
from gems.schedule.lower.reduce import overlaps
from gems.schedule.validate import check
from gems.torch.rank_model import require_queues
from gems.torch.session import LossSum
from gems.torch.state import grad_bucket
from gems.transport.threads import Local, run
from tests.exact import batches, trained
from tests.generate.plans import draw_plan
from tests.test_overlapped_reduction import network

Rows = list[list[Operation]]
SEEDS = range(4)


def unproven(plan: Plan) -> Schedule:
    return lower(build(plan), plan)


def hangs_somewhere(rows: Rows) -> bool:
    several = [nccl.some_queues(count, seed) for count in (2, 8) for seed in SEEDS]
    return any(nccl.hangs(rows, queues) for queues in (nccl.warm, *several))


# --- all that can be planned ----------------------------------------------------------------------


def families() -> Iterator[Plan]:
    for p in (2, 3, 4):
        for m in (1, p + 1):
            for name in ("1f1b", "gpipe", "sequential", "zero-bubble", "auto"):
                yield Plan(stages=p, micro_batches=m, schedule=name)
            for name in ("sequential", "auto"):
                yield Plan(stages=p, micro_batches=m, schedule=name, bidirectional=True)
            yield Plan(stages=2 * p, ranks=p, micro_batches=m, schedule="interleaved")
            yield Plan(stages=2 * p - 1, placement="fold", micro_batches=m, schedule="auto")
        yield Plan(stages=p, micro_batches=p, schedule="2bw", data=2)
        yield Plan(stages=p, ranks=1, schedule="l2l", micro_batches=2, data=2, zero=3)
        for name in ("gems", "gems-zb"):
            for zero in (0, 1, 2):
                yield Plan(stages=p, schedule=name, replications=2, zero=zero)
            for parts in (2, 3):
                yield Plan(stages=p, schedule=name, replications=parts, max_in_flight=parts)
            for spatial in (("1x2",), ("2x2",), ("2x2", "1x2"), ("3x1",)):
                yield Plan(stages=p, schedule=name, spatial=spatial, replications=2)
                yield Plan(stages=p, schedule=name, spatial=spatial, data=2)
                yield Plan(
                    stages=p, schedule=name, spatial=spatial, replications=2, max_in_flight=2
                )
    for p in (2, 4):
        for zero in (0, 1, 2, 3):
            for step in ("end", "eager") if zero in (0, 3) else ("end",):
                yield Plan(stages=p, micro_batches=2, data=2, zero=zero, optimizer_step=step)
        yield Plan(stages=p, micro_batches=2, data=2, grad_sync="end")
        yield Plan(stages=p, micro_batches=2, tied=((0, p - 1),), data=2)
        yield Plan(stages=p, schedule="gems", replications=2, tied=((0, p - 1),))
    for grid in ("1x2", "2x2", "2x4", "4x4"):
        yield Plan(stages=1, spatial=[grid], data=2)
        yield Plan(stages=3, spatial=[grid], micro_batches=3)
        yield Plan(stages=3, spatial=[grid], local_dp=2, micro_batches=3, schedule="auto")
        yield Plan(stages=3, spatial=[grid, "1x2"], micro_batches=2, recompute="always")


@cache
def schedules() -> list[tuple[Plan, Schedule]]:
    return [(plan, unproven(plan)) for plan in families()]


def test_no_family_hangs() -> None:
    assert {plan.schedule for plan, _ in schedules()} == set(SCHEDULES)
    for plan, schedule in schedules():
        assert nccl.check(schedule, plan) == [], plan
        assert nccl.queues(schedule, plan) == 1, plan
        assert nccl.check_prediction(plan) == [], plan


def skipping() -> Iterator[Plan]:
    """Plans whose stages send to more than the next one."""
    for p in (3, 4):
        for skip in {(0, 2), (0, p - 1)}:
            chain = {*((i, i + 1) for i in range(p - 1)), skip}
            edges = tuple(sorted(chain))
            for name in ("1f1b", "gpipe", "zero-bubble", "sequential", "auto", "2bw"):
                yield Plan(stages=p, schedule=name, micro_batches=p + 1, edges=edges)
            for name in ("gems", "gems-zb"):
                yield Plan(stages=p, schedule=name, replications=2, edges=edges)
            more = {"schedule": "auto", "bidirectional": True}
            yield Plan(stages=p, micro_batches=p + 1, edges=edges, **more)
    for p in (2, 4):
        last = 2 * p - 1
        chain = {*((i, i + 1) for i in range(last)), (0, last), (1, last - 1)}
        edges = tuple(sorted(chain))
        for more in ({"schedule": "interleaved"}, {"schedule": "auto", "placement": "fold"}):
            yield Plan(stages=2 * p, ranks=p, micro_batches=2 * p, edges=edges, **more)


def test_plans_with_skips_do_not_hang_with_as_many_queues_as_streams() -> None:
    """Interleaved stages, and both directions, may with fewer: two messages on one link."""
    needed: dict[str, int] = {}
    for plan in skipping():
        schedule = unproven(plan)
        assert nccl.check(schedule, plan) == nccl.check_prediction(plan) == [], plan
        queues = nccl.queues(schedule, plan)
        assert queues in (1, 1 + made.most_communicators(plan))
        needed[plan.schedule] = max(needed.get(plan.schedule, 1), queues)
    assert {name for name, queues in needed.items() if queues > 1} == {"interleaved", "auto"}
    assert max(needed.values()) <= 8  # CUDA's default


def test_nccl_is_rejected_where_streams_would_share_queues(monkeypatch: Any) -> None:
    plan = next(plan for plan in skipping() if plan.schedule == "interleaved")
    schedule = lowered(plan)
    require_queues(schedule, plan)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with pytest.raises(PlanError, match="set CUDA_DEVICE_MAX_CONNECTIONS=3 before the start"):
        require_queues(schedule, plan)
    require_queues(lowered(Plan(stages=2)), Plan(stages=2))


@pytest.mark.parametrize("tiles", [False, True], ids=["whole", "tiles"])
def test_no_plan_with_any_options_hangs(tiles: bool) -> None:
    with mock.patch.object(nccl, "check", return_value=[]):  # it would not be drawn
        drawn = [
            Plan(**draw_plan(Random(f"nccl {number}"), 4, 2, tiles=tiles, ranks=8))
            for number in range(30)
        ]
    for plan in drawn:
        assert nccl.check(unproven(plan), plan) == [], plan
        assert nccl.queues(unproven(plan), plan) == 1, plan
        assert nccl.check_prediction(plan) == [], plan


def test_what_ends_with_one_queue_ends_with_any_number() -> None:
    """Over rows with a mistake in them, of which some hang and some do not."""
    ended = hung = 0
    for number in range(90):
        r = Random(number)
        plan = r.choice(
            [
                Plan(stages=3, schedule="gems", replications=1),
                Plan(stages=2, spatial=["1x2"], micro_batches=2, schedule="1f1b"),
                Plan(stages=3, micro_batches=3, data=2, zero=1),
            ]
        )
        rows = issued(unproven(plan), plan)
        rank = r.randrange(plan.world)
        at = r.randrange(len(rows[rank]) - 6)
        for later in range(5):
            swap(rows[rank], at + later)
        if nccl.hangs(rows):
            hung += 1
        else:
            ended += 1
            assert not hangs_somewhere(rows)
    assert min(ended, hung) > 5


def swap(row: list[Operation], at: int) -> None:
    """Exchange two neighbours of a rank. What waited for one still waits for it."""
    row[at], row[at + 1] = row[at + 1], row[at]
    moved = {at: at + 1, at + 1: at}
    for index, op in enumerate(row):
        waits = tuple(w for w in (moved.get(w, w) for w in op.waits) if w < index)
        row[index] = op._replace(waits=waits)


def test_without_a_warm_up_half_of_the_families_hang_and_with_it_none() -> None:
    hung: set[str] = set()
    for plan, schedule in schedules():
        rows, known = issued(schedule, plan), communicators(plan)
        warmed = [[*a, *b] for a, b in zip(nccl.warm_up(known, plan.world), rows, strict=True)]
        assert nccl.hangs_cold(warmed) == []
        if nccl.hangs_cold(rows):
            hung.add(plan.schedule)
    assert hung >= {"sequential", "gems", "gems-zb"}


def test_communicators_of_a_rank_are_those_of_its_neighbours_and_groups() -> None:
    plan = Plan(stages=1, spatial=["4x4"])
    every = tuple(range(16))
    assert communicators(plan) == (Communicator("group", every), Communicator("spatial", every))
    chain = communicators(Plan(stages=4, data=2))
    assert sum(1 in c.ranks for c in chain) == 5  # two ways to either side, and its other copy
    tied = communicators(Plan(stages=3, tied=((0, 2),)))
    assert [c for c in tied if c.kind == "group"] == [Communicator("group", (0, 2))]


# --- seeded mistakes ------------------------------------------------------------------------------

TILES = Plan(stages=1, spatial=["1x2"], micro_batches=2)


def test_exchanges_in_another_order_on_one_rank_are_found() -> None:
    rows = issued(unproven(TILES), TILES)
    first, second = (i for i, op in enumerate(rows[1]) if str(op.action) in ("0F0", "0F1") and
                     op.communicator)  # fmt: skip
    rows[1][first], rows[1][second] = rows[1][second], rows[1][first]
    assert list(nccl.unpaired(rows)) == [
        "the spatial group of ranks 0, 1, operation 0: rank 0 issues 0F0, rank 1 0F1; issue them "
        "in one order on all its ranks"
    ]


def test_an_exchange_that_one_rank_leaves_out_is_found() -> None:
    rows = issued(unproven(TILES), TILES)
    last = max(
        i for i, op in enumerate(rows[1]) if op.communicator and op.communicator.kind == "spatial"
    )
    rows[1][last] = rows[1][last]._replace(communicator=None)
    assert "rank 0 issues 0B1, rank 1 nothing" in next(nccl.unpaired(rows))
    assert "waits forever for 0B1 over the spatial group" in nccl.hangs(rows, nccl.warm)[0]


def test_a_communicator_that_is_not_set_up_is_found() -> None:
    plan = Plan(stages=2, schedule="gems")
    known = [c for c in communicators(plan) if c.ranks != (1, 0)]
    assert list(nccl.unprepared(issued(unproven(plan), plan), known)) == [
        f"rank {rank}: {action} is the first to use the link from rank 1 to rank 0, whose set-up "
        "then blocks the host; set it up before the first step"
        for rank, action in ((0, "0B0<1"), (1, "1B0>0"))
    ]
    with mock.patch.object(nccl, "communicators", return_value=tuple(known)):
        assert check(unproven(plan), plan)[0].startswith("under NCCL, rank 0: 0B0<1 is the first")
        with pytest.raises(ScheduleError, match="set it up before the first step"):
            lowered(plan)


def test_a_warm_up_in_another_order_on_one_rank_is_found() -> None:
    rows = nccl.warm_up(communicators(Plan(stages=2)), 2)
    rows[1].reverse()
    found = nccl.hangs_cold(rows)
    assert len(found) == 2
    assert found[0] == (
        "rank 0: set-up blocks the host in its first use of the link from rank 0 to rank 1, which "
        "not all its ranks come to; set up communicators in one order on all ranks before the "
        "first step"
    )


def test_an_all_reduce_that_is_moved_on_one_rank_is_found() -> None:
    plan = Plan(stages=2, schedule="gems")
    text = str(unproven(plan))
    assert text.count("1A 0A") == 1
    moved = parse(text.replace("1A 0A", "0A 1A"))
    assert nccl.check(moved, plan) == [
        "the group of ranks 0, 1, operation 0: rank 0 issues 0A, rank 1 1A; issue them in one "
        "order on all its ranks"
    ]


def test_a_prediction_whose_messages_are_received_in_another_order_is_found() -> None:
    plan = Plan(stages=2, micro_batches=2)
    trained, right = lowered(plan), forward_only(plan)
    rows = [list(row) for row in right.ranks]
    a, b = (k for k, action in enumerate(rows[1]) if action.way == "<")
    rows[1][a], rows[1][b] = rows[1][b], rows[1][a]
    wrong = Schedule(tuple(map(tuple, rows)))
    with mock.patch.object(nccl, "forward_only", return_value=wrong):
        found = check(trained, plan)
    assert found and "in prediction under NCCL" in found[0]


def test_a_fold_with_skips_needs_queues_to_predict_and_is_not_rejected_for_it() -> None:
    """Story: prediction had to end with one queue, or no rank trained, under gloo neither."""
    edges = ((0, 1), (0, 2), (1, 2), (1, 3), (2, 3))
    plan = Plan(stages=4, micro_batches=5, ranks=2, placement="fold", schedule="gems", edges=edges)
    assert nccl.queues(lowered(plan), plan) == 1 + made.most_communicators(plan)


def test_two_ranks_that_read_before_they_send_hang_warm() -> None:
    plan = Plan(stages=2, micro_batches=1)
    late = parse("0: 0F0 0B0<1 0B0 0F0>1 0A 0O\n1: 1F0<0 1F0 1B0 1B0>0 1A 1O\n")
    found = nccl.hangs(issued(late, plan), nccl.warm)
    assert found[0] == (
        "rank 0: 0B0 waits forever for 0B0<1 over the link from rank 1 to rank 0, which rank 1 "
        "never begins"
    )
    assert found[1].startswith("rank 1: 1F0 waits forever for 1F0<0 over the link from rank 0")


# Four tiles and three whole stages, both ways: rank 4 has stage 1 of one and stage 0 of the other.
BOTH_WAYS = Plan(stages=4, spatial=["2x2"], schedule="gems", replications=2)


def test_a_second_chunk_before_work_that_others_need_hangs_if_queues_are_shared() -> None:
    """Once all-reduces of a stage began inside backward wherever its ranks were those of no other
    stage. Rank 4 began two chunks of stage 1. The second, behind the first in its stream, kept from
    running what was behind it in the hardware queue: a forward that rank 2 had to have before it
    could come to stage 1. With a queue for each stream all went well."""

    def once(plan: Plan, stage: int) -> bool:
        return plan.replica_groups.count(plan.replica_groups[stage]) == 1

    assert not any(overlaps(BOTH_WAYS, stage) for stage in range(4))
    schedule = unproven(BOTH_WAYS)
    with mock.patch.object(made, "overlaps", once):
        rows = issued(schedule, BOTH_WAYS)
    assert nccl.hangs(rows, nccl.warm) == []
    assert any(
        "1A waits forever for 1A over the group of ranks 2, 4" in x for x in nccl.hangs(rows)
    )
    assert any(nccl.hangs(rows, nccl.some_queues(8, seed)) for seed in range(10))


def test_a_message_of_two_operations_would_hang_if_queues_are_shared() -> None:
    plan = Plan(stages=2, micro_batches=2, schedule="sequential")
    begin = made._Host._issue

    def twice(host: Any, on: Communicator | None, *rest: Any) -> int:
        if on is not None and on.kind == "link":
            begin(host, on, *rest)
        return begin(host, on, *rest)

    with mock.patch.object(made._Host, "_issue", twice):
        rows = issued(unproven(plan), plan)
    assert nccl.hangs(rows, nccl.warm) == []
    assert nccl.hangs(rows)[0].startswith("rank 0: 0B0<1 waits forever for 0B0<1")


# --- the engine issues what was proven ------------------------------------------------------------


class Notes(list[Communicator]):
    """The communicator of each operation that begins on a transport while the engine runs, but for
    exchanges inside of stages, which have another channel."""

    running = False

    def __init__(self, transport: Any) -> None:
        mine = transport.rank
        self.attach(transport, "isend", lambda target: Communicator("link", (mine, target)))
        self.attach(transport, "irecv", lambda source: Communicator("link", (source, mine)))
        for name in ("all_reduce", "reduce_scatter", "all_gather"):
            self.attach(transport, name, lambda ranks: Communicator("group", ranks))
        transport.notes = self

    def attach(self, transport: Any, name: str, communicator: Any) -> None:
        begin = getattr(transport, name)

        def noted(buffer: Any, other: Any, *channel: int, **named: int) -> Any:
            if self.running and not any((*channel, *named.values())):
                self.append(communicator(other))
            return begin(buffer, other, *channel, **named)

        setattr(transport, name, noted)


def recorded(plan: Plan, steps: int) -> list[list[Communicator]]:
    """What each rank issues in the last of some steps, but for exchanges inside of stages."""
    data = batches((8, 3, 8, 8), 5, steps, torch.float64)
    engine_step, engine_run = Engine.step, Engine.run

    def step(engine: Any, *args: Any) -> Any:
        engine.transport.notes.clear()
        return engine_step(engine, *args)

    def noted(engine: Any, *args: Any, **options: Any) -> Any:
        engine.transport.notes.running = True
        found = engine_run(engine, *args, **options)
        engine.transport.notes.running = False
        return found

    def work(transport: Local) -> list[Communicator]:
        notes = Notes(transport)
        trained(transport, network(), data, plan)
        return notes

    small = mock.patch.object(grad_bucket, "LEAST", 256)  # bytes of a chunk
    with mock.patch.multiple(Engine, step=step, run=noted), small:
        return run(plan.world, work)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(stages=3, schedule="gems", replications=1),
        Plan(stages=2, schedule="gems", zero=1),
        Plan(stages=2, micro_batches=2, data=2, zero=3),
        Plan(stages=1, data=2, grad_sync="overlap"),
        Plan(stages=2, micro_batches=2, spatial=["1x2"], grad_sync="overlap"),
    ],
    ids=["gems", "gems, zero 1", "zero 3", "two copies", "tiles"],
)
def test_the_engine_issues_what_was_proven(plan: Plan) -> None:
    """Collectives have as many buffers and chunks as they have, one after the other."""
    sharded = bool(plan.zero)  # then flags are reduced beside shards, and no chunks
    with mock.patch.multiple(made, BUFFERS=1 + sharded, CHUNKS=0 if sharded else 2):
        rows = issued(lowered(plan), plan)
    with mock.patch.object(LossSum, "early", False):  # as where the host waits for a GPU
        found = recorded(plan, 2)
    for mine, row in zip(found, rows, strict=True):
        used = [op.communicator for op in row if op.communicator]
        modelled = [c for c in used if c.kind != "spatial"]
        assert mine and set(mine) == set(modelled)
        assert [c for c in mine if c.kind == "link"] == [c for c in modelled if c.kind == "link"]
        assert without_repeats(mine) == without_repeats(modelled)
        if plan.alternates:  # no chunks: beside messages, each buffer in its place
            assert through_last_message(mine) == through_last_message(modelled)


def through_last_message(given: list[Communicator]) -> list[Communicator]:
    return given[: max(at for at, c in enumerate(given) if c.kind == "link") + 1]


def without_repeats(given: list[Communicator]) -> list[Communicator]:
    return [c for at, c in enumerate(given) if at == 0 or given[at - 1] != c]


# --- where it is used -----------------------------------------------------------------------------


def test_gems_check_says_what_was_proven(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--stages", "2", "--schedule", "sequential", "--parts", "2"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == (
        "NCCL: no hang, cold or warm, with any number of hardware queues; 2 communicators, 2 on a "
        "rank at most, set up in one order (without that it would hang)"
    )
    assert main(["check", "--stages", "1"]) == 0
    assert "NCCL" not in capsys.readouterr().out


def test_gems_plan_proves_what_it_returns() -> None:
    model, sample = network(), torch.zeros(2, 3, 8, 8, dtype=torch.float64)
    found = mock.patch.object(nccl, "check", return_value=["a seeded mistake"])
    with found, pytest.raises(ScheduleError, match="a seeded mistake"):
        gems.plan(model, sample, ranks=2, micro_batches=2)
