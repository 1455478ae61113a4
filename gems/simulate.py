"""Lay a schedule out in time: each rank runs its order, each action waits for what it needs."""

from __future__ import annotations

from collections.abc import Callable

from gems.costs import Costs
from gems.errors import ScheduleError
from gems.machine import Link
from gems.plan import Plan
from gems.schedule.core import Action, Fact, Kind, Message, Run, Schedule, gives, needs
from gems.timeline import Event, Timeline

Seconds = Callable[[int, Action], float]


def simulate(schedule: Schedule, plan: Plan, costs: Costs, link: Link | None = None) -> Timeline:
    """The timeline of a step if stages cost what `costs` says; links are free unless given."""
    costs = costs if link is None else costs.over(link)

    def seconds(rank: int, action: Action) -> float:
        if not action.computes:
            return 0.0
        return costs[action.stage].of(action.kind.value)

    def travel(message: Message) -> float:
        return costs.travel(message.source, message.target)

    return lay_out(schedule, plan, seconds, travel, "simulated")


def virtual(timeline: Timeline, schedule: Schedule, plan: Plan) -> Timeline:
    """The measured step as if every rank had a core of its own, from the CPU time of each action.

    It is repeatable on a busy machine, and lets more ranks be measured than there are cores.
    """
    cpu = {(e.rank, e.action): e.cpu for e in timeline.events}

    def seconds(rank: int, action: Action) -> float:
        return cpu.get((rank, str(action)), 0.0)

    laid = lay_out(schedule, plan, seconds, lambda message: 0.0, "virtual")
    return Timeline(laid.events, "virtual", (), timeline.peaks, timeline.stashes)


def lay_out(
    schedule: Schedule,
    plan: Plan,
    seconds: Seconds,
    travel: Callable[[Message], float],
    clock: str,
) -> Timeline:
    """Earliest start of every action in the given order; messages of one link queue up."""
    free = [0.0] * len(schedule.ranks)
    link_free: dict[tuple[int, int], float] = {}
    known: dict[Fact, float] = {}
    arrived: dict[Message, float] = {}
    events = []

    def when(action: Action, fact: Fact) -> float:
        """A fact of another rank holds when its message to this very stage is there, if any is."""
        message = Message(fact.what, fact.stage, action.stage, fact.micro_batch)
        return arrived.get(message, known.get(fact, 0.0))

    run = Run(schedule, plan)
    for rank, action in run:
        start = max((free[rank], *(when(action, fact) for fact in needs(action, plan))))
        stop = start + seconds(rank, action)
        free[rank] = stop
        for fact in gives(action):
            known[fact] = stop
        if action.way == ">":
            message = action.message
            other = plan.rank_for(action.peer, action.micro_batch)
            begin = max(stop, link_free.get((rank, other), 0.0))
            arrived[message] = link_free[rank, other] = begin + travel(message)
        if stop > start or action.kind is Kind.REDUCE:
            events.append(Event(rank, str(action), start, stop, stop - start))
    if stuck := run.stuck():
        rank, step, action, _ = stuck[0]
        raise ScheduleError(f"rank {rank}, step {step}: {action} can never run; check() says why")
    return Timeline(tuple(events), clock)
