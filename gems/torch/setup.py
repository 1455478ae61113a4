"""From a model and a plan, or the wish for one, to what all ranks must share: the plan written out,
what its stages cost, and the schedule."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gems.errors import PeerError, PlanError
from gems.files import from_json
from gems.hardware import Machine
from gems.model.costs import Costs, mean
from gems.model.estimate import estimate
from gems.planner.assign import stages, written
from gems.planner.explain import chosen, explain
from gems.planner.recompute_selection import fitted
from gems.planner.search import Wish, search
from gems.plans.plan import Plan
from gems.plans.residency import resident_bytes
from gems.predict.stage_costs import price
from gems.schedule.action import Kind, Schedule
from gems.schedule.build import lowered
from gems.schedule.lower.offload import BETWEEN
from gems.schedule.lower.passes import lower
from gems.schedule.lower.recompute import recompute
from gems.schedule.validate import require
from gems.torch.runtime.stage_programs import PRECISIONS
from gems.torch.spatial.halo_costs import with_halos
from gems.torch.tracing.profile import measure
from gems.torch.tracing.trace import Trace, trace
from gems.torch.tracing.unrecordable import REMEDY
from gems.transport.protocol import Transport

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Surroundings:
    """Where a model will run: the ranks, the device of this one, what they are for the planner, and
    the bytes that each may have, if anybody said so."""

    transport: Transport
    device: torch.device
    machine: Machine
    memory: int | None
    precision: str


@dataclass(frozen=True)
class Setup:
    """The recording, the stage of each of its blocks, and what all ranks must share."""

    traced: Trace
    stage_of: Sequence[int]
    plan: Plan
    costs: Costs
    schedule: Schedule


def set_up(
    model: nn.Module,
    leaves: tuple[str, ...],
    sample: Any,
    plan: Plan | str | Path,
    costs: str | Costs,
    schedule: Schedule | None,
    where: Surroundings,
) -> Setup:
    """Record, choose or take the plan, cut, price and schedule."""
    if not isinstance(plan, Plan) and plan != "auto":
        plan = from_json(Plan, Path(plan).read_text())
    traced = _traced(model, leaves, sample, where)
    if not isinstance(plan, Plan) or plan.cut or plan.stream:
        traced = replace(traced, graph=with_halos(traced, model))
    blocks = _block_costs(costs, traced, model, where, planned=not isinstance(plan, Plan))
    plan = plan if isinstance(plan, Plan) else _chosen(traced, blocks, where)
    _reject_misfits(plan, where.transport.world)
    _reject_whole(plan, traced, model)
    stage_of = stages(plan, traced.graph, blocks, where.memory)
    plan = written(plan, traced.graph, stage_of)
    limit = where.machine.device.memory if where.memory is None else where.memory
    plan = fitted(plan, traced.graph, blocks, stage_of, limit)
    priced = price(blocks, traced.graph, stage_of, plan, where.machine)
    order = _ordered(schedule, plan, priced, where.memory)
    return Setup(traced, stage_of, plan, priced, order)


def _traced(model: nn.Module, leaves: tuple[str, ...], sample: Any, where: Surroundings) -> Trace:
    dtype = PRECISIONS[where.precision]
    with torch.autocast(where.device.type, dtype or torch.bfloat16, enabled=dtype is not None):
        return trace(model, sample, device=where.device, leaves=leaves, twice=True)


def _block_costs(
    costs: str | Costs, traced: Trace, model: nn.Module, where: Surroundings, *, planned: bool
) -> Costs:
    if isinstance(costs, Costs):
        if len(costs) != len(traced.graph.blocks):
            raise PlanError(
                f"costs are of {len(costs)} blocks, the model has {len(traced.graph.blocks)}"
            )
        return costs
    if costs == "auto":
        costs = "measure" if where.device.type == "cuda" or planned else "estimate"
    if costs == "measure":
        # All at once: what a rank takes depends on what the others of its host are doing.
        found = where.transport.all_gather_object(measure(traced, model, where.device))
        if failed := [rank for rank, mine in enumerate(found) if not isinstance(mine, Costs)]:
            raise PeerError(f"rank {failed[0]} could not measure the model: {found[failed[0]]}")
        return mean(found)
    if costs != "estimate":
        raise PlanError(f"costs is {costs!r}; give 'auto', 'estimate', 'measure' or a gems.Costs")
    return estimate(traced.graph, where.machine)


def _chosen(traced: Trace, blocks: Costs, where: Surroundings) -> Plan:
    wish = Wish.on(where.machine, where.transport.world, where.memory)
    found = search(traced.graph, blocks, where.machine, wish)
    best = chosen(found)
    log.info("%s", explain(found))
    return best.plan


def _reject_misfits(plan: Plan, world: int) -> None:
    if plan.world != world:
        raise PlanError(
            f"this plan takes {plan.world} ranks ({plan.ranks} for each of {plan.data} copies)"
            f", but {world} were started; start {plan.world}, or change the plan"
        )
    if plan.zero and all(state.replicas == 1 for state in plan.residency):
        raise PlanError(
            f"zero={plan.zero} shares state out among the ranks that hold a stage, and each "
            "stage is on one rank; give the plan data-parallel copies (data=2), or leave it out"
        )


def _reject_whole(plan: Plan, traced: Trace, model: nn.Module) -> None:
    if "" in traced.record.leaves and plan.depth > 1:
        raise PlanError(
            f"this plan has {plan.depth} stages, but {type(model).__name__} runs as one block: its "
            "forward looks at the values of tensors, or it has hooks that must see its own tensors "
            f"(a warning said which). {REMEDY}"
        )


def _ordered(schedule: Schedule | None, plan: Plan, costs: Costs, memory: float | None) -> Schedule:
    """The plan's own order, or the one that was given, as ranks carry it out; proven."""
    if schedule is None:
        found = lowered(plan, costs, _activation_limit(plan, costs, memory))
    elif plan.asynchronous:
        raise PlanError("schedule '2bw' repeats its own windows; leave out schedule=...")
    elif any(action.way for _, action in schedule):
        found = require(schedule, plan)
    else:
        one = plan.one_copy()
        found = require(lower(require(recompute(schedule, one), one), plan), plan)
    wanted = plan.activations[0].offload
    if wanted and not any(action.kind is Kind.STORE for _, action in found):
        raise PlanError(
            f"offload='activations:{wanted}' stores activations that wait for their backward while "
            f"a rank runs {BETWEEN} other actions or more, and in this schedule none wait so long; "
            "use more micro-batches, more stages on a rank, or remove offload"
        )
    return found


def _activation_limit(plan: Plan, costs: Costs, memory: float | None) -> float | None:
    """What `memory` leaves for backward on the rank with most weights."""
    if memory is None:
        return None
    if plan.residency[0].sharded or plan.residency[0].offloads:
        held = (
            (plan.residency[s].bytes(costs[s].weights, costs[s].gradients) for s in on)
            for on in plan.stages_on
        )
        return memory - max(resident_bytes(mine, 2.0) for mine in held)
    held = [sum(costs[s].weights for s in on) for on in plan.stages_on]
    return memory - 4 * max(held)
