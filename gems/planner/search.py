"""Choose a plan: try candidates, simulate each, keep the fastest that fits the memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gems.costs import Costs
from gems.errors import PlanError, faults
from gems.graph import Graph
from gems.machine import Machine
from gems.plan import Plan
from gems.planner.assign import assign, stages
from gems.price import price
from gems.schedule.build import build
from gems.schedule.passes import lower
from gems.simulate import simulate
from gems.timeline import counted

STATE = 4  # weights, gradients and two moments of an optimizer, in units of the weights


@dataclass(frozen=True)
class Candidate:
    """A plan, and what it should take: seconds per micro-batch, bytes on the fullest rank."""

    plan: Plan
    seconds: float
    bytes: float


def search(
    graph: Graph, costs: Costs, machine: Machine, ranks: int, memory: float | None = None
) -> list[Candidate]:
    """Every candidate for so many ranks that fits, fastest first. Raises if none does."""
    limit = machine.device.memory if memory is None else memory
    tried = [
        c
        for plan in _plans(ranks, len(graph.blocks))
        if (c := _predict(plan, graph, costs, machine))
    ]
    fitting = [c for c in tried if c.bytes <= limit]
    if not fitting:
        best = sorted(tried, key=lambda c: c.bytes)[:3]
        raise PlanError(
            faults(
                f"no plan for {ranks} ranks fits {limit:,.0f} bytes per rank; use more ranks, a "
                "smaller micro-batch or more memory. The leanest are:",
                (f"{describe(c.plan)}: {c.bytes:,.0f} bytes" for c in best),
            )
        )
    return sorted(fitting, key=lambda c: (c.seconds, c.bytes))


def describe(plan: Plan) -> str:
    """A plan in a few words."""
    ways = "both directions" if plan.bidirectional else "one direction"
    return (
        f"{plan.data} x {plan.depth} stages on {plan.ranks} ranks, {plan.schedule}, {ways}, "
        f"{plan.micro_batches} micro-batches"
    )


def explain(found: list[Candidate], most: int = 5) -> str:
    """Why the first was chosen: the next best beside it."""
    rows = [
        f"{c.seconds * 1e3:9.2f} ms per micro-batch {c.bytes / 2**20:10.1f} MiB  {describe(c.plan)}"
        for c in found[:most]
    ]
    return "\n".join(("fastest that fits, and the next:", *rows))


def _plans(ranks: int, blocks: int) -> Iterator[Plan]:
    for depth in range(1, min(ranks, blocks) + 1):
        if ranks % depth:
            continue
        copies = ranks // depth
        if depth == 1:
            yield Plan(stages=1, schedule="sequential", data=copies, micro_batches=1)
            continue
        for schedule, both in (("1f1b", False), ("auto", False), ("auto", True), ("gems-zb", True)):
            yield Plan(
                stages=depth,
                schedule=schedule,
                bidirectional=both,
                data=copies,
                micro_batches=2 * depth,
            )


def _predict(plan: Plan, graph: Graph, costs: Costs, machine: Machine) -> Candidate:
    stage_of = stages(plan, graph, costs)
    plan = assign(plan, graph, costs)
    staged = price(costs, graph, stage_of, plan, machine)
    order = build(plan, staged)
    seconds = simulate(lower(order, plan.one_copy()), plan.one_copy(), staged, machine).seconds
    held = counted(order)
    most = 0.0
    for rank in range(plan.ranks):
        mine = [staged[s] for s in plan.stages_on[rank]]
        most = max(
            most, STATE * sum(c.weights for c in mine) + held[rank] * max(c.stash for c in mine)
        )
    pairs = zip(staged.items, plan.holders, strict=True)
    summed = max(machine.allreduce_seconds(2 * c.weights, ranks) for c, ranks in pairs)
    return Candidate(plan, (seconds + summed) / plan.total, most)
