"""Offload what forward saves for backward, where there is time for it.

    F0  S0  F1  S1  F2  S2  ...  L0  B7  B0
        └ copied ┘                 └ copied ┘      while the rank computes

A store follows the forward's messages, for which others wait. It is in flight during one compute
action: before the second, or at the next S or L, the rank waits for it and frees the memory. So one
is in flight at a time. A load begins one compute action before its result is read, as unshards do.

[Note: too near to offload] Between F and the action that reads its activations there must be three
compute actions: one during which they are stored, one during which they are loaded, and one that
has the memory. Nearer ones would be copied for nothing, and are not offloaded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from gems.plans.plan import Plan
from gems.schedule.action import Action, Kind, Schedule

BETWEEN = 3  # [Note: too near to offload]
READS = (Kind.RECOMPUTE, Kind.BACKWARD, Kind.INPUT)


def offload(schedule: Schedule, plan: Plan) -> Schedule:
    """Store what waits long enough for its backward, if the plan offloads activations."""
    if not plan.activations[0].offload or any(a.kind is Kind.STORE for _, a in schedule):
        return schedule
    return Schedule(tuple(_stored(row, plan) for row in schedule.ranks))


def _stored(row: Sequence[Action], plan: Plan) -> tuple[Action, ...]:
    """One rank's actions, with S and L."""
    works = [at for at, action in enumerate(row) if action.computes]
    begun: dict[tuple[int, int, int], int] = {}  # the number of the forward among them
    before, after = defaultdict(list), defaultdict(list)
    for number, at in enumerate(works):
        action = row[at]
        key = action.unit
        if action.kind is Kind.FORWARD:
            begun[key] = number
        elif action.kind in READS and key in begun:
            forward = begun.pop(key)  # of R and B, the first
            if number - forward > BETWEEN and _saves(*key[:2], plan):
                after[_sent(row, works[forward])].append(replace(action, kind=Kind.STORE))
                before[works[number - 1]].append(replace(action, kind=Kind.LOAD))
    return tuple(a for at, b in enumerate(row) for a in (*before[at], b, *after[at]))


def _saves(stage: int, micro_batch: int, plan: Plan) -> bool:
    """Whether anything is saved: what is recomputed from the model's own inputs saves nothing."""
    again = plan.recomputes(stage, micro_batch) or bool(plan.activations[stage].patches)
    return not again or bool(plan.sources[stage])


def _sent(row: Sequence[Action], forward: int) -> int:
    """Where the last message of a forward is, or the forward itself."""
    at, last = forward + 1, forward
    while at < len(row) and not row[at].computes:
        if row[at].way == ">" and row[at].unit == row[forward].unit:
            last = at
        at += 1
    return last
