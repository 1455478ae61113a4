"""A step as one page that needs nothing else: zoom it, point at it, and read what was going on.

The page is drawn by `page/page.js` in the browser; this writes the data it draws.
"""

from __future__ import annotations

import json
import re
from html import escape
from pathlib import Path
from typing import Any

from gems.draw.arrows import arrows
from gems.draw.compare import aligned, difference, names
from gems.draw.mark import Mark, entries, marks
from gems.draw.memory import peak_of
from gems.draw.shapes import FLOOR, INK, MEMORY, PAPER, SOFT
from gems.draw.table import report
from gems.draw.units import counts_units, heading, stages_of
from gems.plans.describe import headline
from gems.plans.plan import Plan
from gems.predict.timeline import KINDS, Timeline

PAGE = Path(__file__).parent / "page"
DIGITS = 9  # of seconds: a nanosecond

# Colours of an SVG that follow the page into the dark, unless they lie on a colour of their own.
FOLLOWING = (
    ("fill", PAPER, "--paper"),
    ("stroke", PAPER, "--paper"),
    ("fill", INK, "--ink"),
    ("fill", SOFT, "--soft"),
    ("fill", FLOOR, "--floor"),
)


def html(
    timeline: Timeline,
    title: str = "",
    plan: Plan | None = None,
    below: Timeline | None = None,
    partition: str = "",
    above: str = "",
) -> str:
    """The page. `below` is another step of the same plan; `partition` an SVG above the step,
    `above` any HTML."""
    sides = (timeline,) if below is None else aligned(timeline, below)
    parts = {
        "title": escape(title or "One step"),
        "about": escape(headline(plan) if plan else ""),
        "heading": escape(heading(timeline) if below is None else difference(timeline, below)),
        "style": _read("page.css") + (_following() if partition else ""),
        "partition": above + (f'<div class="partition">\n{partition}</div>' if partition else ""),
        "numbers": escape("\n".join(report(side) for side in (timeline, below) if side)),
        "data": _embedded(_data(sides, plan)),
        "script": _read("page.js"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _read("page.html"))


def _read(name: str) -> str:
    return (PAGE / name).read_text(encoding="utf-8")


def _following() -> str:
    return "".join(
        f'.partition :not(.on)[{what}="{colour}"] {{ {what}: var({name}); }}\n'
        for what, colour, name in FOLLOWING
    )


def _embedded(data: Any) -> str:
    """JSON that cannot end the script it stands in."""
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")


def _data(sides: tuple[Timeline, ...], plan: Plan | None) -> dict[str, Any]:
    found = [marks(side) for side in sides]
    every = [mark for side in found for mark in side]
    styles = list(dict.fromkeys(_style(mark) for mark in every))
    kinds = [k for k in KINDS if any(getattr(m, k) for s in sides for r in s.memory for _, m in r)]
    counted = [n for n, side in enumerate(sides) if any(side.memory)]
    ranks = range(sides[0].ranks)
    zero = min((mark.event.start for mark in every), default=0.0)
    return {
        "whole": all(map(counts_units, sides)),
        "names": names(sides[0], sides[1]) if len(sides) > 1 else [""],
        "ranks": [stages_of(plan, rank) if plan else "" for rank in ranks],
        "length": max(side.seconds for side in sides) or 1.0,
        "longest": max((mark.event.seconds for mark in every), default=0.0),
        "several": _several(every),
        "replicas": len({mark.action.replica for mark in every}) > 1,
        "legend": entries(every),
        "styles": styles,
        "kinds": [(kind, MEMORY[kind]) for kind in kinds],
        "charted": counted[-1] if counted else None,
        "lined": counted[0] if len(counted) > 1 else None,
        "most": max((_peak(sides[n], r) for n in counted for r in ranks), default=0),
        "sides": [
            _side(side, mine, styles, kinds, zero, plan)
            for side, mine in zip(sides, found, strict=True)
        ],
    }


def _style(mark: Mark) -> tuple[str, str, str, bool]:
    return (mark.name, mark.fill, mark.ink, mark.action.computes)


def _several(found: list[Mark]) -> bool:
    """Whether a rank computes more than one stage of a replica, so that boxes must name theirs."""
    pairs = {(m.event.rank, m.action.replica, m.action.stage) for m in found if m.action.computes}
    return len(pairs) > len({pair[:2] for pair in pairs})


def _peak(timeline: Timeline, rank: int) -> int:
    return max(m.total for m in (peak_of(timeline, rank), *(m for _, m in timeline.memory[rank])))


def _side(
    timeline: Timeline,
    found: list[Mark],
    styles: list[tuple[str, str, str, bool]],
    kinds: list[str],
    zero: float,
    plan: Plan | None,
) -> dict[str, Any]:
    number = {style: n for n, style in enumerate(styles)}
    order = sorted(range(len(found)), key=lambda n: (found[n].event.start, found[n].event.stop))
    events: list[list[Any]] = [[] for _ in range(timeline.ranks)]
    place: dict[int, tuple[int, int]] = {}
    for n in order:
        event = found[n].event
        place[n] = (event.rank, len(events[event.rank]))
        times = (round(t - zero, DIGITS) for t in (event.start, event.stop))
        events[event.rank].append([*times, number[_style(found[n])], event.action])
    return {
        "events": events,
        "memory": [
            [[round(t - zero, DIGITS), *(getattr(m, kind) for kind in kinds)] for t, m in row]
            for row in timeline.memory
        ],
        "peaks": [peak_of(timeline, rank).total for rank in range(len(timeline.memory))],
        "arrows": [[*place[a], *place[b]] for a, b in arrows(found, plan)],
    }
