"""GEMS (SC'20): ResNet-1001 with GEMS-Hybrid on 1,024 V100s; 97.32% scaling efficiency published.

The figure is the abstract's, the setting is not: we take one image of 224² at a time, which is
what the smallest out-of-core case has, four stages on the four GPUs of a Lassen node, and MAST,
i.e. two samples per update. Efficiency is the time of one copy alone over that of 256 copies.

A Lassen node has two InfiniBand rails for its four GPUs, and all four sum gradients with other
nodes at the same time: with contention, each has half a rail.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from time import perf_counter

from benchmarks.papers.steps import network, priced
from benchmarks.papers.tables import table
from gems.hardware import Machine, machine
from gems.model.graph import Graph
from gems.plans.plan import Plan
from gems.predict.simulate import simulate
from gems.schedule.build import lowered

PUBLISHED = 0.9732
V100 = machine("v100")
STAGES = 4


@dataclass(frozen=True)
class Step:
    """Simulated seconds of a step: as we run it, and with all sums of gradients at its end."""

    beside: float
    after: float
    actions: int
    took: float  # real seconds of lowering, proving and simulating


def with_contention(on: Machine, rails: int = 2) -> Machine:
    """All ranks of a node send to other nodes at once, over so many rails."""
    assert on.between and on.node
    share = rails / on.node
    between = replace(on.between, bandwidth=share * on.between.bandwidth)
    return replace(on, between=between)


def step(graph: Graph, copies: int, replications: int = 1, on: Machine = V100) -> Step:
    plan = Plan(stages=STAGES, schedule="gems", replications=replications, data=copies)
    plan, costs = priced(graph, plan, on)
    start = perf_counter()
    schedule = lowered(plan, costs)
    timeline = simulate(schedule, plan, costs, on)
    took = perf_counter() - start
    computed = max(e.stop for e in timeline.events if not e.action.endswith("A"))
    sums = [on.allreduce_seconds(costs[s].gradients, plan.replica_groups[s]) for s in range(STAGES)]
    longest = max(sum(sums[s] for s in mine) for mine in plan.stages_on)
    return Step(timeline.seconds, computed + longest, sum(map(len, schedule.ranks)), took)


def efficiency(
    graph: Graph, copies: int, replications: int = 1, on: Machine = V100
) -> tuple[float, float]:
    """Of so many copies against one: sums beside the work, and after it."""
    one, all_ = step(graph, 1, replications, on), step(graph, copies, replications, on)
    return one.beside / all_.beside, one.after / all_.after


def points(found: float) -> str:
    """Percentage points off."""
    return f"{100 * (found - PUBLISHED):+.1f}"


def report() -> str:
    graph = network("resnet1001_v2", 224)
    rows = []
    for replications in (1, 4):
        for on, links in ((V100, "its own"), (with_contention(V100), "half a rail")):
            beside, after = efficiency(graph, 256, replications, on)
            large = step(graph, 256, replications, on)
            rows.append(
                [
                    *(2 * replications, links, f"{beside:.2%}", points(beside)),
                    *(f"{after:.2%}", points(after)),
                    *(f"{large.beside:.3f} s", large.actions, f"{large.took:.1f} s"),
                ]
            )
    head = (
        "samples per update and copy",
        "a GPU's link",
        "sums beside the work",
        "points off",
        "sums after it",
    )
    more = ("points off", "simulated step", "actions", "to simulate it")
    return table((*head, *more), rows)
