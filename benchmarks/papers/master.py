"""GEMS (SC'20): MASTER over layer parallelism, in units and for ResNet-110-v2.

k samples per update, p stages; f forward, b backward, in units b = 2f. Layer parallelism takes
`k p (f + b)`, MASTER `k (f + p b) + (p - 1) f`: at most `1 + f / b` times faster, for any k and p.
"""

from __future__ import annotations

from benchmarks.papers.steps import network, step
from benchmarks.papers.tables import table
from gems.hardware import machine
from gems.model.costs import unit
from gems.model.estimate import estimate
from gems.plans.plan import Plan
from gems.predict.simulate import simulate
from gems.schedule.build import lowered

STAGES, SAMPLES = (2, 4, 8), (2, 4, 8)
# As handed down, for the samples above and for ever more of them.
DERIVED = {2: (1.09, 1.14, 1.17, 1.20), 4: (1.14, 1.23, 1.28, 1.33), 8: (1.17, 1.28, 1.34, 1.41)}
PUBLISHED = {"MAST": 1.36, "MASTER": 1.83}


def plans(p: int, k: int) -> tuple[Plan, Plan]:
    """Layer parallelism, and MASTER over the same ranks and samples."""
    basic = Plan(stages=p, schedule="sequential", micro_batches=k)
    return basic, Plan(stages=p, schedule="gems", replications=k // 2)


def speedup(p: int, k: int) -> float:
    basic, master = (simulate(lowered(plan), plan, unit(p)).seconds for plan in plans(p, k))
    return basic / master


def for_ever(p: int, f: float = 1.0, b: float = 2.0) -> float:
    """The speed-up of ever more samples."""
    return p * (f + b) / (f + p * b)


def of_resnet(p: int, k: int) -> float:
    """ResNet-110-v2, one image of 1024² at a time, on V100s as preset."""
    graph, on = network("resnet110_v2", 1024), machine("v100")
    basic, master = (step(graph, plan, on).seconds for plan in plans(p, k))
    return basic / master


def longest_gain(p: int) -> float:
    """The speed-up of ever more samples at ResNet-110-v2's own ratio of forward to backward."""
    graph, on = network("resnet110_v2", 1024), machine("v100")
    costs = estimate(graph, on).items
    return for_ever(p, sum(c.f for c in costs), sum(c.b for c in costs))


def of_batch(side: int, batch: int) -> float:
    """How much faster an image is in a micro-batch of several, on one V100: fewer launches each."""
    on = machine("v100")
    one, many = (
        sum(c.seconds for c in estimate(network("resnet110_v2", side, n), on).items)
        for n in (1, batch)
    )
    return batch * one / many


def report() -> str:
    rows = [
        [
            p,
            *(
                f"{speedup(p, k):.2f} ({d:.2f})"
                for k, d in zip(SAMPLES, DERIVED[p][:-1], strict=True)
            ),
            *(f"{for_ever(p):.2f} ({DERIVED[p][-1]:.2f})", f"{of_resnet(p, 8):.2f}"),
        ]
        for p in STAGES
    ]
    head = ("p", *(f"k={k}" for k in SAMPLES), "for ever", "ResNet-110-v2, 1024², k=8")
    explained = [
        [p, f"{of_resnet(p, 2):.2f}", f"{of_resnet(p, 32):.2f}", f"{longest_gain(p):.2f}"]
        for p in STAGES
    ]
    order = table(("p", "MAST, k=2", "MASTER, k=32", "for ever, at its own f / b"), explained)
    sides = (32, 64, 128, 224, 512, 1024)
    batches = [[b, *(f"{of_batch(side, b):.2f}" for side in sides)] for b in (2, 4)]
    effect = table(("batch", *(f"{side}²" for side in sides)), batches)
    return f"{table(head, rows)}\n\n{order}\n\n{effect}"
