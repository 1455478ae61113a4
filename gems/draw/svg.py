"""A step as a picture: one lane per rank, its actions over time, and below it the live bytes.

title                                    step 27 units · bubble 11.1% · simulated clock
rank 0  [F0][F1]    [B0]...              compute: big boxes, pale in the second replica
         -  - == -                       messages and sums of gradients: thin, underneath
        0     5     10                   time
rank 0  ▁▂▃▃▂▁                           live bytes by kind, peak labelled

With a second step to set it over, every lane has two rows, and a line has their difference.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import floor, log10

from gems.draw.compare import aligned, difference, names
from gems.draw.mark import Mark, entries, marks
from gems.draw.memory import Across, charts
from gems.draw.shapes import BOLD, FLOOR, INK, SOFT, box, caption, legend, line, page, rect
from gems.draw.units import counts_units, heading, scale, stages_of
from gems.plans.describe import headline
from gems.plans.plan import Plan
from gems.predict.timeline import Timeline
from gems.schedule.action import Action

WIDTH, LEFT, RIGHT = 1200, 110, 24
THIN, GAP = 5, 12  # the row of messages under the boxes, and the air between two lanes


@dataclass(frozen=True)
class Lanes:
    """Where rows lie: one per rank, or for two steps two of them close together."""

    ranks: int
    sides: int

    @property
    def top(self) -> float:
        return 66 if self.sides == 1 else 88

    @property
    def bar(self) -> float:
        return 27 if self.sides == 1 else 20

    @property
    def pitch(self) -> float:
        return self.sides * (self.bar + THIN) + (GAP if self.sides == 1 else 2 * GAP)

    @property
    def bottom(self) -> float:
        return self.top + self.pitch * self.ranks

    def row(self, rank: int, side: int = 0) -> float:
        return self.top + self.pitch * rank + side * (self.bar + THIN + 4)


def svg(
    timeline: Timeline, title: str = "", plan: Plan | None = None, below: Timeline | None = None
) -> str:
    """The picture as one self-contained document. With its plan, lanes also name their stages.

    `below` is another timeline of the same plan, drawn under this one lane by lane.
    """
    sides = (timeline,) if below is None else aligned(timeline, below)
    length = max(side.seconds for side in sides) or 1.0
    zero = min((e.start for side in sides for e in side.events), default=0.0)
    per_second = (WIDTH - LEFT - RIGHT) / length

    def across(t: float) -> float:
        return LEFT + (t - zero) * per_second

    lanes = Lanes(timeline.ranks, len(sides))
    whole = all(map(counts_units, sides))
    found = [marks(side) for side in sides]
    body = _header(timeline, title, plan, below)
    body += legend(20, 50, entries([mark for side in found for mark in side]))
    body += _floors(lanes)
    body += _stages(lanes, plan) if below is None else _sides(lanes, names(timeline, below))
    body += _axis(length, whole, lanes)
    for side, drawn in enumerate(found):
        body += _boxes(drawn, across, whole, lanes, side)
    height = lanes.bottom + 34.0
    counted = [side for side in sides if any(side.memory)]
    if counted:
        drawn, height = charts(counted, across, LEFT, WIDTH - RIGHT, height + 22)
        body += drawn
    return page(WIDTH, height, title or heading(timeline), body)


def _header(timeline: Timeline, title: str, plan: Plan | None, below: Timeline | None) -> list[str]:
    known = headline(plan) if plan else ""
    drawn = [caption(20, 28, title or known or "One step", 17, INK, more=BOLD)]
    if below is None:
        drawn.append(caption(WIDTH - RIGHT, 28, heading(timeline), 13, SOFT, "end"))
    else:
        drawn.append(caption(20, 72, difference(timeline, below), 12, INK))
    if title and plan:
        drawn.append(caption(WIDTH - RIGHT, 48, known, 11, SOFT, "end"))
    return drawn


def _floors(lanes: Lanes) -> list[str]:
    rows = [lanes.row(rank, side) for rank in range(lanes.ranks) for side in range(lanes.sides)]
    return [rect(LEFT, top, WIDTH - LEFT - RIGHT, lanes.bar, FLOOR) for top in rows]


def _stages(lanes: Lanes, plan: Plan | None) -> list[str]:
    """The names of the lanes, and of the stages that each has."""
    drawn = []
    for rank in range(lanes.ranks):
        top = lanes.row(rank)
        drawn.append(caption(LEFT - 12, top + (12 if plan else 18), f"rank {rank}", 12, INK, "end"))
        if plan:
            drawn.append(caption(LEFT - 12, top + 26, stages_of(plan, rank), 10, SOFT, "end"))
    return drawn


def _sides(lanes: Lanes, called: tuple[str, str]) -> list[str]:
    """The names of the lanes, and of the two steps in each."""
    drawn = []
    for rank in range(lanes.ranks):
        drawn.append(caption(20, lanes.row(rank) + 14, f"{rank}", 13, INK, more=BOLD))
        for side, name in enumerate(called):
            drawn.append(caption(LEFT - 12, lanes.row(rank, side) + 14, name, 11, SOFT, "end"))
    return drawn


def _boxes(found: list[Mark], across: Across, whole: bool, lanes: Lanes, side: int) -> list[str]:
    drawn = []
    for mark in sorted(found, key=lambda mark: mark.action.computes):
        event, top = mark.event, lanes.row(mark.event.rank, side)
        left, width = across(event.start), across(event.stop) - across(event.start)
        tip = mark.tip(whole)
        if not mark.action.computes:
            drawn.append(box(left, top + lanes.bar + 2, max(width, 1.5), THIN, mark.fill, tip))
            continue
        gap = min(0.8, width / 4)
        drawn.append(box(left + gap / 2, top, width - gap, lanes.bar, mark.fill, tip))
        if label := _fitting(mark.action, width):
            base = top + lanes.bar / 2 + 4.5
            more = 'pointer-events="none"'
            drawn.append(caption(left + width / 2, base, label, 12, mark.ink, "middle", more))
    return drawn


def _fitting(action: Action, width: float) -> str:
    """The micro-batch, with the letter if the box is wide, or nothing."""
    number = str(action.micro_batch)
    for label in (f"{action.kind.value}{number}", number):
        if width >= 7.4 * len(label) + 2:
            return label
    return ""


def _axis(length: float, whole: bool, lanes: Lanes) -> list[str]:
    size, name = scale(length, whole)
    step = _tick(length / size, whole)
    drawn, ticks = [], floor(length / size / step + 1e-9)
    for n in range(ticks + 1):
        x = LEFT + n * step * size / length * (WIDTH - LEFT - RIGHT)
        drawn.append(line(x, lanes.top - 4, x, lanes.bottom))
        label = f"{n * step:g}" + (f" {name}" if n == 0 else "")
        drawn.append(caption(x, lanes.bottom + 14, label, 11, SOFT, "middle"))
    return drawn


def _tick(length: float, whole: bool) -> float:
    """1, 2 or 5 times a power of ten, so that there are five to a dozen ticks."""
    power = 10.0 ** floor(log10(length / 10))
    step = next(n * power for n in (1, 2, 5, 10) if length / (n * power) <= 12)
    return max(step, 1.0) if whole else step
