"""From the order of whole stages to the order of ranks, where spatial groups run stages jointly.

[Note: why a projected order cannot deadlock]
All actions are put in one sequence, each after its dependencies. A rank runs those of its spatial
groups, in the order of the sequence. The first action that is left can always run: its dependencies
come earlier and have run, and all ranks of its group have reached it.
"""

from __future__ import annotations

from gems.model.costs import Costs
from gems.plans.plan import Plan
from gems.schedule import greedy
from gems.schedule.action import Action, Kind, Schedule


def project(order: Schedule, lanes: Plan, plan: Plan, costs: Costs) -> Schedule:
    """The order of `lanes`, one per stage, as the ranks of one copy of `plan` follow it.

    The sequence is by the time at which each action starts on its lane. A rank in several spatial
    groups has the actions of several lanes, and the activations of all of them: a memory budget
    that holds for every lane is only approximate for such a rank.
    """
    starts, _ = greedy.times(order, lanes, costs)
    rows: list[list[Action]] = [[] for _ in plan.stages_in_copy]
    # Those that start at the same time stay in the order in which they ran: sorting is stable.
    for action in sorted(starts, key=starts.__getitem__):
        for rank in plan.spatial_group_of(action.stage, action.replica):
            rows[rank].append(action)
    return Schedule(tuple(map(tuple, rows)))


def most_in_flight(order: Schedule, plan: Plan) -> int:
    """The most micro-batches whose activations a rank of the plan holds at once."""
    most = 0
    for row in order.ranks:
        live: set[tuple[int, int]] = set()
        for action in row:
            stage, i = action.stage, action.micro_batch
            if action.kind in (Kind.BACKWARD, Kind.WEIGHT):
                live.discard((stage, i))
            elif action.kind is Kind.RECOMPUTE or not plan.recomputes(stage, i):
                live.add((stage, i))
            most = max(most, len({i for _, i in live}))
    return most
