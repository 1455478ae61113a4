"""The partition of a model as a picture: blocks in a row by stage, and over them what crosses.

    ╭────── 4.0 MiB ──────╮          arcs: values that another stage reads; dashed if they
╭ 16.0 MiB ╮ ╭ 2.0 MiB ╮  ▼          stay on their rank
[][][][][] [][][][][] [][][][]       blocks, or the layers or modules that hold them
 stage 0    stage 1    stage 2       in the colours of their stages
▂▁▃▁▂      ▂▂▃▂▁      ▁▃▁▂           seconds of each, and bytes kept for backward
"""

from __future__ import annotations

from dataclasses import dataclass

from gems.draw.partition.cells import Cell, Crossing, Partition, stays_put
from gems.draw.shapes import (
    BOLD,
    DARK,
    FLOOR,
    INK,
    PAPER,
    SOFT,
    STAGES,
    arc,
    box,
    caption,
    page,
    rect,
)
from gems.draw.units import listed, seconds, size
from gems.plans.plan import Plan

LEFT, RIGHT, BETWEEN = 110, 24, 14  # margins, and the air between two stages
NARROW = 104  # the least width of a stage, for its text
TALL, TRACK = 104, 44  # a cell, and a row of bars
RISE = 24  # from one level of arcs to the next


@dataclass(frozen=True)
class Bow:
    """A crossing with its place: where it begins and ends, and on which level."""

    crossing: Crossing
    start: float
    stop: float
    level: int


def svg(partition: Partition, title: str = "", plan: Plan | None = None) -> str:
    """The picture as one document. The plan adds the ranks of each stage."""
    bands = _bands(partition)
    width = bands[-1][1] + RIGHT
    places = _places(partition, bands)
    bows = _bows(partition, places)
    top = 60.0 + RISE * (1 + max((bow.level for bow in bows), default=0)) + 12
    body = [*_header(partition, title, plan, width)]
    body += [_arc(bow, partition, plan, top, bows) for bow in bows]
    body += [_label(bow, top) for bow in bows]
    for cell, (left, right) in zip(partition.cells, places, strict=True):
        body += _cell(cell, left, right, top)
    y = top + TALL + 16
    body += _stages(partition, bands, plan, y)
    y += 16 * _lines(partition, plan) + 10
    if partition.timed:
        spent = [cell.seconds or 0.0 for cell in partition.cells]
        body += _track("seconds", [seconds(s) for s in spent], spent, partition, bands, places, y)
        y += TRACK + 16
    kept = [cell.activations for cell in partition.cells]
    body += _track("kept bytes", [size(n) for n in kept], kept, partition, bands, places, y)
    return page(width, y + TRACK + 16, title or "The partition of a model", body)


# --- where things lie ----------------------------------------------------------------------------


def _bands(partition: Partition) -> list[tuple[float, float]]:
    """Left and right of each stage: wide enough for its caption, and more with more cells."""
    depth = len(partition.stages)
    inner = max(1200 - LEFT - RIGHT - BETWEEN * (depth - 1), NARROW * depth)
    spare = inner - NARROW * depth
    found, x = [], float(LEFT)
    for stage in range(depth):
        wide = NARROW + spare * len(partition.of(stage)) / len(partition.cells)
        found.append((x, x + wide))
        x += wide + BETWEEN
    return found


