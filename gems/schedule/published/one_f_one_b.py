"""1F1B (PipeDream-Flush): stage s warms up with p - s - 1 forwards, then alternates.

At most p - s micro-batches are in flight on stage s; the bubble is GPipe's.
"""

from __future__ import annotations

from gems.plans.plan import Plan
from gems.schedule.action import Action, Kind, Schedule


def order(plan: Plan) -> Schedule:
    p, m = plan.depth, plan.micro_batches
    rows = []
    for s in range(p):
        warm_up = min(p - s - 1, m)
        row = [Action(Kind.FORWARD, s, i) for i in range(warm_up)]
        for i in range(m - warm_up):
            row += [Action(Kind.FORWARD, s, warm_up + i), Action(Kind.BACKWARD, s, i)]
        row += [Action(Kind.BACKWARD, s, i) for i in range(m - warm_up, m)]
        rows.append(tuple(row))
    return Schedule(tuple(rows))
