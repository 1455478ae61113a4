"""How many micro-batches are in flight on a stage at once, in a plan's own order."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import accumulate

from gems.plans.plan import Plan
from gems.predict.timeline import IN_FLIGHT
from gems.schedule.action import Kind
from gems.schedule.build import build


def in_flight(plan: Plan) -> list[float]:
    """How many micro-batches each stage has in flight at most, in the plan's own order.

    The stages of one rank share its memory, so each counts as often as there are; but not those of
    two directions that share a limit, as in GEMS: one, or that of the plan.
    """
    counts = in_flight_alone(plan)
    if plan.activations[0].offload or plan.alternates:
        return counts
    pairs = zip(counts, plan.places[0], strict=True)
    return [count * len(plan.stages_on[rank]) for count, rank in pairs]


def in_flight_alone(plan: Plan) -> list[float]:
    """The same for each stage by itself. Greedy orders have as many as memory allows: at least one.
    Offloaded activations leave two: one in use, and one that is stored or loaded."""
    if plan.activations[0].offload:
        return [2.0] * plan.depth
    if plan.alternates:
        return [float(max(1, plan.max_in_flight))] * plan.depth
    if plan.greedy:
        return [1.0] * plan.depth
    return [float(most) for most, _ in _counts(_order_of(plan))]


def held(plan: Plan) -> list[int]:
    """How many micro-batches wait on each stage, with nothing but its inputs, to be recomputed."""
    if plan.alternates or plan.greedy:
        return [0] * plan.depth
    return [inputs for _, inputs in _counts(_order_of(plan))]


def _order_of(plan: Plan) -> Plan:
    """What of a plan matters to how many micro-batches are in flight."""
    recompute = tuple(p.recompute if p.whole_stage else "never" for p in plan.activations)
    lanes = plan.lanes() if plan.cut else plan.one_copy()
    return replace(lanes, stages=plan.depth, edges=None, recompute=recompute, why="")


@lru_cache(maxsize=256)
def _counts(plan: Plan) -> tuple[tuple[int, int], ...]:
    """For each stage the most micro-batches that have activations, and that have inputs only."""
    order = build(plan)
    found = []
    for stage in range(plan.depth):
        row = [a for a in order.ranks[plan.rank_of(stage, 0)] if a.stage == stage]
        again = plan.activations[stage].whole_stage
        later = [
            again and a.kind is Kind.FORWARD and plan.recomputes(stage, a.micro_batch) for a in row
        ]
        pairs = list(zip(row, later, strict=True))
        live = accumulate(0 if wait else IN_FLIGHT[a.kind] for a, wait in pairs)
        inputs = accumulate(wait - (a.kind is Kind.RECOMPUTE) for a, wait in pairs)
        found.append((max(live), max(inputs)))
    return tuple(found)
