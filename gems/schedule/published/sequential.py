"""Layer parallelism (MP-Basic): one micro-batch at a time, there and back.

rank 0   F0          B0 F1          B1        T = k p (f + b), one sample in flight
rank 1      F0    B0       F1    B1
rank 2         F0B0           F1B1
"""

from __future__ import annotations

from gems.plans.plan import Plan
from gems.schedule.action import Action, Kind, Schedule


def order(plan: Plan) -> Schedule:
    rows: list[list[Action]] = [[] for _ in plan.stages_in_copy]
    for i in plan.micro_batches_in_copy:
        replica = plan.replica_of(i)
        forward = [Action(Kind.FORWARD, stage, i, replica) for stage in range(plan.depth)]
        backward = [Action(Kind.BACKWARD, stage, i, replica) for stage in range(plan.depth)]
        for action in (*forward, *reversed(backward)):
            for rank in plan.spatial_group_of(action.stage, replica):
                rows[rank].append(action)
    return Schedule(tuple(map(tuple, rows)))
