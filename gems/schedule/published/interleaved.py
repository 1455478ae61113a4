"""Interleaved 1F1B: rank r has v chunks, r, r + p, r + 2p ...; bubble (p - 1) / (v m + p - 1).

Micro-batches advance in groups: a rank takes a group through its first chunk, then through its
second, and so on; backward visits the chunks in reverse. Published for groups of exactly p; any
group of p or more comes round in time for the next chunk, so m need not be a multiple of p.
"""

from __future__ import annotations

from itertools import pairwise

from gems.plans.plan import Plan
from gems.schedule.action import Action, Kind, Schedule


def order(plan: Plan) -> Schedule:
    p = len(plan.stages_in_copy)
    groups = _groups(plan.micro_batches_in_copy, p)
    rows = []
    for r, chunks in enumerate(plan.stages_in_copy):
        forward = [Action(Kind.FORWARD, s, i) for g in groups for s in chunks for i in g]
        backward = [Action(Kind.BACKWARD, s, i) for g in groups for s in chunks[::-1] for i in g]
        warm_up = 2 * (p - r - 1) + (len(chunks) - 1) * len(groups[0])
        row, steady = forward[:warm_up], forward[warm_up:]
        for pair in zip(steady, backward, strict=False):
            row += pair
        rows.append((*row, *backward[len(steady) :]))
    return Schedule(tuple(rows))


def _groups(samples: range, p: int) -> list[range]:
    """As many groups of at least p as there can be, as even as can be, the largest first."""
    count = max(len(samples) // p, 1)
    size, larger = divmod(len(samples), count)
    starts = [n * size + min(n, larger) for n in range(count + 1)]
    return [samples[a:b] for a, b in pairwise(starts)]
