"""PipeDream-2BW (arXiv 2006.09503): its formulas of memory, and a step without a bubble.

A chain of p equal stages: W of weights and A of activations in all, A_in between two stages. The
formulas are of the stage with most micro-batches under way, without gradients, optimizer and
messages. With recomputation ours has one A_in less: the first stage reads the data, which nobody
sends it.
"""

from __future__ import annotations

from benchmarks.papers.tables import table
from gems.model.costs import Cost, Costs, Edge
from gems.plans.plan import Plan
from gems.predict.memory_trace import live
from gems.predict.simulate import simulate
from gems.schedule.build import lowered

WEIGHTS, ACTIVATIONS, INPUTS = 3200, 6400, 100


def formula(p: int, recompute: str) -> float:
    kept = ACTIVATIONS / p if recompute == "always" else ACTIVATIONS
    return 2 * WEIGHTS / p + kept + p * INPUTS


def counted(p: int, recompute: str) -> float:
    """Most bytes of weights and stash on any rank, in live bytes of every action."""
    plan = Plan(stages=p, micro_batches=p, schedule="2bw", recompute=recompute)
    rows = live(lowered(plan), plan, _costs(p), state=0.0)
    return max(memory.weights + memory.activations for row, _ in rows for memory in row)


def _costs(p: int) -> Costs:
    stage = Cost(activations=ACTIVATIONS / p + INPUTS, weights=WEIGHTS / p, gradients=WEIGHTS / p)
    return Costs((stage,) * p, tuple(Edge(s, s + 1, INPUTS, INPUTS) for s in range(p - 1)))


def bubble(p: int, m: int, schedule: str) -> float:
    plan = Plan(stages=p, micro_batches=m, schedule=schedule)
    return simulate(lowered(plan), plan, _costs(p)).bubble


def report() -> str:
    rows = [
        (p, recompute, f"{formula(p, recompute):g}", f"{counted(p, recompute):g}",
         f"{bubble(p, p, '1f1b'):.1%}", f"{bubble(p, p, '2bw'):.1%}")
        for p in (2, 4, 8)
        for recompute in ("never", "always")
    ]  # fmt: skip
    names = ("p = m", "recompute", "formula", "counted", "1F1B bubble", "2BW bubble")
    return table(names, rows)
