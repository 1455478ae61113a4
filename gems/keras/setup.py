"""From a model and a plan, or "auto", to what all ranks must share: the plan written out, what its
stages cost, and the schedule."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gems.errors import PeerError, PlanError
from gems.files import from_json
from gems.hardware import Machine
from gems.keras.offered import reject_unoffered
from gems.keras.spatial.halo_costs import with_halos
from gems.keras.tracing.profile import measure
from gems.keras.tracing.record import Recording
from gems.keras.tracing.trace import trace
from gems.model.costs import Costs, mean
from gems.model.estimate import estimate
from gems.planner.compile import compile_plan
from gems.planner.explain import chosen, explain
from gems.planner.request import Request
from gems.planner.search import search
from gems.plans.plan import Plan
from gems.plans.residency import ADAM
from gems.plans.validate import require_world
from gems.schedule.action import Schedule
from gems.transport.protocol import Transport

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Surroundings:
    """Where a model will run: the ranks, what they are for the planner, and the memory budget of
    each in bytes, if one is given."""

    transport: Transport
    machine: Machine
    memory: int | None


@dataclass(frozen=True)
class Setup:
    """The recording, the stage of each of its blocks, and what all ranks must share."""

    recording: Recording
    stage_of: Sequence[int]
    plan: Plan
    costs: Costs
    schedule: Schedule


def set_up(
    model: Any,
    specs: Any,
    plan: Plan | str | Path,
    costs: str | Costs,
    schedule: Schedule | None,
    where: Surroundings,
) -> Setup:
    """Record the model, choose or take the plan, and compile it."""
    if not isinstance(plan, Plan) and plan != "auto":
        plan = from_json(Plan, Path(plan).read_text())
    if isinstance(plan, Plan):
        reject_unoffered(plan)
    found = trace(model, specs, training=True)
    if not isinstance(plan, Plan) or any(grid.tiles for grid in plan.grids):
        found.graph = with_halos(found)
    blocks = _block_costs(costs, found, where, auto=not isinstance(plan, Plan))
    if isinstance(plan, Plan):
        request = Request.of(plan, where.memory, state=ADAM)
    else:
        request = Request.on(where.machine, where.transport.world, where.memory, state=ADAM)
        options = search(found.graph, blocks, where.machine, request, offered=reject_unoffered)
        plan = chosen(options).plan
        log.info("%s", explain(options))
    require_world(plan, where.transport.world)
    compiled = compile_plan(plan, found.graph, blocks, where.machine, request, order=schedule)
    return Setup(found, compiled.stage_of, compiled.plan, compiled.costs, compiled.schedule)


def _block_costs(costs: str | Costs, found: Recording, where: Surroundings, *, auto: bool) -> Costs:
    if isinstance(costs, Costs):
        if len(costs) != len(found.graph.blocks):
            raise PlanError(
                f"costs are of {len(costs)} blocks, the model has {len(found.graph.blocks)}"
            )
        return costs
    if costs == "auto":
        costs = "measure" if auto else "estimate"
    if costs == "measure":
        # All at once: what a rank takes depends on what the others of its host are doing.
        every = where.transport.all_gather_object(measure(found, where.machine))
        if failed := [rank for rank, mine in enumerate(every) if not isinstance(mine, Costs)]:
            raise PeerError(f"rank {failed[0]} could not measure the model: {every[failed[0]]}")
        return mean(every)
    if costs != "estimate":
        raise PlanError(f"costs is {costs!r}; give 'auto', 'estimate', 'measure' or a gems.Costs")
    return estimate(found.graph, where.machine)
