"""The schedule that a plan names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from gems.errors import PlanError, note
from gems.model.costs import Costs, unit
from gems.plans.plan import Plan
from gems.schedule import greedy
from gems.schedule.action import Schedule
from gems.schedule.groups import most_in_flight, project
from gems.schedule.lower.passes import lower
from gems.schedule.lower.recompute import recompute
from gems.schedule.published import (
    gems,
    gpipe,
    interleaved,
    l2l,
    one_f_one_b,
    sequential,
    two_buffers,
    zero_bubble,
)
from gems.schedule.validate import require

PAPERS: dict[str, Callable[[Plan], Schedule]] = {
    "sequential": sequential.order,
    "gpipe": gpipe.order,
    "1f1b": one_f_one_b.order,
    "interleaved": interleaved.order,
    "zero-bubble": zero_bubble.order,
    "gems": gems.order,
    "2bw": two_buffers.order,
    "l2l": l2l.order,
}
BY_SAMPLE = ("sequential", "gems")  # these know spatial groups: one sample after the other
ONE_STAGE_PER_RANK = ("1f1b", "zero-bubble", "2bw")
ONE_DIRECTION = ("gpipe", "1f1b", "interleaved", "zero-bubble", "l2l")


def build(plan: Plan, costs: Costs | None = None, memory: float | None = None) -> Schedule:
    """The compute order of one copy of the plan's pipeline.

    Costs per stage and `memory`, the bytes of activations that a rank may hold, steer the greedy
    orders; the published ones are fixed. For a plan whose stages are tiled over ranks, costs are
    those of each rank (`Costs.shared`), and the order is that of whole stages, projected.
    """
    if any(policy.recompute == "auto" for policy in plan.activations):
        raise PlanError(
            "recompute='auto' has to be written out first, which takes a model and a memory "
            "budget: gems plan --recompute auto --memory SIZE --out FILE"
        )
    costs = costs or unit(plan.depth)
    one = plan.one_copy()
    if plan.alternates and plan.max_in_flight > 1:
        return _pipelined(one, costs)
    if not plan.cut or plan.schedule in BY_SAMPLE or plan.stage_by_stage:
        _fits(one)
        return _order(one, costs, memory)
    _fits(lanes := plan.lanes())
    if plan.asynchronous:
        return _alone(one)
    try:
        order = _order(lanes, costs, memory)
    except PlanError as error:
        note(error, "here every stage counts as one rank, whatever spatial group it is tiled over")
        raise
    return project(order, lanes, one, costs)


def _order(plan: Plan, costs: Costs, memory: float | None) -> Schedule:
    if plan.schedule == "gems-zb":
        return greedy.order(plan, costs, samples=1)
    if plan.greedy:
        return greedy.best(plan, costs, memory)
    return recompute(PAPERS[plan.schedule](plan), plan.unrolled)


def _pipelined(plan: Plan, costs: Costs) -> Schedule:
    """GEMS with batches of several micro-batches, pipelined both ways under one limit.

    The limit is of ranks. In spatial groups the order is made for whole stages, and a rank may be
    in groups of both directions: then fewer micro-batches of each are in flight.
    """
    lanes = plan.lanes() if plan.cut else plan
    _fits(lanes)
    for limit in reversed(greedy.limits(plan.max_in_flight)[1:]):
        order = greedy.best(replace(lanes, max_in_flight=limit), costs)
        order = project(order, lanes, plan, costs) if plan.cut else order
        if most_in_flight(order, plan) <= plan.max_in_flight:
            return order
    return build(replace(plan, max_in_flight=0), costs)


def _alone(plan: Plan) -> Schedule:
    """2BW with spatial groups: each rank has one stage, hence the order of its stage."""
    if any(len(on) > 1 for on in plan.stages_on):
        raise PlanError(
            f"'2bw' puts one stage on each rank, but placement {plan.placement} lays several over "
            "each other; leave placement out, or use '1f1b'"
        )
    return recompute(two_buffers.order(plan), plan.unrolled)


def lowered(plan: Plan, costs: Costs | None = None, memory: float | None = None) -> Schedule:
    """The plan's schedule as its ranks carry it out, proven."""
    return require(lower(build(plan, costs, memory), plan), plan)


def _fits(plan: Plan) -> None:
    """Reject placements that a published order does not know."""
    name = plan.schedule
    straight = plan.places[0] == tuple(s % plan.ranks for s in range(plan.depth))
    if name in ONE_DIRECTION and plan.bidirectional:
        raise PlanError(f"{name!r} has one direction; use 'gems', 'gems-zb' or 'auto' for two")
    if name in ONE_STAGE_PER_RANK and not (straight and plan.ranks == plan.depth):
        raise PlanError(
            f"{name!r} puts one stage on each rank, but {plan.depth} stages are placed on "
            f"{plan.ranks} ranks; use 'interleaved', 'gpipe', 'sequential' or 'auto'"
        )
    if name == "l2l" and plan.ranks > 1:
        raise PlanError(
            f"'l2l' runs all stages on one rank, one after the other, but they are placed on "
            f"{plan.ranks}; give ranks=1, and data=N for copies on other ranks"
        )
    if name == "interleaved" and not (straight and plan.depth % plan.ranks == 0):
        raise PlanError(
            f"'interleaved' wants a multiple of {plan.ranks} stages on {plan.ranks} ranks, "
            f"placed straight, but there are {plan.depth}; use 'auto' for any placement"
        )
