"""From the order of compute actions to what ranks really do: recompute, copies, messages, sums,
gathers, memory put away."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from gems.plans.plan import ASYNCHRONOUS, Plan
from gems.plans.recompute import WHOLE_STAGE
from gems.schedule.async_window import update
from gems.schedule.core import Action, Kind, Message, Run, Schedule
from gems.schedule.lower.offload import offload
from gems.schedule.published import l2l, sequential

SILENT = (Kind.WEIGHT, Kind.RECOMPUTE)  # nobody else hears of these


def lower(schedule: Schedule, plan: Plan, more: int = 1) -> Schedule:
    """The compute order of one copy, as every rank of the plan carries it out.

    The plan may stand for so many times `more` copies on further ranks.
    """
    if plan.schedule == ASYNCHRONOUS:
        run = plan.unrolled
        return update(communicate(copies(recompute(schedule, run), run), run), plan)
    order = copies(recompute(schedule, plan), plan)
    return offload(share(reduce(communicate(order, plan), plan), plan, more), plan)


def recompute(schedule: Schedule, plan: Plan) -> Schedule:
    """Insert R right before the backward of what a stage did not keep, where there is none yet.

    Backward waits for a gradient and R does not, so it runs while the rank waits; and from R on,
    not before, the micro-batch takes up the memory of its stash.
    """
    if not any(entry in WHOLE_STAGE for entry in plan.recompute_by_stage):
        return schedule
    rows = []
    for row in schedule.ranks:
        there = {(a.stage, a.micro_batch) for a in row if a.kind is Kind.RECOMPUTE}
        new: list[Action] = []
        for action in row:
            backward = action.computes and action.kind in (Kind.BACKWARD, Kind.INPUT)
            at = (action.stage, action.micro_batch)
            if backward and at not in there and plan.recomputes(*at):
                new.append(replace(action, kind=Kind.RECOMPUTE))
            new.append(action)
        rows.append(tuple(new))
    return Schedule(tuple(rows))


def copies(schedule: Schedule, plan: Plan) -> Schedule:
    """The order of one copy of the pipeline, for each of the data-parallel copies."""

    def moved(action: Action, copy: int) -> Action:
        return replace(
            action,
            micro_batch=action.micro_batch + copy * plan.micro_batches,
            replica=action.replica + copy * plan.directions,
        )

    rows = (tuple(moved(a, c) for a in row) for c in range(plan.data) for row in schedule.ranks)
    return Schedule(tuple(rows))


def communicate(schedule: Schedule, plan: Plan, early: int = 1) -> Schedule:
    """Insert sends right after their producer, and receives `early` compute actions before use.

    Links are FIFO. The sender's order is the order of the link, so a receive is posted together
    with all that the sender sends before it; posting never blocks, hence this cannot deadlock.
    """
    sends = [[_sends(action, rank, plan) for action in row] for rank, row in _rows(schedule)]
    arriving: list[dict[int, list[Action]]] = [defaultdict(list) for _ in schedule.ranks]
    for rank, row in enumerate(sends):
        for action in (a for after in row for a in after):
            for target in _others(action, rank, plan):
                arriving[target][rank].append(_received(action))
    lowered = []
    for rank, row in _rows(schedule):
        posts = _posts(row, list(arriving[rank].values()), early)
        lowered.append(
            tuple(
                a
                for action, before, after in zip(row, posts, sends[rank], strict=True)
                for a in (*before, action, *after)
            )
        )
    return Schedule(tuple(lowered))


def _posts(row: Sequence[Action], queues: list[list[Action]], early: int) -> list[list[Action]]:
    """The receives to post before each compute action of a rank, given what each link brings.

    One receive takes the parts of a whole team, so it stands in the queues of several links.
    """
    used = {_use(a): at for at, a in enumerate(row) if a.kind not in SILENT}
    due = {a: max(used[_use(a)] - early, 0) for queue in queues for a in queue}
    changed = True
    while changed:
        changed = False
        for queue in queues:
            for action, later in reversed(list(pairwise(queue))):
                if due[action] > due[later]:
                    due[action], changed = due[later], True
    posts: list[list[list[Action]]] = [[[] for _ in queues] for _ in row]
    for link, queue in enumerate(queues):
        for action in queue:
            posts[due[action]][link].append(action)
    return [_merged(together) for together in posts]


def _merged(queues: list[list[Action]]) -> list[Action]:
    """All that is in the queues, once, in an order that keeps to each of theirs.

    There is one: that in which they were made. A team makes them together, hence in one order.
    """
    merged = []
    queues = [queue for queue in reversed(queues) if queue]
    while queues:
        heads = [queue[0] for queue in queues]
        free = (a for a in heads if not any(a in queue[1:] for queue in queues))
        merged.append(first := next(free, heads[0]))
        queues = [left for queue in queues if (left := [a for a in queue if a != first])]
    return merged


def reduce(schedule: Schedule, plan: Plan) -> Schedule:
    """Sum each stage's gradients over its holders: as soon as they are complete, or at the end.
    Eager updates follow their sum.

    All ranks issue the sums in one order, by when the last holder of a stage is done, because
    collectives pair up by order.
    """
    finished: dict[int, int] = {}
    done: list[list[int]] = [[] for _ in schedule.ranks]  # where each action came in this order
    for position, (rank, action) in enumerate(Run(schedule, plan)):
        done[rank].append(position)
        if action.computes:
            finished[action.stage] = position
    turn = sorted(finished, key=finished.__getitem__)
    lowered = []
    for rank, row in _rows(schedule):
        # After the messages of the last backward: others wait for those, nobody yet for the sum.
        last = {a.stage: position for position, a in enumerate(row) if a.way != "<"}
        after: dict[int, list[Action]] = defaultdict(list)
        soonest = len(row) - 1 if plan.grad_sync == "end" else 0
        for stage in (s for s in turn if s in plan.stages_on[rank]):
            soonest = max(soonest, last.get(stage, 0))
            if plan.frees_gradients or plan.optimizer_step == "eager":
                # What follows waits for this one, so no rank may come to it long before others.
                soonest = max(soonest, bisect_right(done[rank], finished[stage]) - 1)
            after[soonest].append(Action(Kind.ALL_REDUCE, stage))
            if plan.optimizer_step == "eager":
                after[soonest].append(Action(Kind.OPTIMIZER_STEP, stage))
        parts = ((a, *after[position]) for position, a in enumerate(row))
        lowered.append(tuple(a for part in parts for a in part))
    return Schedule(tuple(lowered))


def share(schedule: Schedule, plan: Plan, more: int = 1) -> Schedule:
    """With zero=3, or where weights are put away, gather a stage's weights for each run of its
    actions, and drop them after it.

    A run ends where a rank of the stage turns to another one. Weights are asked for one compute
    action early, so that they travel while it runs: at most two stages are whole at once.
    """
    if plan.zero < 3 and "weights" not in plan.offloaded_state:
        return schedule
    depth = range(plan.depth)
    shared = {s for s in depth if plan.gathers(s) or (plan.zero == 3 and more > 1)}
    together = _starts(schedule, shared)
    rows = []
    for row in schedule.ranks:
        starts = together if plan.zero == 3 else _starts(Schedule((row,)), shared)
        count, before, after = Counter(), defaultdict(list), defaultdict(list)
        last: tuple[int, int] = (-1, -1)  # where the compute action before was, and its stage
        latest: dict[int, int] = {}
        for at, action in enumerate(row):
            if not action.computes:
                continue
            s = action.stage
            if s in shared:
                if count[s] in starts[s]:
                    if s in latest:
                        after[latest[s]].append(Action(Kind.RESHARD, s))
                    early = last[0] if last[0] >= 0 and last[1] != s else at
                    before[early].append(Action(Kind.UNSHARD, s))
                count[s] += 1
                latest[s] = at
            last = (at, s)
        for s, at in latest.items():
            after[at].append(Action(Kind.RESHARD, s))
        rows.append(tuple(a for at, b in enumerate(row) for a in (*before[at], b, *after[at])))
    return Schedule(tuple(rows))


def _starts(schedule: Schedule, shared: set[int]) -> dict[int, set[int]]:
    """For each stage the numbers of its actions, counted on any of its holders, that begin a run:
    where some holder did two other things before. All of them must gather as often. (For one, its
    weights would be asked for again as soon as they were dropped.)"""
    found: dict[int, set[int]] = {s: {0} for s in shared}
    for row in schedule.ranks:
        count, last = Counter(), {}
        for at, action in enumerate(a for a in row if a.computes):
            s = action.stage
            if s in shared:
                if at - last.get(s, at) > 2:
                    found[s].add(count[s])
                count[s] += 1
                last[s] = at
    return found


Receipts = dict[tuple[Message, int], list[Message]]


def receipts(schedule: Schedule, plan: Plan) -> list[Receipts]:
    """For each rank, which of its messages are surely taken once it holds one of their receiver's.

    A send is through when its receive is posted. Nothing tells the sender so, but if the receiver
    later sends something back, then whoever holds that knows. So a rank can let go of its buffers
    without ever waiting for a peer that waits for it. To hold the part of a message that came from
    `other` proves that `other` has posted the receives listed under (message, other).
    """
    found: list[Receipts] = [{} for _ in schedule.ranks]
    for other, row in _rows(schedule):
        posted: dict[int, list[Message]] = defaultdict(list)
        for action in (a for a in row if a.way):
            for rank in _others(action, other, plan):
                if action.way == "<":
                    posted[rank].append(action.message)
                elif posted[rank]:
                    found[rank][action.message, other] = posted.pop(rank)
    return found


def _rows(schedule: Schedule) -> list[tuple[int, tuple[Action, ...]]]:
    return list(enumerate(schedule.ranks))


def _sends(action: Action, rank: int, plan: Plan) -> list[Action]:
    """The messages that a compute action gives rise to; a stage on this rank alone needs none.

    One action sends to all the other ranks of the peer stage what each of them wants of our part.
    """
    if action.kind in SILENT:
        return []
    forward = action.kind is Kind.FORWARD
    peers = plan.sinks[action.stage] if forward else plan.sources[action.stage]
    sends = (replace(action, way=">", peer=peer) for peer in peers)
    return [send for send in sends if _others(send, rank, plan)]


def _others(action: Action, rank: int, plan: Plan) -> list[int]:
    """The ranks, beside our own, that a message goes to or comes from."""
    return [r for r in plan.spatial_group_for(action.peer, action.micro_batch) if r != rank]


def _received(send: Action) -> Action:
    """The receive that answers a send."""
    return replace(send, stage=send.peer, peer=send.stage, way="<")


def _use(action: Action) -> tuple[int, int, bool]:
    """What a received message and the compute action that reads it have in common."""
    return action.stage, action.micro_batch, action.kind is Kind.FORWARD


def forward_only(plan: Plan) -> Schedule:
    """Forward of every micro-batch, for prediction: each rank in the order of samples, and with l2l
    one stage after the other."""
    order = (l2l if plan.schedule == "l2l" else sequential).order(plan.one_copy())
    forward = (tuple(a for a in row if a.kind is Kind.FORWARD) for row in order.ranks)
    return share(communicate(copies(Schedule(tuple(forward)), plan), plan), plan)
