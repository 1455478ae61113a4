"""Two timelines of one plan side by side: on one clock, and how far they differ.

One is usually predicted and the other measured. Differences are of the second against the
first: a step that was predicted at 800 ms and took 880 ms is +10%.
"""

from __future__ import annotations

from dataclasses import replace

from gems.draw.shapes import ACTIONS
from gems.draw.units import counts_units, seconds
from gems.errors import GemsError, problems
from gems.predict.timeline import Event, Timeline
from gems.schedule.action import Action

CALLED = {"simulated": "predicted", "wall": "measured"}


def names(first: Timeline, second: Timeline) -> tuple[str, str]:
    """What to call the two: by their clocks, as long as these tell them apart."""
    one, other = (CALLED.get(t.clock, t.clock) for t in (first, second))
    return (one, other) if one != other else ("first", "second")


def aligned(first: Timeline, second: Timeline) -> tuple[Timeline, Timeline]:
    """The two, both from zero, both in seconds or both in units. They must be of one plan.

    If only one counts units, a unit is as long as makes both as busy with computing.
    """
    _require_same(first, second)
    units = counts_units(first), counts_units(second)
    busy = _busy(first), _busy(second)
    scales = (
        busy[1] / busy[0] if units == (True, False) else 1.0,
        busy[0] / busy[1] if units == (False, True) else 1.0,
    )
    return _from_zero(first, scales[0]), _from_zero(second, scales[1])


def difference(first: Timeline, second: Timeline) -> str:
    """How far they differ, in one line: the step, each kind of action, the worst action."""
    one, other = names(first, second)
    units = counts_units(first), counts_units(second)
    lengths = first.seconds, second.seconds
    first, second = aligned(first, second)
    whole = all(units)
    parts = [
        f"{one} step {seconds(first.seconds, whole)}, {other} {seconds(second.seconds, whole)} "
        f"({_percent(first.seconds, second.seconds)})"
    ]
    before, after = _computed(first), _computed(second)
    for key, (name, *_) in ACTIONS.items():
        of_kind = [k for k, (_, action) in before.items() if action.kind.value == key]
        if of_kind:
            spent = [sum(side[k][0].seconds for k in of_kind) for side in (before, after)]
            parts.append(f"{name} {_percent(*spent)}")
    apart = {k: abs(after[k][0].seconds - e.seconds) for k, (e, _) in before.items()}
    worst = max(apart, key=lambda k: apart[k], default=None)
    lasted = [seconds(side[worst][0].seconds, whole) for side in (before, after) if worst]
    if worst and lasted[0] != lasted[1]:
        parts.append(f"furthest off: {worst[1]} on rank {worst[0]}, {lasted[0]} → {lasted[1]}")
    if units[0] != units[1]:
        side = 0 if units[0] else 1
        parts.append(f"a unit is {seconds((first, second)[side].seconds / lengths[side])}")
    return " · ".join(parts)


def _percent(before: float, after: float) -> str:
    return f"{after / before - 1:+.0%}" if before else "new"


def _computed(timeline: Timeline) -> dict[tuple[int, str], tuple[Event, Action]]:
    """What was computed, by rank and action; messages and sums are drawn but not compared."""
    pairs = ((event, event.parsed()) for event in timeline.events)
    return {(e.rank, e.action): (e, action) for e, action in pairs if action.computes}


def _busy(timeline: Timeline) -> float:
    return sum(event.seconds for event, _ in _computed(timeline).values()) or 1.0


def _require_same(first: Timeline, second: Timeline) -> None:
    one, other = _computed(first).keys(), _computed(second).keys()
    found = [
        f"only the {name} runs {', '.join(f'{action} on rank {rank}' for rank, action in some)}"
        + (f" and {more} more" if (more := len(extra) - len(some)) else "")
        for name, extra in (("first", one - other), ("second", other - one))
        if (some := sorted(extra)[:3])
    ]
    if found:
        raise GemsError(problems("these two steps are not of one plan:", found))


def _from_zero(timeline: Timeline, scale: float) -> Timeline:
    zero = min((e.start for e in timeline.events), default=0.0)

    def at(t: float) -> float:
        return (t - zero) * scale

    return replace(
        timeline,
        events=tuple(replace(e, start=at(e.start), stop=at(e.stop)) for e in timeline.events),
        memory=tuple(tuple((at(t), m) for t, m in row) for row in timeline.memory),
    )
