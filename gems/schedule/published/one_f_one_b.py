"""1F1B (PipeDream-Flush): stage s warms up with p - s - 1 forwards, then alternates.

At most p - s micro-batches are in flight on stage s; the bubble is GPipe's.
"""

from __future__ import annotations

from gems.plans.plan import Plan
from gems.schedule.action import Action, Kind, Schedule


def order(plan: Plan) -> Schedule:
    rows = []
    for s in range(plan.depth):
        forward = [Action(Kind.FORWARD, s, i) for i in plan.micro_batches_in_copy]
        backward = [Action(Kind.BACKWARD, s, i) for i in plan.micro_batches_in_copy]
        warm_up = plan.depth - s - 1
        row, steady = forward[:warm_up], forward[warm_up:]
        for pair in zip(steady, backward, strict=False):
            row += pair
        rows.append((*row, *backward[len(steady) :]))
    return Schedule(tuple(rows))
