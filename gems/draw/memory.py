"""Live bytes over time: one area chart per rank, by kind."""

from __future__ import annotations

from collections.abc import Callable

from gems.draw.shapes import FLOOR, INK, MEMORY, SOFT, area, legend, line, rect, words
from gems.draw.units import size
from gems.timeline import KINDS, Memory, Timeline

HIGH, PITCH = 50, 64

Across = Callable[[float], float]


def charts(
    timeline: Timeline, across: Across, left: float, right: float, top: float
) -> tuple[list[str], float]:
    """The charts from `top` down, all to one scale, and where they end."""
    rows = timeline.memory
    peaks = [_peak(timeline, rank) for rank in range(len(rows))]
    most = max((peak.total for peak in peaks), default=0) or 1
    seen = [k for k in KINDS if any(getattr(m, k) for row in rows for _, m in row)]
    drawn = [words(20, top, "Live bytes", 13, INK, more='font-weight="600"')]
    drawn += legend(left, top, [(MEMORY[kind], kind) for kind in seen])
    top += 14
    for rank, row in enumerate(rows):
        floor = top + PITCH * rank + HIGH
        drawn.append(rect(left, floor - HIGH, right - left, HIGH, FLOOR))
        drawn.append(words(left - 12, floor - HIGH + 18, f"rank {rank}", 12, INK, "end"))
        said = f"peak {size(peaks[rank].total)}"
        drawn.append(words(left - 12, floor - HIGH + 34, said, 10, SOFT, "end"))
        drawn += _stack(row, seen, across, right, floor, HIGH / most)
        height = floor - HIGH * peaks[rank].total / most
        drawn.append(line(left, height, right, height, "#cbd2d9"))
    return drawn, top + PITCH * len(rows) + 6


def _peak(timeline: Timeline, rank: int) -> Memory:
    """The rank's own account of its peak, or the highest that was seen."""
    if timeline.peaks:
        return timeline.peaks[rank]
    return max((m for _, m in timeline.memory[rank]), key=lambda m: m.total, default=Memory())


def _stack(
    row: tuple[tuple[float, Memory], ...],
    kinds: list[str],
    across: Across,
    right: float,
    floor: float,
    per_byte: float,
) -> list[str]:
    """One area per kind on top of the last; bytes hold until the next count, hence the steps."""
    if not row:
        return []
    starts = [max(across(t), across(0.0)) for t, _ in row]
    stops = [*starts[1:], right]
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
