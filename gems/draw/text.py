"""A step in characters: one row per rank, time from left to right.

    rank 0  F0 F1 .. .. B0--- B1---        a letter, the micro-batch, and dashes while it lasts
    rank 1  .. F0 B0--- F1 B1--- ..        dots where the rank is idle

With several stages on a rank the stage stands in front, `2F0`. The second replica on a rank is
written small, `f1`. Messages and sums of gradients are left out: they are for the SVG.
"""

from __future__ import annotations

from math import gcd

from gems.draw.units import counts_units, heading
from gems.schedule.core import Action
from gems.timeline import Event, Timeline


def text(timeline: Timeline, width: int = 120) -> str:
    """The chart, at most `width` characters wide.

    If every time is a whole number and there is room, a column is a step of time and the chart is
    exact; otherwise time is scaled, and short actions show only their letter.
    """
    boxes = [(event, event.parsed()) for event in timeline.events]
    boxes = [(event, action) for event, action in boxes if action.computes]
    if not boxes:
        return heading(timeline) + "\n"
    labels = _labels(boxes)
    cell = max(map(len, labels)) + 1
    step = _step(timeline, boxes)
    margin = len(str(timeline.ranks - 1))
    room = width - len("rank   ") - margin
    exact = step > 0 and timeline.seconds / step * cell <= room + 1
    per_second = cell / step if exact else room / timeline.seconds
    zero = min(event.start for event in timeline.events)
    columns = round(timeline.seconds * per_second)
    idle = ("." * (cell - 1) + " ") if exact else "."
    rows = [(idle * columns)[:columns] for _ in range(timeline.ranks)]
    for (event, _), label in zip(boxes, labels, strict=True):
        start, stop = (round((t - zero) * per_second) for t in (event.start, event.stop))
        box = _exact(label, stop - start, cell) if exact else _scaled(label, stop - start)
        rows[event.rank] = rows[event.rank][:start] + box + rows[event.rank][stop:]
    lines = [f"rank {rank:>{margin}}  {row}".rstrip() for rank, row in enumerate(rows)]
    return "\n".join((heading(timeline), *lines)) + "\n"


def _labels(boxes: list[tuple[Event, Action]]) -> list[str]:
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


def _step(timeline: Timeline, boxes: list[tuple[Event, Action]]) -> int:
    """The largest step of a grid that every action lies on; 0 if times are not whole numbers."""
    if not counts_units(timeline):
        return 0
    return gcd(*(round(t) for event, _ in boxes for t in (event.start, event.stop)))
