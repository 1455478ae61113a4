"""Which plans this front end runs. What it does not is rejected by name, before anything else."""

from __future__ import annotations

from gems.errors import PlanError, problems
from gems.plans.plan import Plan


def reject_unoffered(plan: Plan) -> None:
    """Raise for techniques that exist for PyTorch only."""
    if found := problems_of(plan):
        raise PlanError(problems("gems.keras does not run this plan on TensorFlow:", found))


def problems_of(plan: Plan) -> list[str]:
    """What a plan asks for that is not offered."""
    return [why for asked, why in _problems(plan) if asked]


def _problems(plan: Plan) -> list[tuple[bool, str]]:
    states, saved = plan.residency, plan.activations
    moved = any(x.weights_offload or x.optimizer_offload for x in states)
    return [
        (
            plan.halo != "d1",
            f"halo={plan.halo!r} lets layers share a halo exchange; use halo='d1'",
        ),
        (
            any(grid.size > 1 and not grid.tiles for grid in plan.grids),
            "local_dp slices micro-batches; use data-parallel copies (data=2) instead",
        ),
        (
            any(x.patches for x in saved),
            "stream runs patches of an image; use recompute='always' instead",
        ),
        (any(x.sharded for x in states), "zero shards state; leave it out, or use more stages"),
        (
            moved or any(x.offload for x in saved),
            "offload moves state out; leave it out, or use recompute='always'",
        ),
        (plan.asynchronous, "schedule '2bw' trains without a flush; use '1f1b'"),
        (plan.stage_by_stage, "schedule 'l2l' loads weights stage by stage; use 'sequential'"),
        (
            any(x.eager for x in states),
            "optimizer_step='eager' updates stages one by one; use 'end'",
        ),
    ]
