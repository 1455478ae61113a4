"""Insert R before the backward of what a stage did not save."""

from __future__ import annotations

from dataclasses import replace

from gems.plans.plan import Plan
from gems.schedule.action import Action, Kind, Schedule


def recompute(schedule: Schedule, plan: Plan) -> Schedule:
    """Insert R right before the backward of what a stage did not save, where there is none yet.

    Backward waits for a gradient and R does not, so it runs while the rank waits; and from R on,
    not before, the micro-batch takes up the memory of its activations.
    """
    if not any(policy.whole_stage for policy in plan.activations):
        return schedule
    rows = []
    for row in schedule.ranks:
        there = {a.unit for a in row if a.kind is Kind.RECOMPUTE}
        new: list[Action] = []
        for action in row:
            backward = action.computes and action.kind in (Kind.BACKWARD, Kind.INPUT)
            recomputes = backward and plan.recomputes(action.stage, action.micro_batch)
            if recomputes and action.unit not in there:
                new.append(replace(action, kind=Kind.RECOMPUTE))
            new.append(action)
        rows.append(tuple(new))
    return Schedule(tuple(rows))
