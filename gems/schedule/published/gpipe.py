"""GPipe: every forward, then every backward in reverse. Bubble (p - 1) / (m + p - 1)."""

from __future__ import annotations

from gems.plans.plan import Plan
from gems.schedule.action import Action, Kind, Schedule


def order(plan: Plan) -> Schedule:
    rows = []
    for stages in plan.stages_in_copy:
        forward = [Action(Kind.FORWARD, s, i) for s in stages for i in plan.micro_batches_in_copy]
        rows.append(
            (*forward, *(Action(Kind.BACKWARD, a.stage, a.micro_batch) for a in reversed(forward)))
        )
    return Schedule(tuple(rows))
