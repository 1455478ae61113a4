"""Generated plans: a schedule, and options added one by one as long as the plan stays valid."""

from __future__ import annotations

from random import Random
from typing import Any

from gems.errors import PlanError, ScheduleError
from gems.plans.fields import SCHEDULES
from gems.plans.offload import WHERE
from gems.plans.plan import Plan
from gems.schedule.action import Kind
from gems.schedule.build import lowered

Options = dict[str, Any]
SAMPLES = 8  # micro-batches of a step, at most
GRIDS = {
    1: ((2,), (3,)),
    2: ((1, 2), (2, 1), (2, 2), (1, 3), (3, 1)),
    3: ((1, 1, 2), (2, 1, 1), (1, 2, 1), (1, 2, 2)),
}
STATE = ("activations", "weights", "optimizer")  # that is offloaded; values are drawn by _patches


def draw_plan(
    r: Random,
    layers: int,
    dims: int,
    *,
    tiles: bool,
    ranks: int,
    micro_batches: int = 0,
    patches: bool = True,
) -> Options:
    """What `Plan` is called with. `layers` are the model's; `dims` of its image, 0 if it has none.
    `micro_batches` fixes their number over all copies. Without `patches`, tiles have none."""
    while True:
        options = _base(r, layers, micro_batches)
        if dims and tiles:
            stream = r.random() < 0.2
            grids = [r.choice(GRIDS[dims]) for _ in range(1 if r.random() < 0.7 else 2)]
            stages = options["stages"]
            if isinstance(stages, int):
                options["stream" if stream else "spatial"] = tuple(grids[:stages])
                options |= _patches(options, dims) if patches else {}
        if not _valid(options, ranks):
            continue
        for added in _extras(r, layers, options, tiles):
            if _valid(both := options | added, ranks):
                options = both
        return options


def _patches(options: Options, dims: int) -> Options:
    """Some tiles run in patches, and some streamed stages keep values in a store. Drawn apart, so
    that all else of a case stays as it was."""
    r = Random(repr(sorted(options.items())))
    found: Options = {}
    if "spatial" in options and r.random() < 0.35:
        found["stream"] = tuple(r.choice(GRIDS[dims]) for _ in options["spatial"])
    if "stream" in (options | found) and r.random() < 0.3:
        found["offload"] = (f"values:{r.choice(('host', 'disk'))}",)
    if "stream" in (options | found) and r.random() < 0.4:
        found["stream_halo"] = "carry"
    return found


def _base(r: Random, layers: int, micro_batches: int) -> Options:
    stages = r.randint(1, min(4, layers + 1))
    data = r.choice((1, 1, 1, 2, 2, 3))
    if micro_batches:
        data = r.choice([n for n in (1, 1, 2, 3) if micro_batches % n == 0])
    return {
        "stages": stages,
        "micro_batches": micro_batches // data or r.choice((1, 2, 2, 3, 4)),
        "schedule": r.choice(SCHEDULES),
        "data": data,
    }


def _extras(r: Random, layers: int, options: Options, tiles: bool) -> list[Options]:
    """Options that may be added, in a random order, each with its own chance."""
    stages = options["stages"]
    names = [f"layers.{i}" for i in range(layers)]
    some = tuple(r.sample(names, min(len(names), 2)))
    entries: list[Any] = ["always", "except_last", ("",), some]
    each = tuple(r.choice(["never", *entries]) for _ in range(stages))
    what = r.sample(STATE, r.randint(1, len(STATE)))
    where = r.choice(WHERE)
    place = tuple(r.randrange(stages) for _ in range(stages))
    found: list[tuple[float, Options]] = [
        (0.25, {"ranks": r.randint(1, stages)}),
        (0.15, {"placement": "fold"}),
        (0.15, {"placement": place}),
        (0.4, {"bidirectional": True}),
        (0.3, {"max_in_flight": r.randint(1, 3)}),
        (0.4 if tiles else 0.02, {"local_dp": r.choice((2, 2, 3))}),
        (0.3, {"halo": "d2", "fused_layers": r.choice((0, 0, 2, 3))}),
        (0.3, {"grad_sync": "end"}),
        (0.2, {"recompute": r.choice(entries)}),
        (0.15, {"recompute": each}),
        (0.35, {"zero": r.randint(1, 3)}),
        (0.3, {"offload": tuple(f"{w}:{where}" for w in what)}),
        (0.25, {"optimizer_step": "eager"}),
        (0.3, {"partition_activations": True}),
        (0.15, {"balance": "memory"}),
    ]
    if options["schedule"] in ("gems", "gems-zb") and not options["micro_batches"] % 2:
        found.append((0.3, {"replications": options["micro_batches"] // 2}))
    kept = [added for chance, added in found if r.random() < chance]
    r.shuffle(kept)
    return kept


def _valid(options: Options, ranks: int) -> bool:
    try:
        plan = Plan(**options)
        if plan.world > ranks or plan.total > SAMPLES:
            return False
        order = lowered(plan)
    except (PlanError, ScheduleError):
        return False
    if plan.activations[0].offload and not any(a.kind is Kind.STORE for _, a in order):
        return False  # nothing waits long enough
    return not (plan.zero and all(len(holders) == 1 for holders in plan.replica_groups))
