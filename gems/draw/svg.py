"""A step as a picture: one lane per rank, its actions over time, and below it the live bytes.

title                                    step 27 units · bubble 11.1% · simulated clock
rank 0  [F0][F1]    [B0]...              compute: big boxes, pale in the second replica
         -  - == -                       messages and sums of gradients: thin, underneath
        0     5     10                   time
rank 0  ▁▂▃▃▂▁                           live bytes by kind, peak labelled
"""

from __future__ import annotations

from math import floor, log10

from gems.draw.memory import Across, charts
from gems.draw.shapes import ACTIONS, FLOOR, INK, SOFT, box, legend, line, page, rect, words
from gems.draw.units import counts_units, heading, scale, seconds
from gems.plan import Plan
from gems.schedule.core import Action
from gems.timeline import Event, Timeline

WIDTH, LEFT, RIGHT, TOP = 1200, 110, 24, 66
LANE, BAR, THIN = 44, 27, 5  # a lane's pitch, its boxes, and the strip of messages under them


def svg(timeline: Timeline, title: str = "", plan: Plan | None = None) -> str:
    """The picture as one self-contained document. With its plan, lanes also name their stages."""
    length = timeline.seconds or 1.0
    zero = min((e.start for e in timeline.events), default=0.0)
    per_second = (WIDTH - LEFT - RIGHT) / length

    def across(t: float) -> float:
        return LEFT + (t - zero) * per_second

    bottom = TOP + LANE * timeline.ranks
    whole = counts_units(timeline)
    body = [*_header(timeline, title, plan), *_lanes(timeline, plan)]
    body += _axis(length, whole, bottom)
    body += _boxes(timeline, across, whole)
    height = bottom + 34.0
    if any(timeline.memory):
        drawn, height = charts(timeline, across, LEFT, WIDTH - RIGHT, height + 22)
        body += drawn
    return page(WIDTH, height, title or heading(timeline), body)


def _header(timeline: Timeline, title: str, plan: Plan | None) -> list[str]:
    bold = 'font-weight="600"'
    said = title or (_described(plan) if plan else "One step")
    drawn = [
        words(20, 28, said, 17, INK, more=bold),
        words(WIDTH - RIGHT, 28, heading(timeline), 13, SOFT, "end"),
    ]
    if title and plan:
        drawn.append(words(WIDTH - RIGHT, 48, _described(plan), 11, SOFT, "end"))
    return [*drawn, *legend(20, 50, _entries(timeline))]


def _described(plan: Plan) -> str:
    parts = [plan.schedule, f"{plan.depth} stages", f"{plan.micro_batches} micro-batches"]
    return " · ".join(parts + ([f"{plan.data} copies"] if plan.data > 1 else []))


def _entries(timeline: Timeline) -> list[tuple[str, str]]:
    """The legend of what is there to see, and no more."""
    actions = [(e.rank, e.parsed()) for e in timeline.events]
    seen = {_key(action) for _, action in actions}
    entries = [(first, name) for key, (name, first, _) in ACTIONS.items() if key in seen]
    return entries + ([(ACTIONS["F"][2], "paler: replica 1")] if _pale(actions) else [])


def _key(action: Action) -> str:
    return ">" if action.way else action.kind.value


def _pale(actions: list[tuple[int, Action]]) -> set[tuple[int, int]]:
    """The replicas that are not the first on their rank, as (rank, replica)."""
    found = {(rank, a.replica) for rank, a in actions if a.computes}
    first = {rank: min(p for r, p in found if r == rank) for rank, _ in found}
    return {(rank, replica) for rank, replica in found if replica != first[rank]}


def _lanes(timeline: Timeline, plan: Plan | None) -> list[str]:
    drawn = []
    for rank in range(timeline.ranks):
        top = TOP + LANE * rank
        drawn.append(rect(LEFT, top, WIDTH - LEFT - RIGHT, BAR, FLOOR))
        drawn.append(words(LEFT - 12, top + (12 if plan else 18), f"rank {rank}", 12, INK, "end"))
        if plan:
            stages = ", ".join(map(str, plan.stages_on[rank]))
            plural = "stages" if len(plan.stages_on[rank]) > 1 else "stage"
            drawn.append(words(LEFT - 12, top + 26, f"{plural} {stages}", 10, SOFT, "end"))
    return drawn


def _boxes(timeline: Timeline, across: Across, whole: bool) -> list[str]:
    pairs: list[tuple[Event, Action]] = [(e, e.parsed()) for e in timeline.events]
    pale = _pale([(e.rank, a) for e, a in pairs])
    drawn = []
    for event, action in sorted(pairs, key=lambda pair: pair[1].computes):
        _, first, second = ACTIONS[_key(action)]
        light = (event.rank, action.replica) in pale
        top = TOP + LANE * event.rank
        left, width = across(event.start), across(event.stop) - across(event.start)
        tip = f"{action} on rank {event.rank}: {seconds(event.seconds, whole)}"
        tip += f", from {seconds(event.start, whole)}" if event.start else ", from the start"
        fill = second if light or action.way == "<" else first
        if not action.computes:
            drawn.append(box(left, top + BAR + 2, max(width, 1.5), THIN, fill, tip))
            continue
        gap = min(0.8, width / 4)
        drawn.append(box(left + gap / 2, top, width - gap, BAR, fill, tip))
        if said := _fitting(action, width):
            colour = INK if light else "#ffffff"
            more = 'pointer-events="none"'
            drawn.append(words(left + width / 2, top + 18, said, 12, colour, "middle", more))
    return drawn


def _fitting(action: Action, width: float) -> str:
    """The micro-batch, with the letter if the box is wide, or nothing."""
    number = str(action.micro_batch)
    for said in (f"{action.kind.value}{number}", number):
        if width >= 7.4 * len(said) + 2:
            return said
    return ""


def _axis(length: float, whole: bool, bottom: float) -> list[str]:
    size, name = scale(length, whole)
    step = _tick(length / size, whole)
    drawn, ticks = [], floor(length / size / step + 1e-9)
    for n in range(ticks + 1):
        x = LEFT + n * step * size / length * (WIDTH - LEFT - RIGHT)
        drawn.append(line(x, TOP - 4, x, bottom))
        label = f"{n * step:g}" + (f" {name}" if n == 0 else "")
        drawn.append(words(x, bottom + 14, label, 11, SOFT, "middle"))
    return drawn


def _tick(length: float, whole: bool) -> float:
    """1, 2 or 5 times a power of ten, so that there are five to a dozen ticks."""
    power = 10.0 ** floor(log10(length / 10))
    step = next(n * power for n in (1, 2, 5, 10) if length / (n * power) <= 12)
    return max(step, 1.0) if whole else step