def _places(partition: Partition, bands: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Left and right of each cell."""
    found = []
    for stage, (left, right) in enumerate(bands):
        count = len(partition.of(stage))
        each = (right - left) / max(count, 1)
        found += [(left + n * each, left + (n + 1) * each) for n in range(count)]
    return found


def _bows(partition: Partition, places: list[tuple[float, float]]) -> list[Bow]:
    """Every crossing on the lowest level where neither it nor its label touches a narrower one."""
    found: list[Bow] = []
    for c in sorted(partition.crossings, key=lambda c: c.target - c.source):
        start, stop = _along(places[c.source], 0.66), _along(places[c.target], 0.34)
        left, right = _extent(start, stop, c)
        below = [
            bow.level
            for bow in found
            if (other := _extent(bow.start, bow.stop, bow.crossing))
            and left < other[1]
            and other[0] < right
        ]
        found.append(Bow(c, start, stop, max(below, default=-1) + 1))
    return found


def _along(place: tuple[float, float], share: float) -> float:
    """A point of a cell: things leave it on its right and come in on its left."""
    return place[0] + share * (place[1] - place[0])


def _middle(left: float, right: float) -> float:
    return (left + right) / 2


def _wide(crossing: Crossing) -> float:
    """Width of the label of an arc."""
    return 6.8 * len(size(crossing.bytes)) + 8


def _extent(start: float, stop: float, crossing: Crossing) -> tuple[float, float]:
    middle, half = _middle(start, stop), _wide(crossing) / 2
    return min(start, middle - half), max(stop, middle + half)


# --- what is drawn -------------------------------------------------------------------------------


def _header(partition: Partition, title: str, plan: Plan | None, width: float) -> list[str]:
    blocks = sum(len(cell.blocks) for cell in partition.cells)
    sent = sum(c.bytes for c in partition.crossings)
    lines = f"{blocks} blocks · {len(partition.stages)} stages · {size(sent)} cross per micro-batch"
    drawn = [
        caption(20, 28, title or "The partition of a model", 17, INK, more=BOLD),
        caption(width - RIGHT, 28, lines, 13, SOFT, "end"),
    ]
    if plan and any(_stays(c, partition, plan) for c in partition.crossings):
        drawn.append(caption(width - RIGHT, 46, "dashed: stays on its rank", 11, SOFT, "end"))
    return drawn


def _stays(crossing: Crossing, partition: Partition, plan: Plan | None) -> bool:
    ends = partition.cells[crossing.source].stage, partition.cells[crossing.target].stage
    return plan is not None and stays_put(plan, *ends)


def _arc(bow: Bow, partition: Partition, plan: Plan | None, top: float, bows: list[Bow]) -> str:
    c, most = bow.crossing, max(b.crossing.bytes for b in bows) or 1
    source, target = partition.cells[c.source], partition.cells[c.target]
    tip = f"{', '.join(c.names)}: {size(c.bytes)} from stage {source.stage} to {target.stage}"
    dashes = 'stroke-dasharray="5 4"' if _stays(c, partition, plan) else ""
    thick = 1.2 + 2.8 * c.bytes / most
    return arc(bow.start, bow.stop, top - 3, _high(bow), _colour(source.stage), thick, tip, dashes)


def _high(bow: Bow) -> float:
    return RISE * (bow.level + 1) - (12 if _tight(bow) else 4)


def _tight(bow: Bow) -> bool:
    """Whether the label of an arc stands over it, because it would hide it."""
    return bow.stop - bow.start < _wide(bow.crossing) + 40


def _label(bow: Bow, top: float) -> str:
    halo = f'stroke="{PAPER}" stroke-width="5" paint-order="stroke"'
    x, y = _middle(bow.start, bow.stop), top - _high(bow) + (-8 if _tight(bow) else 1)
    return caption(x, y, size(bow.crossing.bytes), 11, INK, "middle", halo)


def _cell(cell: Cell, left: float, right: float, top: float) -> list[str]:
    fill = _colour(cell.stage)
    drawn = [box(left + 0.75, top, right - left - 1.5, TALL, fill, _tip(cell))]
    if right - left >= 12:
        ink = INK if fill in DARK else "#ffffff"
        x, y = _middle(left, right) + 4, top + TALL - 7
        turned = f'transform="rotate(-90 {x:.1f} {y:.1f})" class="on" pointer-events="none"'
        drawn.append(caption(x, y, _short(cell.name), 11, ink, more=turned))
    return drawn


def _tip(cell: Cell) -> str:
    parts = [cell.name, f"{len(cell.blocks)} blocks"] if len(cell.blocks) > 1 else [cell.name]
    parts += [seconds(cell.seconds)] if cell.seconds is not None else []
    return f"{' · '.join(parts)} · keeps {size(cell.activations)}"


def _short(name: str) -> str:
    """As much of a name as a cell holds; its end tells more than its beginning."""
    return name if len(name) <= 15 else f"…{name[-14:]}"


def _colour(stage: int) -> str:
    return STAGES[stage % len(STAGES)]


def _lines(partition: Partition, plan: Plan | None) -> int:
    return 3 + (plan is not None) + partition.timed


def _stages(
    partition: Partition, bands: list[tuple[float, float]], plan: Plan | None, top: float
) -> list[str]:
    drawn = []
    for stage, (left, right) in enumerate(bands):
        x = _middle(left, right)
        lines = [listed("rank", plan.replica_groups[stage])] if plan else []
        lines += [partition.spent(stage)] if partition.timed else []
        lines += [partition.kept(stage), f"weights {size(partition.stages[stage].weights)}"]
        drawn.append(caption(x, top, f"stage {stage}", 13, INK, "middle", BOLD))
        drawn += [
            caption(x, top + 16 * n, line, 11, SOFT, "middle") for n, line in enumerate(lines, 1)
        ]
    return drawn


def _track(
    name: str,
    lines: list[str],
    values: list[float],
    partition: Partition,
    bands: list[tuple[float, float]],
    places: list[tuple[float, float]],
    top: float,
) -> list[str]:
    """A bar for every cell, all to one scale."""
    most = max(values) or 1.0
    drawn = [
        caption(LEFT - 12, top + 16, name, 12, INK, "end"),
        caption(LEFT - 12, top + 32, f"most {lines[values.index(max(values))]}", 10, SOFT, "end"),
    ]
    drawn += [rect(left, top, right - left, TRACK, FLOOR) for left, right in bands]
    for cell, value, label, (left, right) in zip(
        partition.cells, values, lines, places, strict=True
    ):
        high = TRACK * value / most
        tip = f"{cell.name}: {label}"
        inner = right - left - 1.5
        drawn.append(box(left + 0.75, top + TRACK - high, inner, high, _colour(cell.stage), tip))
    return drawn
