"""torchgpipe (arXiv 2004.09910): how fast AmoebaNet-D(18, 256) trains on n P40s, m micro-batches.

Settings and figures are those of its benchmarks/amoebanetd-speed: 224² images, batches as large as
fit, cells per device by hand, all micro-batches recomputed (m = 1) or all but the last.

[Note: recomputation as a stage] torchgpipe recomputes before the gradient arrives, not after it
("checkpointing with preceding recomputation", torchgpipe/checkpoint.py). We say so with the actions
that we have: beside each stage s stands a stage n + s on the same rank, which reads s and whose
backward is free. Its forward is the recomputation; the backward of s waits for it as for a reader.

    rank 0   0F0            2F0      0B0      n = 2: while 1B0 runs on rank 1, rank 0 has time
    rank 1        1F0  3F0  1B0               for 2F0, which is 0F0 once more
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.papers.steps import network, priced
from benchmarks.papers.tables import off, percent, table
from gems.hardware import machine
from gems.model.costs import Cost, Costs
from gems.plans.plan import Plan
from gems.predict.simulate import simulate
from gems.schedule.action import Action, Kind, Schedule
from gems.schedule.lower.passes import lower
from gems.schedule.validate import require

P40 = machine(Path(__file__).parent / "p40.json")


@dataclass(frozen=True)
class Setting:
    batch: int
    balance: tuple[int, ...]  # cells per device
    images: float  # per second, published
    speedup: float  # over n = 2 and m = 1, published


SETTINGS = {
    (2, 1): Setting(96, (7, 17), 26.733, 1.0),
    (2, 4): Setting(256, (9, 15), 41.133, 1.546),
    (2, 32): Setting(1280, (9, 15), 47.386, 1.780),
    (4, 1): Setting(160, (3, 4, 5, 12), 26.827, 1.006),
    (4, 4): Setting(360, (3, 6, 7, 8), 44.543, 1.680),
    (4, 32): Setting(1152, (3, 6, 7, 8), 72.412, 2.711),
    (8, 1): Setting(196, (2, 2, 2, 2, 2, 3, 4, 7), 24.918, 0.932),
    (8, 4): Setting(480, (2, 2, 2, 3, 3, 4, 4, 4), 70.065, 2.625),
    (8, 32): Setting(1280, (2, 2, 2, 3, 3, 4, 4, 4), 132.413, 4.966),
}
FIRST = (2, 1)
Key = tuple[int, int]


@dataclass(frozen=True)
class Reading:
    """What we take torchgpipe to do; by default what its code says."""

    our_cut: bool = False  # blocks evened out by time, not the published cells per device
    late: bool = False  # recompute when the gradient has arrived
    spare_single: bool = False  # a single micro-batch is not recomputed


READINGS = {
    "as its code says": Reading(),
    "recomputed when the gradient has arrived": Reading(late=True),
    "our own cut": Reading(our_cut=True),
    "our own cut, late, and a single micro-batch is spared": Reading(True, True, True),
}


def images(n: int, m: int, reading: Reading = READINGS["as its code says"]) -> float:
    """Simulated images per second."""
    setting = SETTINGS[n, m]
    graph = network("amoebanet_d", 224, setting.batch // m, num_layers=18, num_filters=256)
    balance = "time" if reading.our_cut else setting.balance
    plan, costs = priced(graph, Plan(stages=n, micro_batches=m, balance=balance), P40)
    # Of several, the last is spared. Costs are a stage's, not a micro-batch's: spare each a little.
    again = (m - 1) / m if m > 1 else float(not reading.spare_single)
    return setting.batch / gpipe_seconds(plan, costs, again, reading.late)


def gpipe_seconds(plan: Plan, costs: Costs, again: float, late: bool = False) -> float:
    """A step in GPipe's order that does `again` of each forward once more: see the note above."""
    n, m = plan.depth, plan.micro_batches
    ahead, after = (0.0, again) if late else (again, 0.0)
    beside = tuple(Cost(f=ahead * cost.f, i=0.0, w=0.0, activations=0.0) for cost in costs.items)
    stages = tuple(replace(cost, i=cost.i + after * cost.f) for cost in costs.items)
    doubled = Plan(
        stages=2 * n,
        micro_batches=m,
        placement=(*range(n), *range(n)),
        edges=(*plan.chain, *((s, n + s) for s in range(n))),
    )
    schedule = require(lower(Schedule(tuple(_row(s, n, m) for s in range(n))), doubled), doubled)
    costs = replace(costs, items=stages + beside, group_sizes=())
    return simulate(schedule, doubled, costs, P40).seconds


def _row(s: int, n: int, m: int) -> tuple[Action, ...]:
    row = [Action(Kind.FORWARD, s, i) for i in range(m)]
    for i in reversed(range(m)):
        row += [Action(Kind.FORWARD, n + s, i), Action(Kind.BACKWARD, n + s, i)]
        row.append(Action(Kind.BACKWARD, s, i))
    return tuple(row)


def errors(found: dict[Key, float]) -> dict[Key, float]:
    """Of the speed-ups over the first setting."""
    first = found[FIRST]
    return {k: off(x / first, SETTINGS[k].speedup) for k, x in found.items() if k != FIRST}


def mean(values: Iterable[float]) -> float:
    values = [abs(v) for v in values]
    return sum(values) / len(values)


def report() -> str:
    found = {
        title: {k: images(*k, reading) for k in SETTINGS} for title, reading in READINGS.items()
    }
    main = found["as its code says"]
    far = {FIRST: 0.0, **errors(main)}
    rows = [
        [
            *(*key, s.batch, s.images, f"{main[key]:.1f}", percent(off(main[key], s.images))),
            *(f"{s.speedup:.3f}", f"{main[key] / main[FIRST]:.3f}", percent(far[key])),
        ]
        for key, s in SETTINGS.items()
    ]
    head = ("n", "m", "batch", "images/s", "simulated", "off", "speed-up", "simulated", "off")
    readings = [
        (
            title,
            f"{mean(errors(all_).values()):.1%}",
            f"{mean(off(x, SETTINGS[k].images) for k, x in all_.items()):.1%}",
        )
        for title, all_ in found.items()
    ]
    means = ("reading", "mean error of speed-ups", "of images/s")
    return table(head, rows) + "\n\n" + table(means, readings)
