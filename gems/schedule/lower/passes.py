"""All lowering passes in order: from compute actions to what every rank carries out."""

from __future__ import annotations

from gems.plans.plan import Plan
from gems.schedule.action import Kind, Schedule
from gems.schedule.async_window import update
from gems.schedule.lower.copies import copies
from gems.schedule.lower.messages import communicate
from gems.schedule.lower.offload import offload
from gems.schedule.lower.recompute import recompute
from gems.schedule.lower.reduce import reduce
from gems.schedule.lower.unshard import unshard
from gems.schedule.published import l2l, sequential


def lower(schedule: Schedule, plan: Plan, more: int = 1) -> Schedule:
    """The compute order of one copy, as every rank of the plan carries it out.

    The plan may stand for so many times `more` copies on further ranks.
    """
    if plan.asynchronous:
        run = plan.unrolled
        return update(communicate(copies(recompute(schedule, run), run), run), plan)
    order = copies(recompute(schedule, plan), plan)
    return offload(unshard(reduce(communicate(order, plan), plan), plan, more), plan)


def forward_only(plan: Plan) -> Schedule:
    """Forward of every micro-batch, for prediction: each rank in the order of samples, and with l2l
    one stage after the other."""
    order = (l2l if plan.stage_by_stage else sequential).order(plan.one_copy())
    forward = (tuple(a for a in row if a.kind is Kind.FORWARD) for row in order.ranks)
    return unshard(communicate(copies(Schedule(tuple(forward)), plan), plan), plan)
