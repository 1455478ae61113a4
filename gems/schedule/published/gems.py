"""GEMS (SC'20): MAST, and MASTER when the pair is repeated.

Two replicas lie over the same ranks, one of them in reverse. Samples go to them in turn, each rank
does the forward and backward of one before it begins the next, so activations of one sample at
most are live on any rank. A rank is free for the next sample as soon as its own backward is done:
the last ranks of one replica are the first of the other.

    rank 0   F0          B0       F1B1    F2 ...        0 and 2 in replica 0, 1 in replica 1
    rank 1      F0    B0       F1    B1                 T(k) = k (f + p b) + (p - 1) f
    rank 2         F0B0     F1          B1

The order on each rank is that of layer parallelism: what differs is where the stages are. A batch
of several micro-batches (`max_in_flight` of them) is pipelined instead, by the greedy order under
that limit: activations of one batch at most are live on any rank, as before.
"""

from __future__ import annotations

from gems.plans.plan import Plan
from gems.schedule.action import Schedule
from gems.schedule.published import sequential


def order(plan: Plan) -> Schedule:
    return sequential.order(plan)
