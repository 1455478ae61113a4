"""A step in characters: one row per rank, time from left to right.

    rank 0  F0 F1 .. .. B0--- B1---        a letter, the micro-batch, and dashes while it lasts
    rank 1  .. F0 B0--- F1 B1--- ..        dots where the rank is idle

With several stages on a rank the stage stands in front, `2F0`. The second replica on a rank is
written small, `f1`. Messages and sums of gradients are left out: they are for the SVG.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from gems.draw.compare import aligned, difference, names
from gems.draw.units import counts_units, heading
from gems.predict.timeline import Event, Timeline
from gems.schedule.action import Action

Boxes = list[tuple[Event, Action]]


@dataclass(frozen=True)
class Columns:
    """How time lies over the columns of a chart. If `exact`, a step of time is one cell."""

    zero: float
    per_second: float
    count: int
    cell: int
    exact: bool

    def at(self, t: float) -> int:
        return round((t - self.zero) * self.per_second)


def text(timeline: Timeline, width: int = 120, below: Timeline | None = None) -> str:
    """The chart, at most `width` characters wide; `below` is another step of the same plan.

    If every time is a whole number and the width allows, a column is a step of time and exact;
    otherwise time is scaled, and short actions show only their letter.
    """
    sides = (timeline,) if below is None else aligned(timeline, below)
    summary = heading(timeline) if below is None else difference(timeline, below)
    called = ("",) if below is None else tuple(f"{name}  " for name in names(timeline, below))
    grid = columns(sides, width - max(map(len, called)))
    if grid is None:
        return summary + "\n"
    charts = [_rows(side, grid) for side in sides]
    lines = []
    for rank in range(timeline.ranks):
        for side, name in enumerate(called):
            title = margin(timeline, rank if side == 0 else None)
            lines.append(f"{title}{name:>{max(map(len, called))}}{charts[side][rank]}".rstrip())
    return "\n".join((summary, *lines)) + "\n"


def margin(timeline: Timeline, rank: int | None) -> str:
    """What stands left of a rank's row: its name, or nothing for its second row."""
    digits = len(str(timeline.ranks - 1))
    return " " * (digits + 7) if rank is None else f"rank {rank:>{digits}}  "


def columns(sides: tuple[Timeline, ...], width: int) -> Columns | None:
    """The columns that these steps share; None if nothing was computed."""
    boxes = [box for side in sides for box in _computed(side)]
    if not boxes:
        return None
    cell = max(len(label) for side in sides for label in _labels(_computed(side))) + 1
    step = _step(boxes) if all(map(counts_units, sides)) else 0
    length = max(side.seconds for side in sides)
    columns = width - len(margin(sides[0], 0))
    exact = step > 0 and length / step * cell <= columns + 1
    per_second = cell / step if exact else columns / length
    zero = min(event.start for side in sides for event in side.events)
    return Columns(zero, per_second, round(length * per_second), cell, exact)


def _computed(timeline: Timeline) -> Boxes:
    pairs = ((event, event.parsed()) for event in timeline.events)
    return [(event, action) for event, action in pairs if action.computes]


def _rows(timeline: Timeline, grid: Columns) -> list[str]:
    boxes = _computed(timeline)
    idle = ("." * (grid.cell - 1) + " ") if grid.exact else "."
    rows = [(idle * grid.count)[: grid.count] for _ in range(timeline.ranks)]
    for (event, _), label in zip(boxes, _labels(boxes), strict=True):
        start, stop = grid.at(event.start), grid.at(event.stop)
        box = _exact(label, stop - start, grid.cell) if grid.exact else _scaled(label, stop - start)
        rows[event.rank] = rows[event.rank][:start] + box + rows[event.rank][stop:]
    return rows


def _labels(boxes: Boxes) -> list[str]:
    """What each action is called on its rank, as short as can be without confusion."""
    stages: dict[tuple[int, int], set[int]] = {}
    for event, action in boxes:
        stages.setdefault((event.rank, action.replica), set()).add(action.stage)
    several = any(len(found) > 1 for found in stages.values())
    first = {rank: replica for rank, replica in sorted(stages, reverse=True)}
    labels = []
    for event, action in boxes:
        second = action.replica != first[event.rank]
        letter = action.kind.value.lower() if second else action.kind.value
        labels.append(f"{action.stage if several else ''}{letter}{action.micro_batch}")
    return labels


def _exact(label: str, columns: int, cell: int) -> str:
    return label.ljust(cell - 1).ljust(columns - 1, "-") + " " if columns else ""


def _scaled(label: str, columns: int) -> str:
    """The label drawn out over its columns, or as much of it as fits."""
    if len(label) > columns:
        label = next(c for c in label if c.isalpha())
    return label.ljust(columns, "-")[:columns]


def _step(boxes: Boxes) -> int:
    """The largest step of a grid that every action lies on, if all times are whole numbers."""
    return gcd(*(round(t) for event, _ in boxes for t in (event.start, event.stop)))
