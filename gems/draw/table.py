"""Numbers in columns: any table, and what a step kept and did on each rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gems.draw.units import heading, size
from gems.predict.timeline import KINDS, Timeline


def table(rows: Iterable[Sequence[object]], headers: Sequence[str]) -> str:
    """Aligned text; a column of numbers is set to the right, others to the left.

    >>> print(table([("gpipe", 12), ("1f1b", 9)], ("schedule", "length")), end="")
    schedule  length
    --------  ------
    gpipe         12
    1f1b           9
    """
    body = [[str(cell) for cell in row] for row in rows]
    for row in body:
        if len(row) != len(headers):
            raise ValueError(f"{row} has {len(row)} cells for the {len(headers)} columns {headers}")
    columns = list(zip(*([list(headers), *body]), strict=True))
    widths = [max(map(len, column)) for column in columns]
    right = [bool(body) and all(_number(cell) for cell in column[1:]) for column in columns]
    lines = [list(headers), ["-" * width for width in widths], *body]
    return "".join(_line(line, widths, right) for line in lines)


def _number(cell: str) -> bool:
    return cell[:1].isdigit() or (cell[:1] in "-+." and cell[1:2].isdigit()) or cell in ("", "-")


def _line(cells: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    padded = zip(cells, widths, right, strict=True)
    return "  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in padded).rstrip() + "\n"


def report(timeline: Timeline) -> str:
    """Per rank: how busy it was, its peak bytes by kind, and the most samples it kept."""
    kinds = [kind for kind in KINDS if any(getattr(peak, kind) for peak in timeline.peaks)]
    headers = ["rank", "busy"]
    headers += ["peak", *kinds] if timeline.peaks else []
    headers += ["in flight"] if timeline.max_in_flight else []
    headers += ["allocated", "reserved"] if timeline.allocator else []
    length = timeline.seconds or 1.0
    busy = [0.0] * timeline.ranks
    for event in timeline.events:
        busy[event.rank] += event.seconds
    rows = []
    for rank in range(timeline.ranks):
        row = [str(rank), f"{busy[rank] / length:.1%}"]
        if timeline.peaks:
            peak = timeline.peaks[rank]
            row += [size(peak.total), *(size(getattr(peak, kind)) for kind in kinds)]
        if timeline.max_in_flight:
            row.append(str(timeline.max_in_flight[rank]))
        if timeline.allocator:
            row += map(size, timeline.allocator[rank])
        rows.append(row)
    return heading(timeline) + "\n" + table(rows, headers)
