"""Lay a schedule out in time: each rank runs its order, each action waits for what it needs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from gems.costs import Costs
from gems.errors import ScheduleError
from gems.machine import Link, Machine
from gems.plan import Plan
from gems.schedule.core import Action, Fact, Kind, Message, Run, Schedule, gives, needs
from gems.timeline import Event, Timeline

Seconds = Callable[[int, Action], float]
Travel = Callable[[Message, tuple[int, int]], float]


def simulate(
    schedule: Schedule, plan: Plan, costs: Costs, over: Link | Machine | None = None
) -> Timeline:
    """The timeline of a step if stages cost what `costs` says.

    Messages go over one link, or over those of a machine; without either, as `costs` says.
    """

    def seconds(rank: int, action: Action) -> float:
        if not action.computes:
            return 0.0
        return costs[action.stage].of(action.kind.value)

    def travel(message: Message, ranks: tuple[int, int]) -> float:
        if over is None:
            return costs.travel(message.source, message.target)
        link = over.link_of(*ranks) if isinstance(over, Machine) else over
        return link.seconds(costs.bytes_between(message.source, message.target))

    return lay_out(schedule, plan, seconds, travel, "simulated")


def virtual(timeline: Timeline, schedule: Schedule, plan: Plan) -> Timeline:
    """The measured step as if every rank had a core of its own, from the CPU time of each action.

    It is repeatable on a busy machine, and lets more ranks be measured than there are cores.
    """
    cpu = {(e.rank, e.action): e.cpu for e in timeline.events}

    def seconds(rank: int, action: Action) -> float:
        return cpu.get((rank, str(action)), 0.0)

    laid = lay_out(schedule, plan, seconds, lambda message, ranks: 0.0, "virtual")
    return Timeline(laid.events, "virtual", (), timeline.peaks, timeline.stashes)


def lay_out(
    schedule: Schedule,
    plan: Plan,
    seconds: Seconds,
    travel: Travel,
    clock: str,
) -> Timeline:
    """Earliest start of every action in the given order; messages of one link queue up.

    A team begins together, when all its ranks are free and have what they need.
    """
    times = _Times(plan, travel)
    events = []
    run = Run(schedule, plan)
    for team, action in run.turns():
        start = max(times.ready(rank, action) for rank in team)
        for rank in team:
            stop = start + seconds(rank, action)
            times.done(rank, action, stop)
            if stop > start or action.kind is Kind.REDUCE:
                events.append(Event(rank, str(action), start, stop, stop - start))
    if stuck := run.stuck():
        rank, step, action, _ = stuck[0]
        raise ScheduleError(f"rank {rank}, step {step}: {action} can never run; check() says why")
    return Timeline(tuple(events), clock)


class _Times:
    """When ranks and links are free, and since when each rank knows what."""

    def __init__(self, plan: Plan, travel: Travel) -> None:
        self.plan, self.travel = plan, travel
        self.free: dict[int, float] = defaultdict(float)
        self.link_free: dict[tuple[int, int], float] = defaultdict(float)
        self.known: dict[tuple[int, Fact], float] = {}
        self.arrived: dict[tuple[tuple[int, int], Message], float] = {}

    def ready(self, rank: int, action: Action) -> float:
        """When a rank is free and has all that an action needs."""
        arrivals = (self._arrival(rank, action, fact) for fact in needs(action, self.plan))
        return max((self.free[rank], *arrivals))

    def _arrival(self, rank: int, action: Action, fact: Fact) -> float:
        """A part of another rank holds when its message to this very stage is there, if any is."""
        if fact.stage == action.stage:
            return self.known[rank, fact]
        message = Message(fact.what, fact.stage, action.stage, fact.micro_batch)
        team = self.plan.team_for(fact.stage, fact.micro_batch)
        return max(self.arrived.get(((r, rank), message), self.known[r, fact]) for r in team)

    def done(self, rank: int, action: Action, stop: float) -> None:
        self.free[rank] = stop
        for fact in gives(action):
            self.known[rank, fact] = stop
        if action.way == ">":
            message = action.message
            others = (r for r in self.plan.team_for(action.peer, action.micro_batch) if r != rank)
            for link in ((rank, other) for other in others):
                self.link_free[link] = max(stop, self.link_free[link]) + self.travel(message, link)
                self.arrived[link, message] = self.link_free[link]
