"""A network traced without memory, and the simulated step of a plan for it on a machine."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from gems.hardware import Machine
from gems.model.costs import Costs
from gems.model.estimate import estimate
from gems.model.graph import Graph
from gems.planner.compile import compile_plan
from gems.planner.request import Request
from gems.plans.plan import Plan
from gems.predict.simulate import simulate
from gems.predict.timeline import Timeline
from gems.schedule.build import lowered
from gems.torch.spatial.halo_costs import with_halos
from gems.torch.tracing.trace import trace
from tests import networks


@cache
def network(name: str, side: int, batch: int = 1, **options: Any) -> Graph:
    """In training, on square images of three channels."""
    with torch.device("meta"):
        model = networks.build(name, **options).train()
    return with_halos(trace(model, torch.empty(batch, 3, side, side, device="meta")), model)


def priced(graph: Graph, plan: Plan, on: Machine) -> tuple[Plan, Costs]:
    """The plan with its stages written out, and what each costs."""
    compiled = compile_plan(plan, graph, estimate(graph, on), on, Request.of(plan))
    return compiled.plan, compiled.costs


def step(graph: Graph, plan: Plan, on: Machine) -> Timeline:
    plan, costs = priced(graph, plan, on)
    return simulate(lowered(plan, costs), plan, costs, on)


def by_count(graph: Graph, parts: int) -> tuple[int, ...]:
    """Layers of each stage as the published GEMS scripts cut: equal counts, the last has the rest.

    Their own default, whatever a layer weighs.
    """
    each, rest = divmod(len(graph.layers), parts)
    return (*(each,) * (parts - 1), each + rest)
