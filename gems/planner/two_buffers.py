"""PipeDream-2BW's rule of how long a micro-batch takes, by which width, depth and keep are chosen.

    t = max over stages i of max(c T_comp(i) + sum of T_comm(j to i), T_dp(i) / m)

T_comp is forward and backward, c what computing again adds to it (4/3 if backward takes as long as
two forwards), T_comm what comes to a stage: outputs and gradients. T_dp, the sum of its gradients
over copies, runs beside m micro-batches. Nothing fills or drains, so a step takes m t.

Here a stage has one memory for gradients, so its sum runs beside one forward only; where it takes
longer than that, the simulated step is longer than the rule's, and counts.
"""

from __future__ import annotations

from gems.hardware import Machine
from gems.model.costs import Costs
from gems.plans.plan import Plan


def step_seconds(plan: Plan, costs: Costs, machine: Machine) -> float:
    """Of one batch: m micro-batches at the pace of the slowest stage."""
    return plan.micro_batches * max(_pace(s, plan, costs, machine) for s in range(plan.depth))


def _pace(stage: int, plan: Plan, costs: Costs, machine: Machine) -> float:
    again = costs[stage].f * plan.recomputes(stage, 0)
    arriving = [("output", s) for s in plan.sources[stage]]
    arriving += [("gradient", s) for s in plan.sinks[stage]]
    messages = sum(_message(what, s, stage, plan, costs, machine) for what, s in arriving)
    sums = machine.allreduce_seconds(costs[stage].gradients, plan.replica_groups[stage])
    return max(costs[stage].seconds + again + messages, sums / plan.micro_batches)


def _message(
    what: str, source: int, target: int, plan: Plan, costs: Costs, machine: Machine
) -> float:
    """Between the two ranks that are furthest apart."""
    ranks = {*plan.spatial_group_of(source, 0), *plan.spatial_group_of(target, 0)}
    return machine.slowest(ranks).seconds(costs.part(what, source, target))
