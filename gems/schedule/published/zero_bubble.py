"""Zero bubble H1: 1F1B with backward split; weight gradients wait where they fill the bubble.

Rank s warms up with p - s forwards and lets s weight gradients wait, so that every rank has at
most p micro-batches in flight, as 1F1B's first. What is left fills the end, one W after each I:

    p = 3, m = 3   rank 0   F F F . . I W I W I W       T = (m + p - 1)(f + i) + w    for m <= p
                   rank 1   . F F . I F I W I W W           m (f + i + w) + (p - 1)(f + i - w)
                   rank 2   . . F I F I F I W W W                                     beyond
"""

from __future__ import annotations

from gems.plans.plan import Plan
from gems.schedule.action import Action, Kind, Schedule


def order(plan: Plan) -> Schedule:
    p, samples = plan.depth, plan.micro_batches_in_copy
    rows = []
    for s in range(p):
        forward = [Action(Kind.FORWARD, s, i) for i in samples]
        weight = [Action(Kind.WEIGHT, s, i) for i in samples]
        row, ahead, done = forward[: p - s], p - s, 0
        for i in samples:
            row.append(Action(Kind.INPUT, s, i))
            if ahead < len(forward):
                waiting = i + 1 - done
                if waiting > s:
                    row.append(weight[done])
                    done += 1
                row.append(forward[ahead])
                ahead += 1
            elif s < p - 1:
                row.append(weight[done])
                done += 1
        rows.append((*row, *weight[done:]))
    return Schedule(tuple(rows))
