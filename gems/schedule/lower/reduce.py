"""Insert the all-reduce of each stage's gradients, and eager optimizer steps."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict

from gems.plans.plan import Plan
from gems.schedule.action import Action, Kind, Schedule
from gems.schedule.machine import ScheduleMachine


def reduce(schedule: Schedule, plan: Plan) -> Schedule:
    """All-reduce each stage's gradients over its replica group, as soon as they are complete or at
    the end; eager optimizer steps follow.

    All ranks issue them in one order, by when the last rank of a stage's group is done, because
    collectives pair up by order.
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
        lowered.append(tuple(a for part in parts for a in part))
    return Schedule(tuple(lowered))
