"""Lay a schedule out in time: each rank runs its order, each action waits for what it needs.

A rank computes, each link carries one message after the other, and a rank's sums of gradients
queue beside both: three kinds of lanes that work at the same time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from graphlib import TopologicalSorter
from itertools import pairwise

from gems.costs import Costs
from gems.errors import ScheduleError
from gems.live import live
from gems.machine import Link, Machine
from gems.plans import Plan
from gems.schedule.core import Action, Fact, Kind, Message, Run, Schedule, gives, needs
from gems.timeline import Event, Timeline

Seconds = Callable[[int, Action], float]
Travel = Callable[[Message, tuple[int, int]], float]


def simulate(
    schedule: Schedule,
    plan: Plan,
    costs: Costs,
    over: Link | Machine | None = None,
    state: float = 2.0,
    copies: int = 1,
) -> Timeline:
    """The timeline of a step if stages cost what `costs` says, with live bytes over time.

    Messages and sums go over one link, or over those of a machine; without either, messages take
    what `costs` says and sums nothing. `state` is the optimizer's, in units of the gradients. The
    plan may stand for so many `copies` of it on further ranks: their steps are the same, but sums
    go over all of them.
    """

    def seconds(rank: int, action: Action) -> float:
        if not action.computes:
            return 0.0
        return costs[action.stage].of(action.kind.value)

    def travel(message: Message, ranks: tuple[int, int]) -> float:
        if over is None:
            return costs.travel(*message[:3])
        link = over.link_of(*ranks) if isinstance(over, Machine) else over
        return link.seconds(costs.part(*message[:3]))

    laid = _Laid(schedule, plan, seconds, travel)
    sums = laid.summed(lambda stage: _sum_seconds(stage, plan, costs, over, copies))
    return replace(laid.timeline("simulated", sums), **laid.bytes(costs, state))


def _sum_seconds(
    stage: int, plan: Plan, costs: Costs, over: Link | Machine | None, copies: int
) -> float:
    """Of a stage's gradients, over all ranks that hold it."""
    firsts = range(0, copies * plan.world, plan.world)
    ranks = [first + rank for first in firsts for rank in plan.holders[stage]]
    size = costs[stage].gradients
    if over is None or len(ranks) == 1:
        return 0.0
    if isinstance(over, Machine):
        return over.allreduce_seconds(size, ranks)
    return over.allreduce_seconds(size, len(ranks))


def virtual(timeline: Timeline, schedule: Schedule, plan: Plan) -> Timeline:
    """The measured step as if every rank had a core of its own, from the CPU time of each action.

    It is repeatable on a busy machine, and lets more ranks be measured than there are cores.
    """
    cpu = {(e.rank, e.action): e.cpu for e in timeline.events}

    def seconds(rank: int, action: Action) -> float:
        return cpu.get((rank, str(action)), 0.0)

    laid = _Laid(schedule, plan, seconds, lambda message, ranks: 0.0)
    sums = [event for event in laid.events if event.action.endswith("R")]
    return replace(laid.timeline("virtual", sums), peaks=timeline.peaks, stashes=timeline.stashes)


class _Laid:
    """A schedule with the earliest start of every action in the given order.

    A team begins together, when all its ranks are free and have what they need.
    """

    def __init__(self, schedule: Schedule, plan: Plan, seconds: Seconds, travel: Travel) -> None:
        self.schedule, self.plan, self.travel = schedule, plan, travel
        self.free: dict[int, float] = defaultdict(float)
        self.link_free: dict[tuple[int, int], float] = defaultdict(float)
        self.known: dict[tuple[int, Fact], float] = {}
        self.arrived: dict[tuple[tuple[int, int], Message], float] = {}
        self.sent: list[tuple[tuple[int, int], Message]] = []
        self.events: list[Event] = []
        self.stops: list[list[float]] = [[] for _ in schedule.ranks]
        run = Run(schedule, plan)
        for team, action in run.turns():
            start = max(self._ready(rank, action) for rank in team)
            for rank in team:
                self._do(rank, action, start, start + seconds(rank, action))
        if stuck := run.stuck():
            rank, step, action, _ = stuck[0]
            raise ScheduleError(
                f"rank {rank}, step {step}: {action} can never run; check() says why"
            )

    def _ready(self, rank: int, action: Action) -> float:
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

    def _do(self, rank: int, action: Action, start: float, stop: float) -> None:
        self.free[rank] = stop
        self.stops[rank].append(stop)
        if stop > start or action.kind is Kind.REDUCE:
            self.events.append(Event(rank, str(action), start, stop, stop - start))
        for fact in gives(action):
            self.known[rank, fact] = stop
        if action.way == ">":
            message = action.message
            others = (r for r in self.plan.team_for(action.peer, action.micro_batch) if r != rank)
            for link in ((rank, other) for other in others):
                self.link_free[link] = max(stop, self.link_free[link]) + self.travel(message, link)
                self.arrived[link, message] = self.link_free[link]
                self.sent.append((link, message))

    def summed(self, seconds: Callable[[int], float]) -> list[Event]:
        """Sums of gradients: each begins when its last rank has come to it, one after the other."""
        rows = [[a.stage for a in row if a.kind is Kind.REDUCE] for row in self.schedule.ranks]
        order: TopologicalSorter[int] = TopologicalSorter()
        for row in rows:
            for stage in row:
                order.add(stage)
            for before, after in pairwise(row):
                order.add(after, before)
        reached: dict[int, dict[int, float]] = defaultdict(dict)
        for event in self.events:
            if event.action.endswith("R"):
                reached[event.parsed().stage][event.rank] = event.stop
        busy: dict[int, float] = defaultdict(float)
        found = []
        for stage in order.static_order():
            start = max((max(t, busy[rank]) for rank, t in reached[stage].items()))
            stop = start + seconds(stage)
            for rank in reached[stage]:
                busy[rank] = stop
                found.append(Event(rank, f"{stage}R", start, stop))
        return found

    def timeline(self, clock: str, sums: list[Event]) -> Timeline:
        rest = [event for event in self.events if not event.action.endswith("R")]
        return Timeline(tuple(rest + sums), clock)

    def bytes(self, costs: Costs, state: float) -> dict[str, tuple[object, ...]]:
        """Live bytes of every rank after each action, peaks, and what each link carried."""
        found = live(self.schedule, self.plan, costs, state)
        known = not costs.counts_stashes
        links: dict[tuple[int, int], int] = defaultdict(int)
        for link, message in self.sent:
            links[link] += costs.part(*message[:3])
        return {
            "memory": tuple(
                tuple(zip(stops, row, strict=True))
                for stops, (row, _) in zip(self.stops, found, strict=True)
            )
            * known,
            "peaks": tuple(meter.peak for _, meter in found) * known,
            "stashes": tuple(meter.most_stashes for _, meter in found),
            "links": tuple((a, b, size) for (a, b), size in sorted(links.items())),
        }
