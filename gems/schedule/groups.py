"""From the order of whole stages to the order of ranks, where teams of ranks run a stage together.

[Note: why a projected order cannot deadlock]
All actions are laid in one line, each after all that it needs. A rank does those of its teams, in
the order of the line. Whatever is left to do, the first of it in the line can be done: what it
needs comes earlier and is done, and all of its team have come to it.
"""

from __future__ import annotations

from gems.model.costs import Costs
from gems.plans.plan import Plan
from gems.schedule import greedy
from gems.schedule.action import Action, Schedule


def project(order: Schedule, lanes: Plan, plan: Plan, costs: Costs) -> Schedule:
    """The order of `lanes`, one per stage, as the ranks of one copy of `plan` follow it.

    The line is by the time at which each action starts on its lane. Where a rank is in several
    teams it has the actions of several lanes: what they keep for backward adds up, so a cap that
    was kept on every lane is only about right on the ranks.
    """
    starts, _ = greedy.times(order, lanes, costs)
    rows: list[list[Action]] = [[] for _ in range(plan.ranks)]
    # Those that start at the same time stay in the order in which they ran: sorting is stable.
    for action in sorted(starts, key=starts.__getitem__):
        for rank in plan.spatial_group_of(action.stage, action.replica):
            rows[rank].append(action)
    return Schedule(tuple(map(tuple, rows)))
