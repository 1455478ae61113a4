"""PipeDream-2BW: 1F1B that goes on with the next batch instead of draining the pipeline.

    rank 0   F0 F1 F2 B0 F3 B1 | F4 B2 F5 B3 F6 B4 F7 B5 | F8 ...       p = 3, m = 4
    rank 1      F0 F1 B0 F2 B1 F3 B2 | F4 B3 F5 B4 ...
    rank 2         F0 B0 F1 B1 F2 B2 F3 B3 | F4 B4 ...                  | a step's window ends

Batch t, of m micro-batches, runs forward and backward with weights W(max(t - 1, 0)), and

    W(t + 1) = W(t) - update(gradient of batch t, taken at W(max(t - 1, 0)))

for any optimizer. While batch t runs, W(t - 1) and W(t) are all that is needed, if m >= p: then
batch t - 1 is through on a rank before batch t + 1 begins there.

On a rank, the window of batch t is m times a forward of batch t and the backward that 1F1B has come
to; the first ones are still of batch t - 1. Its gradients are reduced as soon as they are complete,
and the optimizer step comes right before the first backward of batch t: so there is one memory for
gradients, and the all-reduce overlaps with a forward.
"""

from __future__ import annotations

from gems.plans.plan import Plan
from gems.schedule.action import Action, Schedule
from gems.schedule.published import one_f_one_b


def order(plan: Plan) -> Schedule:
    """All batches that a plan unrolls; every rank of a spatial group follows its stage."""
    lanes = one_f_one_b.order(plan.unrolled)
    rows: list[tuple[Action, ...]] = [lanes.ranks[on[0]] for on in plan.stages_on]
    return Schedule(tuple(rows))
