"""A step as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open.

One process per rank, with a thread for compute, one for messages and sums of gradients, and one for
offloaded memory; a counter of live bytes by kind, and arrows from a send to the work that it
feeds.
"""

from __future__ import annotations

import json
from typing import Any

from gems.draw.arrows import arrows
from gems.draw.compare import aligned, difference, names
from gems.draw.mark import Mark, marks
from gems.draw.units import heading, stages_of
from gems.plans.plan import Plan
from gems.predict.timeline import KINDS, Timeline
from gems.schedule.action import Kind

COMPUTE, MESSAGES, AWAY = 0, 1, 2  # threads
LANES = ("compute", "messages", "offload")
MICRO = 1e6  # the format counts microseconds; a unit of unit costs is shown as a second

Entry = dict[str, Any]


def chrome(
    timeline: Timeline, title: str = "", plan: Plan | None = None, below: Timeline | None = None
) -> str:
    """The trace as JSON. With another step of the plan `below`, a rank is two processes."""
    sides = (timeline,) if below is None else aligned(timeline, below)
    called = ("",) if below is None else tuple(f" {name}" for name in names(timeline, below))
    entries = []
    for n, (side, name) in enumerate(zip(sides, called, strict=True)):
        pids = [rank * len(sides) + n for rank in range(side.ranks)]
        found = marks(side)
        lanes = LANES if any(_thread(mark) == AWAY for mark in found) else LANES[:AWAY]
        entries += _named(pids, name, plan, lanes)
        entries += [_slice(mark, pids) for mark in found]
        entries += _counters(side, pids)
        entries += _flows(found, pids, plan, first=len(entries))
    summary = heading(timeline) if below is None else difference(timeline, below)
    about = {"title": title, "step": summary}
    return json.dumps(
        {"traceEvents": entries, "displayTimeUnit": "ms", "otherData": about},
        separators=(",", ":"),
    )


def _named(pids: list[int], name: str, plan: Plan | None, lanes: tuple[str, ...]) -> list[Entry]:
    entries = []
    for rank, pid in enumerate(pids):
        called = f"rank {rank}{name}" + (f" · {stages_of(plan, rank)}" if plan else "")
        about = [
            ("process_name", 0, {"name": called}),
            ("process_sort_index", 0, {"sort_index": pid}),
        ]
        for thread, lane in enumerate(lanes):
            about.append(("thread_name", thread, {"name": lane}))
            about.append(("thread_sort_index", thread, {"sort_index": thread}))
        entries += [
            {"ph": "M", "name": what, "pid": pid, "tid": thread, "args": args}
            for what, thread, args in about
        ]
    return entries


def _place(mark: Mark, pids: list[int]) -> Entry:
    return {"pid": pids[mark.event.rank], "tid": _thread(mark)}


def _thread(mark: Mark) -> int:
    if mark.action.kind in (Kind.STORE, Kind.LOAD):
        return AWAY
    return COMPUTE if mark.action.computes else MESSAGES


def _slice(mark: Mark, pids: list[int]) -> Entry:
    event, action = mark.event, mark.action
    about = {"stage": action.stage, "micro-batch": action.micro_batch, "replica": action.replica}
    return {
        "ph": "X",
        "name": event.action,
        "cat": mark.name,
        "ts": event.start * MICRO,
        "dur": event.seconds * MICRO,
        **_place(mark, pids),
        "args": {**about, "cpu ms": event.cpu * 1e3},
    }


def _counters(timeline: Timeline, pids: list[int]) -> list[Entry]:
    seen = [k for k in KINDS if any(getattr(m, k) for row in timeline.memory for _, m in row)]
    return [
        {
            "ph": "C",
            "name": "live bytes",
            "pid": pids[rank],
            "ts": max(t, 0.0) * MICRO,
            "args": {kind: getattr(memory, kind) for kind in seen},
        }
        for rank, row in enumerate(timeline.memory)
        for t, memory in row
    ]


def _flows(found: list[Mark], pids: list[int], plan: Plan | None, first: int) -> list[Entry]:
    """An arrow begins inside the slice that gives and ends at the start of the one that takes."""
    entries = []
    for n, (giver, taker) in enumerate(arrows(found, plan), first):
        one, other = found[giver], found[taker]
        same = {"name": "message", "cat": "message", "id": n}
        left = (one.event.start + one.event.stop) / 2
        entries.append({"ph": "s", **same, **_place(one, pids), "ts": left * MICRO})
        right = {"ph": "f", "bp": "e", **same, **_place(other, pids)}
        entries.append({**right, "ts": other.event.start * MICRO})
    return entries
