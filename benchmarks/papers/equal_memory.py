"""GEMS (SC'20): all ways to train with one sample in flight, at equal memory.

k samples per update, p stages on p ranks. Layer parallelism, MAST, MASTER and MASTER with split
backward hold the activations of one sample at a time; 1F1B with recomputation those of one and the
inputs of up to p; `auto` is what the planner chooses within the bytes that MASTER takes. MAST
updates after every second sample, so k samples are k / 2 of its steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from math import inf
from pathlib import Path

from benchmarks.papers.steps import network
from benchmarks.papers.tables import table
from benchmarks.scatter import Point, scatter
from gems.files import write
from gems.hardware import machine
from gems.model.costs import unit
from gems.model.estimate import estimate
from gems.planner.compile import compile_plan
from gems.planner.request import Request
from gems.planner.search import search
from gems.plans.describe import describe
from gems.plans.plan import Plan
from gems.predict.simulate import simulate
from gems.schedule.build import lowered

STAGES, BATCHES = (2, 4, 8), (1, 2, 4, 8, 16, 32)
NETWORKS = {
    "ResNet-110-v2, 1024²": ("resnet110_v2", 1024),
    "AmoebaNet-D(18, 208), 1024²": ("amoebanet_d", 1024),
}
OPTIONS = {"amoebanet_d": {"num_layers": 18, "num_filters": 208}}
SHOWN = (1, 2, 8, 32)  # batches of the networks' tables
LAYER, MAST, MASTER, SPLIT = "layer parallelism", "MAST", "MASTER", "MASTER, split backward"
RECOMPUTING, AUTO = "1F1B, recomputing", "auto, same limit"
V100 = machine("v100")


def ways(p: int, k: int) -> Mapping[str, tuple[Plan, int]]:
    """Plans by name, and how many steps of each make k samples. Both directions need two."""
    found = {LAYER: (Plan(stages=p, schedule="sequential", micro_batches=k), 1)}
    if k > 1:
        found[MAST] = Plan(stages=p, schedule="gems", replications=1), k // 2
        found[MASTER] = Plan(stages=p, schedule="gems", replications=k // 2), 1
        found[SPLIT] = Plan(stages=p, schedule="gems-zb", replications=k // 2), 1
    again = (*("always",) * (p - 1), "never")  # the last stage has its gradient at once
    found[RECOMPUTING] = Plan(stages=p, micro_batches=k, recompute=again), 1
    return found


def units(p: int, k: int) -> dict[str, float]:
    """Length of k samples where forward, input gradient and weight gradient take a unit each."""
    return {
        name: times * simulate(lowered(plan), plan, unit(p)).seconds
        for name, (plan, times) in ways(p, k).items()
    }


@cache
def of_network(name: str, p: int, k: int) -> dict[str, tuple[float, float, str]]:
    """Simulated images per second on V100s, GiB of the fullest, and the plan that `auto` chose."""
    kind, side = NETWORKS[name]
    graph = network(kind, side, **OPTIONS.get(kind, {}))
    costs = estimate(graph, V100)
    found = {}
    for way, (plan, times) in ways(p, k).items():
        compiled = compile_plan(plan, graph, costs, V100, Request(p, inf, plan.total))
        expected = compiled.prediction
        found[way] = k / (times * expected.seconds), expected.bytes, ""
    limit = max(found[way][1] for way in (LAYER, MASTER) if way in found)
    best = search(graph, costs, V100, Request(p, limit, k)).best
    found[AUTO] = k / best.seconds, best.bytes, describe(best.plan)
    return {way: (rate, size / 2**30, text) for way, (rate, size, text) in found.items()}


def chart(name: str, k: int = 8) -> str:
    """Seconds per image against bytes, of all ways on two, four and eight ranks."""
    points = [
        Point(f"{p} ranks, {way}", f"{p} ranks", size, 1 / rate)
        for p in STAGES
        for way, (rate, size, _) in of_network(name, p, k).items()
    ]
    title = f"{name}, {k} images per update, one at a time (simulated, V100)"
    return scatter(title, points, "GiB of the fullest rank", "seconds per image")


def report() -> str:
    names = (LAYER, MAST, MASTER, SPLIT, RECOMPUTING)
    rows = [
        [p, k, *(f"{t:.0f} ({base / t:.2f})" if t else "" for t in (found.get(n) for n in names))]
        for p in STAGES
        for k in BATCHES
        for found in [units(p, k)]
        for base in [found[LAYER]]
    ]
    parts = ["In units; in brackets the speed-up over layer parallelism.\n"]
    parts.append(table(("p", "k", *names), rows))
    for name in NETWORKS:
        rows = []
        for p in STAGES:
            for k in SHOWN:
                found = of_network(name, p, k)
                cells = [
                    f"{found[n][0]:.2f}, {found[n][1]:.1f}" if n in found else ""
                    for n in (*names, AUTO)
                ]
                rows.append([p, k, *cells, found[AUTO][2]])
        parts.append(f"\n{name}, V100: images/s, GiB of the fullest rank.\n")
        parts.append(table(("p", "k", *names, AUTO, "which is"), rows))
    return "\n".join(parts)


def main() -> None:
    """Draw the chart of each network beside this file."""
    for name, (kind, _) in NETWORKS.items():
        write(Path(__file__).with_name(f"equal-memory-{kind}.svg"), chart(name))


if __name__ == "__main__":
    main()
