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
    p, m, v = plan.ranks, plan.micro_batches, plan.depth // plan.ranks
    groups = _groups(m, p)
    rows = []
    for r in range(p):
        chunks = range(r, plan.depth, p)
        forward = [Action(Kind.FORWARD, s, i) for g in groups for s in chunks for i in g]
        backward = [Action(Kind.BACKWARD, s, i) for g in groups for s in chunks[::-1] for i in g]
        warm_up = min(2 * (p - r - 1) + (v - 1) * len(groups[0]), m * v)
        row = forward[:warm_up]
        for i in range(m * v - warm_up):
            row += [forward[warm_up + i], backward[i]]
        row += backward[m * v - warm_up :]
        rows.append(tuple(row))
    return Schedule(tuple(rows))


def _groups(m: int, p: int) -> list[range]:
    """As many groups of at least p as there can be, as even as can be, the largest first."""
    count = max(m // p, 1)
    size, larger = divmod(m, count)
    starts = [n * size + min(n, larger) for n in range(count + 1)]
    return [range(a, b) for a, b in pairwise(starts)]
