"""Repeat the order of one pipeline for each of its data-parallel copies."""

from __future__ import annotations

from dataclasses import replace

from gems.plans.plan import Plan
from gems.schedule.action import Action, Schedule


def copies(schedule: Schedule, plan: Plan) -> Schedule:
    """The order of one copy of the pipeline, for each of the data-parallel copies."""

    def moved(action: Action, micro_batch: int, replica: int) -> Action:
        return replace(
            action, micro_batch=action.micro_batch + micro_batch, replica=action.replica + replica
        )

    rows = (tuple(moved(a, *first) for a in row) for first in plan.copies for row in schedule.ranks)
    return Schedule(tuple(rows))
