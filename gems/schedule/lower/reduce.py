"""Insert what follows backward: all-reduces of gradients, optimizer steps, and the all-gather of
weights that were updated shard by shard."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence

from gems.plans.plan import Plan
from gems.plans.residency import StateResidency
from gems.schedule.action import Action, Kind, Schedule
from gems.schedule.machine import ScheduleMachine


def reduce(schedule: Schedule, plan: Plan, more: int = 1) -> Schedule:
    """All-reduce each stage's gradients over its replica group, as soon as they are complete or at
    the end; eager optimizer steps follow each, others come last.

    All ranks issue collectives in one order, by when the last rank of a stage's group is done,
    because they pair up by order. The plan may stand for so many times `more` copies.
    """
    finished: dict[int, int] = {}
    done: list[list[int]] = [[] for _ in schedule.ranks]  # where each action came in this order
    for position, (rank, action) in enumerate(ScheduleMachine(schedule, plan)):
        done[rank].append(position)
        if action.computes:
            finished[action.stage] = position
    in_order = sorted(finished, key=finished.__getitem__)
    lowered = []
    for rank, row in enumerate(schedule.ranks):
        # After the messages of the last backward: others wait for those, nobody yet for this.
        last = {a.stage: position for position, a in enumerate(row) if a.way != "<"}
        after: dict[int, list[Action]] = defaultdict(list)
        soonest = len(row) - 1 if plan.grad_sync == "end" else 0
        for stage in (s for s in in_order if s in plan.stages_on[rank]):
            soonest = max(soonest, last.get(stage, 0))
            if plan.residency[stage].frees_gradients or plan.optimizer_step == "eager":
                # What follows waits for this one, so no rank may come to it long before others.
                soonest = max(soonest, bisect_right(done[rank], finished[stage]) - 1)
            after[soonest].append(Action(Kind.ALL_REDUCE, stage))
            if plan.optimizer_step == "eager":
                after[soonest].append(Action(Kind.OPTIMIZER_STEP, stage))
        parts = ((a, *after[position]) for position, a in enumerate(row))
        whole = (a for part in parts for a in part)
        lowered.append((*whole, *_update(rank, plan, plan.residency_over(more))))
    return Schedule(tuple(lowered))


def overlaps(plan: Plan, stage: int, copies: int = 1) -> bool:
    """Whether the all-reduce of a stage's gradients may begin inside its last backward: not if one
    of its ranks holds another stage too. It might come to the two in another order; and it might
    begin one chunk, and hold up work that others wait for by the next (nccl.py). The plan may stand
    for `copies` of itself; `auto` may come to it."""
    ranks = plan.replica_groups[stage]
    several = len(ranks) > 1 or copies > 1
    alone = several and all(plan.stages_on[rank] == (stage,) for rank in ranks)
    return alone and plan.grad_sync in ("auto", "overlap") and not plan.asynchronous


def takes_over(plan: Plan, stage: int, copies: int = 1) -> bool:
    """Whether gradients that are all-reduced stay where a stage's only backward computes them,
    until they are complete: nothing is allocated for them before. Where `auto` may come to it, they
    are counted from the start."""
    sharded = plan.residency_over(copies)[stage].sharded
    once = plan.micro_batches == 1 and plan.grad_sync == "overlap"
    return once and not sharded and overlaps(plan, stage, copies)


def last_backwards(row: Sequence[Action], plan: Plan) -> set[Action]:
    """The backwards of a rank inside which an all-reduce may begin."""
    last = {a.stage: a for a in row if a.computes}
    return {a for s, a in last.items() if a.kind is Kind.BACKWARD and overlaps(plan, s)}


def start_of_update(row: Sequence[Action], plan: Plan) -> int:
    """Where the update begins that follows all gradients. Before it, ranks compare their losses."""
    if plan.asynchronous:
        return len(row)
    eager = plan.residency[0].eager
    at_end = (Kind.ALL_GATHER,) if eager else (Kind.OPTIMIZER_STEP, Kind.ALL_GATHER)
    end = len(row)
    while end and row[end - 1].kind in at_end:
        end -= 1
    return end


def _update(rank: int, plan: Plan, residency: Sequence[StateResidency]) -> Iterator[Action]:
    """What a rank does once it has reduced the gradients of all its stages."""
    mine = plan.stages_on[rank]
    yield from (Action(Kind.TIED, s) for s, ranks in plan.tied_groups.items() if rank in ranks)
    yield from (Action(Kind.OPTIMIZER_STEP, s) for s in mine if not residency[s].eager)
    yield from (Action(Kind.ALL_GATHER, s) for s in mine if residency[s].gathers_updates)
