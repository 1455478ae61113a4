"""What is wrong with a plan: every problem at once, with its values and a remedy."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from gems.errors import PlanError, short
from gems.geometry.grid import MOST, halo_problems, placement_problems, tile_problems, tiles_of
from gems.plans.fields import (
    BALANCES,
    BIDIRECTIONAL,
    FOLDED,
    GRAD_SYNC,
    MOST_ACTIONS,
    OPTIMIZER_STEP,
    PLACEMENTS,
    SCHEDULES,
    ZERO,
    PlanFields,
)
from gems.plans.offload import offload_problems, values_problems
from gems.plans.placement import first_row
from gems.plans.recompute import recompute_problems
from gems.plans.streaming import stream_problems


def check_sizes(plan: PlanFields) -> None:
    """Before anything is counted out: numbers that nobody means would take all memory."""
    names = ("depth", "micro_batches", "replications", "data", "ranks", "max_in_flight")
    sizes = {n: getattr(plan, n) for n in (*names, "local_dp", "fused_layers")}
    sizes["stages"] = sizes.pop("depth")
    if not isinstance(plan.placement, str):
        groups = [g for g in plan.placement if not isinstance(g, int)]
        flat = [g for g in plan.placement if isinstance(g, int)]
        sizes["a rank of placement"] = max((*flat, *(r for g in groups for r in g)), default=0)
    if found := [f"{n} is {short(x, 30)}" for n, x in sizes.items() if x > MOST]:
        raise PlanError(f"{', '.join(found)}; a plan has at most {MOST} of anything")
    parts = [prod(map(abs, tiles)) for tiles in tiles_of(plan.spatial)]
    cells = sum(parts) + max(0, sizes["stages"] - len(parts)) * max(1, plan.local_dp)
    batches = max(1, plan.micro_batches, 2 * plan.replications) * max(1, plan.data)
    if cells * batches > MOST_ACTIONS:
        raise PlanError(
            f"{sizes['stages']} stages, {batches} micro-batches over all copies and the tiles "
            f"of each stage make {cells * batches} forwards in one step, more than "
            f"{MOST_ACTIONS}; give fewer stages, micro-batches, copies or tiles"
        )


def require_world(plan: PlanFields, world: int) -> None:
    """Raise unless a plan is for as many ranks as were started."""
    if plan.world != world:
        raise PlanError(
            f"this plan takes {plan.world} ranks ({plan.ranks} for each of {plan.data} copies)"
            f", but {world} were started; start {plan.world}, or change the plan"
        )


def plan_problems(plan: PlanFields) -> Iterable[str]:
    if plan.schedule not in SCHEDULES:
        yield f"schedule {plan.schedule!r} is unknown; choose one of {', '.join(SCHEDULES)}"
    for name in ("depth", "micro_batches", "data", "ranks"):
        if getattr(plan, name) < 1:
            shown = "stages" if name == "depth" else name
            yield f"{shown} is {getattr(plan, name)}; it must be at least 1"
    if plan.replications and plan.micro_batches != 2 * plan.replications:
        yield (
            f"replications={plan.replications} means {2 * plan.replications} micro-batches, "
            f"but micro_batches={plan.micro_batches}; give one of the two"
        )
    if plan.replications and not plan.bidirectional:
        yield f"replications belongs to a bidirectional plan; {plan.schedule!r} is not one"
    if plan.schedule in BIDIRECTIONAL and not plan.bidirectional:
        yield f"schedule {plan.schedule!r} is bidirectional; leave bidirectional out"
    if plan.max_in_flight < 0:
        yield f"max_in_flight is {plan.max_in_flight}; give 1 or more, or leave it out"
    if plan.max_in_flight > 0 and not (plan.greedy or plan.alternates):
        yield (
            f"max_in_flight={plan.max_in_flight} applies to schedules 'auto', 'gems' and "
            f"'gems-zb', not {plan.schedule!r}; remove it"
        )
    if plan.grad_sync not in GRAD_SYNC:
        yield f"grad_sync is {plan.grad_sync!r}; choose one of {', '.join(GRAD_SYNC)}"
    yield from _zero_problems(plan)
    yield from offload_problems(plan.offload)
    yield from values_problems(plan.offload, len(tiles_of(plan.stream)))
    yield from _partition_problems(plan)
    yield from _step_problems(plan)
    yield from _asynchronous_problems(plan)
    tiles = tiles_of(plan.spatial)
    yield from tile_problems(tiles, plan.depth, plan.local_dp)
    exchanging = len(tiles) > len(tiles_of(plan.stream))  # halos: streamed stages read theirs
    yield from halo_problems(plan.halo, plan.fused_layers, spatial=exchanging)
    yield from recompute_problems(plan.recompute, plan.depth)
    yield from stream_problems(
        tiles_of(plan.stream),
        plan.stream_halo,
        plan.grids[: plan.depth],
        plan.recompute,
        plan.local_dp,
    )
    yield from _placement_problems(plan)
    yield from _balance_problems(plan)
    for a, b in plan.edges or ():
        if not 0 <= a < b < plan.depth:
            yield f"edge {a} to {b} must lead from a stage to a later one of {plan.depth}"


def _partition_problems(plan: PlanFields) -> Iterable[str]:
    pairs = zip(plan.recompute_by_stage, plan.sizes, strict=False)
    if plan.partition_activations and not any(
        size > 1 and recompute != "never" for recompute, size in pairs
    ):
        yield (
            "partition_activations shards the inputs that a spatial group saves to recompute "
            "from, and no stage is both on several ranks and recomputed; give one tiles or "
            "slices and recompute='always' or names, or remove partition_activations"
        )


def _zero_problems(plan: PlanFields) -> Iterable[str]:
    if plan.zero not in ZERO:
        yield f"zero is {plan.zero!r}; choose one of {', '.join(map(str, ZERO))}"
    elif plan.zero == 3 and plan.bidirectional:
        yield (
            "zero=3 unshards the weights of a stage when its whole replica group needs them, "
            "and two directions need them at different times; use zero=2, or one direction"
        )


def _step_problems(plan: PlanFields) -> Iterable[str]:
    if plan.optimizer_step not in OPTIMIZER_STEP:
        known = ", ".join(OPTIMIZER_STEP)
        yield f"optimizer_step is {plan.optimizer_step!r}; choose one of {known}"
    elif plan.optimizer_step == "eager":
        if plan.zero in (1, 2):
            yield (
                f"optimizer_step='eager' with zero={plan.zero} would all-gather the updated "
                "shards of each stage in the middle of a step; use zero=0 or zero=3, or "
                "optimizer_step='end'"
            )
        if plan.grad_sync == "end":
            yield (
                "optimizer_step='eager' follows each all-reduce, and grad_sync='end' puts them "
                "last; remove one of the two"
            )


def _asynchronous_problems(plan: PlanFields) -> Iterable[str]:
    """Of 2BW: a batch must be through the pipeline before the next but one begins, and what
    would wait for all of a batch on all ranks would be a flush."""
    if not plan.asynchronous:
        return
    if plan.micro_batches < plan.depth:
        yield (
            f"2bw wants at least as many micro-batches as stages, but there are "
            f"{plan.micro_batches} for {plan.depth}: with fewer, weights of more than two "
            f"versions would be in use; give micro_batches={plan.depth} or more"
        )
    if plan.bidirectional:
        yield "2bw has one direction; leave bidirectional out, or use 'gems'"
    if plan.zero:
        yield (
            f"zero={plan.zero} does not shard the second weight version that 2bw needs; "
            "remove zero, or use '1f1b'"
        )
    if plan.offload:
        yield (
            f"2bw cannot offload ({', '.join(plan.offload)}): what is stored in one step "
            "would be needed in the next; remove offload, or use '1f1b'"
        )
    if plan.optimizer_step != "end":
        yield (
            f"optimizer_step={plan.optimizer_step!r} does not apply to schedule '2bw', which "
            "fixes when weights are updated; remove it"
        )
    if plan.grad_sync not in ("auto", "overlap"):
        yield (f"grad_sync={plan.grad_sync!r} is at the end of a step, and 2bw has none; remove it")
    if "except_last" in plan.recompute_by_stage:
        yield ("recompute='except_last' needs a last micro-batch, and 2bw has none; use 'always'")


def _placement_problems(plan: PlanFields) -> Iterable[str]:
    if isinstance(plan.placement, str):
        yield from _name_problems(plan)
        return
    row = first_row(plan)
    if len(row) != plan.depth:
        yield f"placement names {len(row)} ranks for {plan.depth} stages; give one each"
        return
    yield from placement_problems(row, plan.grids)
    if {rank for group in row for rank in group} != set(range(plan.ranks)):
        yield (
            f"placement {plan.placement} must use every rank from 0 to {plan.ranks - 1} "
            "and no other"
        )


def _name_problems(plan: PlanFields) -> Iterable[str]:
    """Of a placement that is not written out."""
    if plan.placement not in PLACEMENTS:
        yield (
            f"placement {plan.placement!r} is unknown; choose one of "
            f"{', '.join(PLACEMENTS)} or write out the rank of every stage"
        )
    if plan.cut:
        yield from _straight_problems(plan)
        return
    if plan.placement in FOLDED and plan.ranks != (plan.depth + 1) // 2:
        yield (
            f"a fold of {plan.depth} stages takes {(plan.depth + 1) // 2} ranks, "
            f"not {plan.ranks}; leave ranks out or write out the placement"
        )
    if plan.ranks > plan.depth:
        yield (
            f"{plan.ranks} ranks for {plan.depth} stages leave ranks without work; "
            "use more stages, fewer ranks, or data-parallel copies"
        )


def _straight_problems(plan: PlanFields) -> Iterable[str]:
    """Of a placement of spatial groups, which can only be straight."""
    if plan.placement in FOLDED:
        yield "stages that are cut over ranks cannot be folded; write out the placement"
    elif plan.ranks != sum(plan.sizes):
        yield (
            f"stages cut over {', '.join(map(str, plan.sizes))} ranks take {sum(plan.sizes)}, "
            f"one after the other, not {plan.ranks}; leave ranks out, or write out the "
            "placement to lay one stage over another"
        )


def _balance_problems(plan: PlanFields) -> Iterable[str]:
    if plan.placement == "levels" and plan.balance not in ("time", "memory"):
        yield (
            f"placement 'levels' finds boundaries by the skips of the model, and balance "
            f"{plan.balance!r} fixes them; use balance 'time' or 'memory', or placement 'fold'"
        )
    if isinstance(plan.balance, str):
        if plan.balance not in BALANCES:
            known = ", ".join(BALANCES)
            yield f"balance {plan.balance!r} is unknown; choose one of {known}, or write counts"
        return
    if len(plan.balance) != plan.depth:
        yield f"balance has {len(plan.balance)} numbers for {plan.depth} stages; give one each"
    if any(n < 1 for n in plan.balance):
        yield f"balance {plan.balance} must give every stage at least one layer"
    if not isinstance(plan.stages, int):
        yield "balance and explicit stages exclude each other; leave one out"
