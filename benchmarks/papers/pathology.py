"""GEMS (SC'20): a slide of 100,000² in tiles of 1024², ResNet-110-v2, from 7 hours to 28 minutes.

The two times are the abstract's; GPUs, epochs and what the seven hours are of are not told. We take
all 97 x 97 tiles of a slide, one image per micro-batch, layer parallelism on one node of four V100s
as the seven hours, which makes them some epochs, and ask how many GPUs do as many in 28 minutes.
Nothing is said about reading and decoding tiles, or about how larger batches learn.
"""

from __future__ import annotations

from functools import cache
from math import inf

from benchmarks.papers.steps import network
from benchmarks.papers.tables import table
from gems.hardware import machine
from gems.model.estimate import estimate
from gems.planner.compile import compile_plan
from gems.planner.request import Request
from gems.plans.plan import Plan

TILES = (100_000 // 1024) ** 2
BEFORE, AFTER = 7 * 3600.0, 28 * 60.0  # seconds
STAGES, PAIRS = 4, 4  # of MASTER: eight samples per copy and update
V100 = machine("v100")
WAYS = {
    "MAST": {"schedule": "gems", "replications": 1},
    "MASTER": {"schedule": "gems", "replications": PAIRS},
    "MASTER, split backward": {"schedule": "gems-zb", "replications": PAIRS},
    "1F1B, recomputing": {
        "schedule": "1f1b",
        "micro_batches": 2 * PAIRS,
        "recompute": (*("always",) * (STAGES - 1), "never"),
    },
}


@cache
def rate(copies: int = 1, **order: object) -> float:
    """Simulated tiles per second of so many copies of four V100s; all in one update."""
    graph = network("resnet110_v2", 1024)
    plan = Plan(stages=STAGES, data=copies, **order)  # type: ignore[arg-type]
    request = Request(plan.world, inf, plan.total)
    seconds = compile_plan(plan, graph, estimate(graph, V100), V100, request).prediction.seconds
    return plan.total / seconds


def epochs() -> float:
    """How often the slide is seen in seven hours by layer parallelism."""
    return BEFORE * rate(schedule="sequential", micro_batches=1) / TILES


def minutes(way: str, copies: int) -> float:
    """For as many epochs."""
    return epochs() * TILES / rate(copies, **WAYS[way]) / 60


def needed(way: str) -> int:
    """GPUs that need no more than 28 minutes, in whole nodes."""
    copies = 1
    while minutes(way, copies) > AFTER / 60:
        copies += 1
    return STAGES * copies


def report() -> str:
    shown = (1, 8, 16, 32)
    rows = [[way, *(f"{minutes(way, n):.0f}" for n in shown), needed(way)] for way in WAYS]
    head = ("minutes", *(f"{STAGES * n} GPUs" for n in shown), "GPUs for 28 minutes")
    per_epoch = BEFORE / epochs() / 60
    first = (
        f"{TILES} tiles; layer parallelism on four GPUs: {per_epoch:.0f} minutes per epoch, "
        f"{epochs():.1f} epochs in seven hours.\n\n"
    )
    return first + table(head, rows)
