"""Put away what micro-batches keep for backward: a pass over what ranks do.

    F0  S0  F1  S1  F2  S2  ...  L0  B7  B0
        └ travels ┘                └ travels ┘      while the rank computes

Stores follow the forward's messages, which others wait for. A store has one compute action to
travel: before the next after that, or at the next S or L, the rank waits until it is through, and
lets go of the memory. So one is under way at a time. Loads are asked for one compute action before
what they are for, as gathers of weights are.

[Note: near enough to stay] Between F and what reads its stash there must be three compute actions:
one during which it leaves, one during which it returns, and one that has the memory. Nearer ones
would travel for nothing, and stay.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gems.plans.plan import Plan
from gems.schedule.action import Action, Kind, Schedule

BETWEEN = 3  # [Note: near enough to stay]
READS = (Kind.RECOMPUTE, Kind.BACKWARD, Kind.INPUT)


def offload(schedule: Schedule, plan: Plan) -> Schedule:
    """Store what waits long enough for its backward, if the plan puts the stash away."""
    if not plan.offloaded_to("activations") or any(a.kind is Kind.STORE for _, a in schedule):
        return schedule
    return Schedule(tuple(_stored(row, plan) for row in schedule.ranks))


@dataclass
class Storing:
    """A store under way on one rank."""

    stage: int
    micro_batch: int
    begun: bool = False

    def travels(self) -> bool:
        """A compute action begins: whether it is the first since, so that the store may go on."""
        first, self.begun = not self.begun, True
        return first


def _stored(row: Sequence[Action], plan: Plan) -> tuple[Action, ...]:
    """One rank's actions, with S and L."""
    works = [at for at, action in enumerate(row) if action.computes]
    begun: dict[tuple[int, int], int] = {}  # the number of the forward among them
    before, after = defaultdict(list), defaultdict(list)
    for number, at in enumerate(works):
        action = row[at]
        key = action.stage, action.micro_batch
        if action.kind is Kind.FORWARD:
            begun[key] = number
        elif action.kind in READS and key in begun:
            forward = begun.pop(key)  # of R and B, the first
            if number - forward > BETWEEN and _keeps(*key, plan):
                after[_sent(row, works[forward])].append(replace(action, kind=Kind.STORE))
                before[works[number - 1]].append(replace(action, kind=Kind.LOAD))
    return tuple(a for at, b in enumerate(row) for a in (*before[at], b, *after[at]))


def _keeps(stage: int, micro_batch: int, plan: Plan) -> bool:
    """Whether there is anything: what runs again from the model's own inputs keeps nothing."""
    again = plan.recomputes(stage, micro_batch) or bool(plan.streams[stage])
    return not again or bool(plan.sources[stage])


def _sent(row: Sequence[Action], forward: int) -> int:
    """Where the last message of a forward is, or the forward itself."""
    at, last = forward + 1, forward
    stage, micro_batch = row[forward].stage, row[forward].micro_batch
    while at < len(row) and not row[at].computes:
        if row[at].way == ">" and (row[at].stage, row[at].micro_batch) == (stage, micro_batch):
            last = at
        at += 1
    return last
