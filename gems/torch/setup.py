"""From a model and a plan, or "auto", to what all ranks must share: the plan written out, what its
stages cost, and the schedule."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gems.errors import PeerError, PlanError
from gems.files import from_json
from gems.hardware import Machine
from gems.model.costs import Costs, mean
from gems.model.estimate import estimate
from gems.planner.compile import compile_plan
from gems.planner.explain import chosen, explain
from gems.planner.request import Request
from gems.planner.search import search
from gems.plans.plan import Plan
from gems.plans.residency import ADAM, with_masters
from gems.plans.validate import require_world
from gems.schedule.action import Schedule
from gems.torch.runtime.compiled_calls import CompileOptions
from gems.torch.runtime.stage_programs import PRECISIONS
from gems.torch.spatial.halo_costs import with_halos
from gems.torch.tensors.memory_format import MemoryFormat
from gems.torch.tracing.profile import measure
from gems.torch.tracing.trace import Trace, trace
from gems.torch.tracing.unrecordable import REMEDY
from gems.transport.protocol import Transport

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Surroundings:
    """Where a model will run: the ranks, the device of this one, what they are for the planner, and
    the memory budget of each in bytes, if one is given."""

    transport: Transport
    device: torch.device
    machine: Machine
    memory: int | None
    precision: str
    memory_format: MemoryFormat = field(default_factory=MemoryFormat)
    compiling: CompileOptions = field(default_factory=CompileOptions)
    master_weights: bool = False  # of weights in half optimizers step fp32 copies
    spare_cores: bool = True  # beside the threads that compute, on each rank


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
    """Record the model, choose or take the plan, and compile it."""
    if not isinstance(plan, Plan) and plan != "auto":
        plan = from_json(Plan, Path(plan).read_text())
    traced = _traced(model, leaves, sample, where)
    if not isinstance(plan, Plan) or plan.cut or plan.stream:
        traced = replace(traced, graph=with_halos(traced, model))
    blocks = _block_costs(costs, traced, model, where, plan if isinstance(plan, Plan) else None)
    state = with_masters(ADAM) if where.master_weights else ADAM
    if isinstance(plan, Plan):
        request = Request.of(plan, where.memory, state=state)
    else:
        world = where.transport.world
        request = Request.on(where.machine, world, where.memory, state=state)
        plan = _chosen(traced, blocks, where.machine, request)
    plan = replace(plan, grad_sync=_grad_sync(plan, where))
    _reject_mismatch(plan, where.transport.world)
    _reject_whole(plan, traced, model)
    found = compile_plan(plan, traced.graph, blocks, where.machine, request, order=schedule)
    return Setup(traced, found.stage_of, found.plan, found.costs, found.schedule)


def _grad_sync(plan: Plan, where: Surroundings) -> str:
    """Sums beside a backward that computes on all cores would hold it up."""
    if plan.grad_sync != "auto" or plan.asynchronous:
        return plan.grad_sync
    return "overlap" if where.spare_cores or where.device.type != "cpu" else "stage"


def _traced(model: nn.Module, leaves: tuple[str, ...], sample: Any, where: Surroundings) -> Trace:
    dtype = PRECISIONS[where.precision]
    with torch.autocast(where.device.type, dtype or torch.bfloat16, enabled=dtype is not None):
        inputs = where.memory_format.stand_ins(sample)
        return trace(model, inputs, device=where.device, leaves=leaves, twice=True)


def _block_costs(
    costs: str | Costs, traced: Trace, model: nn.Module, where: Surroundings, plan: Plan | None
) -> Costs:
    if isinstance(costs, Costs):
        if len(costs) != len(traced.graph.blocks):
            raise PlanError(
                f"costs are of {len(costs)} blocks, the model has {len(traced.graph.blocks)}"
            )
        return costs
    if costs == "auto":
        costs = "measure" if where.device.type == "cuda" or plan is None else "estimate"
    if costs == "measure":
        # All at once: what a rank takes depends on what the others of its host are doing.
        found = where.transport.all_gather_object(_measured(traced, model, where, plan))
        if failed := [rank for rank, mine in enumerate(found) if not isinstance(mine, Costs)]:
            raise PeerError(f"rank {failed[0]} could not measure the model: {found[failed[0]]}")
        return mean(found)
    if costs != "estimate":
        raise PlanError(f"costs is {costs!r}; give 'auto', 'estimate', 'measure' or a gems.Costs")
    return estimate(traced.graph, where.machine, where.precision)


def _measured(traced: Trace, model: nn.Module, where: Surroundings, plan: Plan | None) -> Costs:
    """Seconds on this rank, of what it may run at a time: of a tile or patch, if the plan has
    them, and of no more than fits."""
    memory = where.machine.device.memory if where.memory is None else where.memory
    if where.device.type == "cuda":
        memory = min(memory, torch.cuda.mem_get_info(where.device)[0])
    stages = zip(plan.grids, plan.activations, strict=True) if plan is not None else ()
    parts = max((grid.size * prod(saved.patches) for grid, saved in stages), default=1)
    return measure(
        traced,
        model,
        where.device,
        on=where.machine,
        precision=PRECISIONS[where.precision],
        memory=memory,
        parts=parts,
    )


def _chosen(traced: Trace, blocks: Costs, machine: Machine, request: Request) -> Plan:
    found = search(traced.graph, blocks, machine, request)
    best = chosen(found)
    log.info("%s", explain(found))
    return best.plan


def _reject_mismatch(plan: Plan, world: int) -> None:
    require_world(plan, world)
    if plan.zero and all(state.replicas == 1 for state in plan.residency):
        raise PlanError(
            f"zero={plan.zero} shards state over the replica group of each stage, and each stage "
            "is on one rank; give the plan data-parallel copies (data=2), or leave it out"
        )


def _reject_whole(plan: Plan, traced: Trace, model: nn.Module) -> None:
    if "" in traced.record.leaves and plan.depth > 1:
        raise PlanError(
            f"this plan has {plan.depth} stages, but {type(model).__name__} runs as one block: its "
            "forward looks at the values of tensors, or it has hooks that must see its own tensors "
            f"(a warning named it). {REMEDY}"
        )
