"""L2L (layer to layer): one stage after the other on one rank, all micro-batches through each.

                          m = 2; U loads weights, D frees them, R recomputes a forward
    stage 0   F0F1                              R0B0R1B1
    stage 1       F0F1                  R0B0R1B1
    stage 2           F0F1  R0B0R1B1                          T = m (2 f + b) of all stages

A stage's weights are needed twice per step, however many micro-batches there are, so that they can
be elsewhere meanwhile: two stages are here at most, the one that runs and the one that comes next.
What crosses between stages is saved for each micro-batch, and everything inside a stage is
recomputed: `recompute` is `always` there, also where a plan has `never`; stages may name modules.
Gradients add up in the order of samples, as in the plain loop.

With eager optimizer steps (L2L-p) a stage is updated as soon as its last backward is done.
"""

from __future__ import annotations

from gems.plans.plan import Plan
from gems.schedule.action import Action, Kind, Schedule


def order(plan: Plan) -> Schedule:
    stages, samples = range(plan.depth), plan.micro_batches_in_copy
    forward = [Action(Kind.FORWARD, s, i) for s in stages for i in samples]
    backward = [Action(Kind.BACKWARD, s, i) for s in reversed(stages) for i in samples]
    return Schedule(((*forward, *backward),))
