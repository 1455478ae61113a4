"""Live bytes in characters: under the chart of a step, in its columns.

    rank 0  ▄▄▅▇██▇▅▄▄  5.0 MiB in all         the most in each column of time
            ▁▁▂▅██▅▂▁▁  1.0 MiB activations          and each kind that varies

Rows of one kind are drawn to one scale over all ranks, so that they can be compared.
"""

from __future__ import annotations

from collections.abc import Callable

from gems.draw.memory import Row, peak_of
from gems.draw.text import Columns, columns, margin
from gems.draw.units import size
from gems.predict.timeline import KINDS, Memory, Timeline

BARS = " ▁▂▃▄▅▆▇█"
FEW = 8  # ranks, up to which each kind has its row

Part = Callable[[Memory], int]


def levels(timeline: Timeline, width: int = 120) -> str:
    """The chart, as wide as that of `text` and a label; empty if no bytes were counted."""
    grid = columns((timeline,), width)
    if grid is None or not any(timeline.memory):
        return ""
    parts: list[tuple[str, Part]] = [("in all", lambda m: m.total)]
    if timeline.ranks <= FEW:
        parts += [(kind, _of(kind)) for kind in KINDS if _moves(timeline, kind)]
    most = {name: max(part(m) for row in timeline.memory for _, m in row) for name, part in parts}
    lines = []
    for rank, row in enumerate(timeline.memory):
        for name, part in parts:
            bars = "".join(_bar(value, most[name]) for value in _highest(row, part, grid))
            peak = max(part(m) for m in (peak_of(timeline, rank), *(m for _, m in row)))
            title = margin(timeline, rank if name == "in all" else None)
            lines.append(f"{title}{bars}  {size(peak)} {name}")
    return "\n".join(lines) + "\n"


def _of(kind: str) -> Part:
    return lambda memory: getattr(memory, kind)


def _moves(timeline: Timeline, kind: str) -> bool:
    return any(len({getattr(m, kind) for _, m in row}) > 1 for row in timeline.memory)


def _bar(value: int, most: int) -> str:
    return BARS[-(-8 * value // most)] if most else " "


def _highest(row: Row, part: Part, grid: Columns) -> list[int]:
    """The most bytes in each column; a count holds until the next one."""
    found = [0] * grid.count
    starts = [max(grid.at(t), 0) for t, _ in row]
    stops = [*starts[1:], grid.count]
    for (_, memory), start, stop in zip(row, starts, stops, strict=False):
        for column in range(start, min(max(stop, start + 1), grid.count)):
            found[column] = max(found[column], part(memory))
    return found
