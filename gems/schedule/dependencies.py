"""What must precede what: the only place that knows the order of training."""

from __future__ import annotations

from typing import NamedTuple

from gems.plans.plan import Plan
from gems.schedule.action import OF_STAGE, WHOLE, Action, Kind


class Result(NamedTuple):
    """What an action leaves behind, and other actions depend on.

    Of a micro-batch (or part) on a stage: its `output`, its `activations` (if recomputed), the
    `gradient` of its input, the `weight` gradients; that its activations are `stored` or `loaded`.
    Of a stage, once its whole replica group is through: weights `gathered`, gradients `reduced`.
    """

    what: str
    stage: int
    micro_batch: int
    part: int = WHOLE


def dependencies(action: Action, plan: Plan) -> tuple[Result, ...]:
    """The results that an action waits for."""
    s, i, part = action.unit
    if action.way == ">":
        return (Result("output" if action.kind is Kind.FORWARD else "gradient", s, i, part),)
    if action.way == "<":
        return ()
    if action.kind is Kind.FORWARD:
        return tuple(Result("output", q, i, part) for q in plan.sources[s])
    if action.kind is Kind.WEIGHT:
        return (Result("gradient", s, i, part),)
    if action.kind in (Kind.RECOMPUTE, Kind.STORE):
        return (Result("output", s, i, part),)
    if action.kind is Kind.LOAD:
        return (Result("stored", s, i, part),)
    if action.kind in OF_STAGE:
        return ()  # each rank's own order decides; `check` proves that nothing comes too late
    # The same holds for offloaded activations: `check` proves that they are loaded in time.
    own = "activations" if plan.recomputes(s, i) else "output"
    return (Result(own, s, i, part), *(Result("gradient", q, i, part) for q in plan.sinks[s]))


RESULTS = {
    Kind.FORWARD: ("output",),
    Kind.RECOMPUTE: ("activations",),
    Kind.BACKWARD: ("gradient", "weight"),
    Kind.INPUT: ("gradient",),
    Kind.WEIGHT: ("weight",),
    Kind.STORE: ("stored",),
    Kind.LOAD: ("loaded",),
}


def results(action: Action) -> tuple[Result, ...]:
    """What an action of a micro-batch leaves behind."""
    if action.way or action.kind in OF_STAGE:
        return ()
    return tuple(Result(what, *action.unit) for what in RESULTS[action.kind])
