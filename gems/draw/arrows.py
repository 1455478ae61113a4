"""Which event feeds which on another rank: what an arrow of a picture joins."""

from __future__ import annotations

from collections import defaultdict

from gems.draw.mark import Mark
from gems.plans.plan import Plan
from gems.schedule.action import Kind
from gems.schedule.dependencies import Result, dependencies, results


def arrows(found: list[Mark], plan: Plan | None = None) -> list[tuple[int, int]]:
    """(from, to), as positions in `found`: from a send, if it was seen, to the work it feeds.

    Without the plan, the edges between stages are those over which something was seen to be sent.
    """
    plan = plan or _seen(found)
    givers: dict[tuple[Result, int | None], list[int]] = defaultdict(list)
    for n, action in enumerate(mark.action for mark in found):
        if action.way == ">":
            message = action.message
            fact = Result(message.what, message.source, message.micro_batch, message.part)
            givers[fact, message.target].append(n)
        for fact in results(action):
            givers[fact, None].append(n)
    joined = []
    for n, action in enumerate(mark.action for mark in found):
        wanted = [
            f for f in dependencies(action, plan) if f.stage != action.stage and action.computes
        ]
        for fact in wanted:
            able = [*givers[fact, None], *givers[fact, action.stage]]
            joined += [(m, n) for m in _last(found, able, n)]
    return joined


def _seen(found: list[Mark]) -> Plan:
    """A plan with the stages of these events, and the edges that they sent over."""
    actions = [mark.action for mark in found]
    sent = [a for a in actions if a.way == ">" and a.kind is Kind.FORWARD]
    depth = 1 + max((max(a.stage, a.peer) for a in actions), default=0)
    return Plan(stages=depth, edges=tuple(sorted({(a.stage, a.peer) for a in sent})))


def _last(found: list[Mark], able: list[int], taker: int) -> list[int]:
    """Of each other rank the last that is able to give: the send rather than the work before."""
    here = found[taker].event.rank
    last = {found[n].event.rank: n for n in able if found[n].event.rank != here}
    return list(last.values())
