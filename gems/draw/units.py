"""Seconds, bytes, plans and steps as people read them."""

from __future__ import annotations

from collections.abc import Sequence

from gems.plans.plan import Plan
from gems.predict.timeline import Timeline

SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
BYTES = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def counts_units(timeline: Timeline) -> bool:
    """Whether times are whole numbers of units, as under unit costs, rather than seconds."""
    if timeline.clock != "simulated" or timeline.seconds < 1:
        return False
    return all(abs(t - round(t)) < 1e-6 for e in timeline.events for t in (e.start, e.stop))


def scale(longest: float, whole: bool = False) -> tuple[float, str]:
    """The unit to write times in, as (seconds, name), if `longest` is the longest of them."""
    if whole:
        return 1.0, "units"
    return next((pair for pair in SECONDS if longest >= pair[0]), SECONDS[-1])


def seconds(value: float, whole: bool = False) -> str:
    """Three digits and a unit: `12.3 ms`; or `12 units` on a whole grid."""
    size, name = scale(value, whole)
    return f"{round(value)} {name}" if whole else f"{value / size:.3g} {name}"


def size(value: float) -> str:
    """`1.5 MiB`; under a KiB the bytes themselves."""
    for unit, name in BYTES:
        if value >= unit:
            return f"{value / unit:.1f} {name}"
    return f"{value:.0f} B"


def heading(timeline: Timeline) -> str:
    """A step in one line: its length, its bubble, and by which clock."""
    length = seconds(timeline.seconds, counts_units(timeline))
    return f"step {length} · bubble {timeline.bubble:.1%} · {timeline.clock} clock"


def stages_of(plan: Plan, rank: int) -> str:
    """`stage 1`, or `stages 0, 3`."""
    return listed("stage", plan.stages_on[rank])


def listed(noun: str, numbers: Sequence[int]) -> str:
    """`rank 1`, `ranks 0, 3`, or `ranks 0 to 7` if there are many in a row."""
    if len(numbers) > 4 and list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"{noun}s {numbers[0]} to {numbers[-1]}"
    return f"{noun}{'s' if len(numbers) != 1 else ''} {', '.join(map(str, numbers))}"
