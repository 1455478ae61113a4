"""Live bytes over time: one area chart per rank, by kind.

Over another step, the line on a chart is the total that the first of the two had.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gems.draw.compare import names
from gems.draw.shapes import (
    BOLD,
    FLOOR,
    INK,
    MEMORY,
    SOFT,
    area,
    caption,
    legend,
    line,
    rect,
    steps,
)
from gems.draw.units import size
from gems.predict.timeline import KINDS, Memory, Timeline

HIGH, PITCH = 50, 64

Across = Callable[[float], float]
Row = tuple[tuple[float, Memory], ...]


def charts(
    sides: Sequence[Timeline], across: Across, left: float, right: float, top: float
) -> tuple[list[str], float]:
    """The charts from `top` down, all to one scale, and where they end.

    The last of the sides is drawn by kind; of another before it, the total is a line.
    """
    *others, timeline = sides
    rows = timeline.memory
    peaks = [peak_of(timeline, rank) for rank in range(len(rows))]
    most = max(m.total for side in sides for m in _all(side)) or 1
    seen = [k for k in KINDS if any(getattr(m, k) for row in rows for _, m in row)]
    drawn = [caption(20, top, "Live bytes", 13, INK, more=BOLD)]
    lined = [(INK, f"line: {names(others[0], timeline)[0]}")] if others else []
    drawn += legend(left, top, [(MEMORY[kind], kind) for kind in seen] + lined)
    top += 14
    for rank, row in enumerate(rows):
        floor = top + PITCH * rank + HIGH
        drawn.append(rect(left, floor - HIGH, right - left, HIGH, FLOOR))
        drawn.append(caption(left - 12, floor - HIGH + 18, f"rank {rank}", 12, INK, "end"))
        label = f"peak {size(peaks[rank].total)}"
        drawn.append(caption(left - 12, floor - HIGH + 34, label, 10, SOFT, "end"))
        drawn += _stack(row, seen, across, right, floor, HIGH / most)
        height = floor - HIGH * peaks[rank].total / most
        drawn.append(line(left, height, right, height, "#cbd2d9"))
        for other in others:
            drawn += _total(other.memory[rank], across, right, floor, HIGH / most)
    return drawn, top + PITCH * len(rows) + 6


def _all(timeline: Timeline) -> list[Memory]:
    return [*timeline.peaks, *(m for row in timeline.memory for _, m in row)]


def peak_of(timeline: Timeline, rank: int) -> Memory:
    """The rank's own account of its peak, or the highest that was seen."""
    if timeline.peaks:
        return timeline.peaks[rank]
    return max((m for _, m in timeline.memory[rank]), key=lambda m: m.total, default=Memory())


def _stack(
    row: Row,
    kinds: list[str],
    across: Across,
    right: float,
    floor: float,
    per_byte: float,
) -> list[str]:
    """One area per kind on top of the last; bytes hold until the next count, hence the steps."""
    if not row:
        return []
    starts, stops = _spans(row, across, right)
    base = [0.0] * len(row)
    drawn = []
    for kind in kinds:
        above = [b + getattr(m, kind) for b, (_, m) in zip(base, row, strict=True)]
        upper, lower = [], []
        for x, until, high, low in zip(starts, stops, above, base, strict=True):
            upper += [(x, floor - high * per_byte), (until, floor - high * per_byte)]
            lower += [(x, floor - low * per_byte), (until, floor - low * per_byte)]
        most = max(getattr(m, kind) for _, m in row)
        if most:
            drawn.append(area(upper + lower[::-1], MEMORY[kind], f"{kind}: at most {size(most)}"))
        base = above
    return drawn


def _total(row: Row, across: Across, right: float, floor: float, per_byte: float) -> list[str]:
    if not row:
        return []
    path = []
    for x, until, (_, m) in zip(*_spans(row, across, right), row, strict=True):
        path += [(x, floor - m.total * per_byte), (until, floor - m.total * per_byte)]
    return [steps(path, INK)]


def _spans(row: Row, across: Across, right: float) -> tuple[list[float], list[float]]:
    """From where to where each count holds."""
    starts = [max(across(t), across(0.0)) for t, _ in row]
    return starts, [*starts[1:], right]
