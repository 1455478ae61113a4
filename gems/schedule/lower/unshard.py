"""Insert unshard and reshard of weights that are sharded (zero=3) or offloaded."""

from __future__ import annotations

from collections import Counter, defaultdict

from gems.plans.plan import Plan
from gems.schedule.action import Action, Kind, Schedule


def unshard(schedule: Schedule, plan: Plan, more: int = 1) -> Schedule:
    """With zero=3 or offloaded weights, unshard a stage's weights for each run of its actions, and
    reshard them after it.

    A run ends where a rank of the stage goes on to another stage. Unsharding begins one compute
    action early, and overlaps with it: at most two stages are whole at once.
    """
    residency = plan.residency_over(more)
    shared = {s for s, state in enumerate(residency) if state.unsharded_on_demand}
    if not shared:
        return schedule
    common = _starts(schedule, shared)
    rows = []
    for row in schedule.ranks:
        starts = common if residency[0].shards_weights else _starts(Schedule((row,)), shared)
        count, before, after = Counter(), defaultdict(list), defaultdict(list)
        last: tuple[int, int] = (-1, -1)  # where the compute action before was, and its stage
        latest: dict[int, int] = {}
        for at, action in enumerate(row):
            if not action.computes:
                continue
            s = action.stage
            if s in shared:
                if count[s] in starts[s]:
                    if s in latest:
                        after[latest[s]].append(Action(Kind.RESHARD, s))
                    early = last[0] if last[0] >= 0 and last[1] != s else at
                    before[early].append(Action(Kind.UNSHARD, s))
                count[s] += 1
                latest[s] = at
            last = (at, s)
        for s, at in latest.items():
            after[at].append(Action(Kind.RESHARD, s))
        rows.append(tuple(a for at, b in enumerate(row) for a in (*before[at], b, *after[at])))
    return Schedule(tuple(rows))


def _starts(schedule: Schedule, shared: set[int]) -> dict[int, set[int]]:
    """For each stage the numbers of its actions, counted on any rank of its group, that begin a
    run: where some rank ran two other actions before. All of them must unshard as often. (With one
    other action, weights would be unsharded again as soon as they were resharded.)"""
    found: dict[int, set[int]] = {s: {0} for s in shared}
    for row in schedule.ranks:
        count, last = Counter(), {}
        for at, action in enumerate(a for a in row if a.computes):
            s = action.stage
            if s in shared:
                if at - last.get(s, at) > 2:
                    found[s].add(count[s])
                count[s] += 1
                last[s] = at
    return found
