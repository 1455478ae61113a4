"""Lay a schedule out in time: each rank runs its order, each action waits for its dependencies.

A rank computes, each link carries one message after the other, a rank's sums and gathers queue
beside both, and so does what goes to and from its host: four kinds of lanes that work at the same
time. (To and from a disk it is one.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

from gems.errors import ScheduleError
from gems.hardware import Link, Machine
from gems.model.costs import Costs
from gems.plans.plan import ASYNCHRONOUS, BATCHES, Plan
from gems.predict.memory import kept, live
from gems.predict.state_bytes import share
from gems.predict.timeline import Event, Timeline
from gems.schedule.action import (
    COLLECTIVES,
    OFFLOADS,
    Action,
    Kind,
    Message,
    Schedule,
    parse_action,
)
from gems.schedule.async_window import number_of, place
from gems.schedule.dependencies import Result, collective_before, dependencies, results
from gems.schedule.lower.offload import Storing
from gems.schedule.machine import Collectives, ScheduleMachine

Seconds = Callable[[int, Action], float]
Travel = Callable[[Message, tuple[int, int]], float]
Meet = Callable[[Action], float]
Carry = Callable[[Action], float]


def simulate(
    schedule: Schedule,
    plan: Plan,
    costs: Costs,
    over: Link | Machine | None = None,
    state: float = 2.0,
    copies: int = 1,
) -> Timeline:
    """The timeline of a step if stages cost what `costs` says, with live bytes over time.

    Messages, sums and gathers go over one link, or over those of a machine; without either,
    messages take what `costs` says and the others nothing. What is put away goes over a machine's
    links to its host or disk. `state` is the optimizer's, in units of
    the gradients. The plan may stand for so many `copies` of it on further ranks: their steps are
    the same, but sums and gathers go over all of them. Of 2BW, whose pipeline never drains, it is
    a step in the middle of a run.
    """

    def seconds(rank: int, action: Action) -> float:
        if action.kind is Kind.OPTIMIZER_STEP:
            return _away_seconds(action, plan, costs, over, state)
        if not action.computes:
            return 0.0
        return costs[action.stage].of(action.kind.value)

    def travel(message: Message, ranks: tuple[int, int]) -> float:
        if over is None:
            return costs.travel(*message[:3])
        link = over.link_of(*ranks) if isinstance(over, Machine) else over
        return link.seconds(costs.part(*message[:3]))

    def meet(meeting: Action) -> float:
        found = _meeting_seconds(meeting, plan, costs, over, copies)
        return found + _away_seconds(meeting, plan, costs, over, state)

    def carry(action: Action) -> float:
        if not isinstance(over, Machine):
            return 0.0
        way = over.way_to(plan.offloaded_to("activations"))
        return way.seconds(kept(action.stage, action.micro_batch, plan, costs))

    laid = _Laid(schedule, plan.unrolled, seconds, travel, meet, carry)
    whole = replace(laid.timeline("simulated", laid.met), **laid.bytes(plan, costs, state, copies))
    return _period(whole, plan) if plan.schedule == ASYNCHRONOUS else whole


def _period(run: Timeline, plan: Plan) -> Timeline:
    """Of a run without end, what happens during one step once it is in its stride: from when the
    first stage begins the last batch but one until it begins the last."""
    starts = {e.action: e.start for e in run.events}
    first, last = ((BATCHES - n) * plan.micro_batches for n in (2, 1))
    stages = (s for s in range(plan.depth) if f"{s}F{first}" in starts)  # what takes any time
    if (stage := next(stages, None)) is None:
        return run
    start, stop = starts[f"{stage}F{first}"], starts[f"{stage}F{last}"]
    inside = (e for e in run.events if e.start < stop and (e.stop > start or e.start == start))
    return replace(
        run,
        events=tuple(
            replace(e, start=max(e.start, start) - start, stop=min(e.stop, stop) - start)
            for e in inside
        ),
        memory=tuple(
            tuple((t - start, memory) for t, memory in row if start <= t <= stop)
            for row in run.memory
        ),
        links=tuple((a, b, size // BATCHES) for a, b, size in run.links),
    )


def _meeting_seconds(
    meeting: Action, plan: Plan, costs: Costs, over: Link | Machine | None, copies: int
) -> float:
    """Of a stage's gradients or weights, over all ranks that hold it.

    To sum for everyone is to sum in parts and to gather them, each half of it. With zero=1 or 2 the
    parts are gathered after the update, which counts as the end of the sum; with 3, when needed.
    """
    firsts = range(0, copies * plan.world, plan.world)
    ranks = [first + rank for first in firsts for rank in plan.replica_groups[meeting.stage]]
    size = costs[meeting.stage].gradients
    alone = len(ranks) == 1 or (meeting.kind is Kind.UNSHARD and plan.zero < 3)
    if over is None or alone:
        return 0.0
    part = 0.5 if plan.zero == 3 else 1.0
    if isinstance(over, Machine):
        return part * over.allreduce_seconds(size, ranks)
    return part * over.allreduce_seconds(size, len(ranks))


def _away_seconds(
    action: Action, plan: Plan, costs: Costs, over: Link | Machine | None, state: float
) -> float:
    """Of what a stage has put away, on its way: weights that come, gradients that go, and for an
    update all that is read and written. Late updates count as the end of the sum."""
    if not isinstance(over, Machine) or not plan.offloaded_state:
        return 0.0
    mine = share(
        costs[action.stage], plan.zero, plan.shard_count(action.stage), away=plan.offloaded_state
    )
    update = 2 * state * mine.own + (mine.own + 2 * mine.home if mine.home else 0.0)
    if plan.offloaded_to("weights") == "host":
        update = 0.0  # the optimizer works there
    size = update
    if action.kind is Kind.UNSHARD:
        size = mine.home
    elif action.kind is Kind.ALL_REDUCE:
        size = (mine.own if mine.home else 0.0) + (update if plan.optimizer_step == "end" else 0.0)
    return over.way_to(plan.offloaded_to("optimizer")).seconds(size) if size else 0.0


def virtual(timeline: Timeline, schedule: Schedule, plan: Plan) -> Timeline:
    """The measured step as if every rank had a core of its own, from the CPU time of each action.

    It is repeatable on a busy machine, and lets more ranks be measured than there are cores.
    """
    endless = plan.schedule == ASYNCHRONOUS
    cpu = {(e.rank, _once(e.action, plan) if endless else e.action): e.cpu for e in timeline.events}

    def seconds(rank: int, action: Action) -> float:
        if endless and action.computes:
            batch = replace(action, micro_batch=number_of(action.micro_batch, plan))
            return cpu.get((rank, str(batch)), 0.0)
        return cpu.get((rank, str(action)), 0.0)

    none = lambda *_: 0.0  # noqa: E731
    laid = _Laid(schedule, plan.unrolled, seconds, none, none, none)
    sums = [event for event in laid.events if event.action.endswith("A")]
    laid = replace(
        laid.timeline("virtual", sums), peaks=timeline.peaks, max_in_flight=timeline.max_in_flight
    )
    return _period(laid, plan) if endless else laid


def _once(action: str, plan: Plan) -> str:
    """An action of a window, in which each micro-batch comes once, by its number in its batch."""
    parsed = parse_action(action)
    if not parsed.computes:
        return action
    return str(replace(parsed, micro_batch=place(parsed.micro_batch, plan)[1]))


class _Laid:
    """A schedule with the earliest start of every action in the given order.

    A team begins together, when all its ranks are free and have what they need.
    """

    def __init__(
        self,
        schedule: Schedule,
        plan: Plan,
        seconds: Seconds,
        travel: Travel,
        meet: Meet,
        carry: Carry,
    ) -> None:
        self.schedule, self.plan, self.travel, self.meet = schedule, plan, travel, meet
        self.carry = carry
        self.storing: dict[int, tuple[Storing, float]] = {}  # of each rank, until when
        self.lanes: dict[tuple[int, str], float] = defaultdict(float)
        self.loaded: dict[tuple[int, int, int], float] = {}  # rank, stage, micro-batch
        self.free: dict[int, float] = defaultdict(float)
        self.link_free: dict[tuple[int, int], float] = defaultdict(float)
        self.known: dict[tuple[int, Result], float] = {}
        self.arrived: dict[tuple[tuple[int, int], Message], float] = {}
        self.sent: list[tuple[tuple[int, int], Message]] = []
        self.events: list[Event] = []
        self.meetings = Collectives(plan)
        self.reached: dict[Action, dict[int, float]] = defaultdict(dict)
        self.busy: dict[int, float] = defaultdict(float)  # with sums and gathers
        self.fetching: dict[int, float] = defaultdict(float)  # what was put away
        self.through: dict[tuple[int, Action], float] = {}
        self.summed: dict[int, list[int]] = defaultdict(list)
        self.met: list[Event] = []
        self.stops: list[list[float]] = [[] for _ in schedule.ranks]
        run = ScheduleMachine(schedule, plan)
        for team, action in run.by_group():
            start = max(self._ready(rank, action) for rank in team)
            for rank in team:
                self._do(rank, action, start, start + seconds(rank, action))
        if stuck := run.stuck():
            rank, step, action, _ = stuck[0]
            raise ScheduleError(
                f"rank {rank}, step {step}: {action} can never run; check() says why"
            )

    def _ready(self, rank: int, action: Action) -> float:
        """When a rank is free and has all dependencies of an action."""
        arrivals = (self._arrival(rank, action, fact) for fact in dependencies(action, self.plan))
        meeting = collective_before(action, self.plan, self.summed[rank])
        met = 0.0 if meeting is None else self.through.get((rank, meeting), 0.0)
        return max((self.free[rank], met, self._moved(rank, action), *arrivals))

    def _moved(self, rank: int, action: Action) -> float:
        """When stores and loads that an action waits for are through."""
        at = 0.0
        if rank in self.storing:
            storing, until = self.storing[rank]
            if action.kind in OFFLOADS or (action.computes and storing.begun):
                at = until
        if action.computes:
            at = max(at, self.loaded.get((rank, action.stage, action.micro_batch), 0.0))
        return at

    def _move(self, rank: int, action: Action, now: float) -> None:
        """A store or a load, on its way beside the work."""
        key = action.stage, action.micro_batch
        disk = self.plan.offloaded_to("activations") == "disk"
        lane = rank, "" if disk else action.kind.value
        start = max(now, self.lanes[lane])
        self.lanes[lane] = stop = start + self.carry(action)
        self.met.append(Event(rank, str(action), start, stop))
        self.storing.pop(rank, None)
        if action.kind is Kind.STORE:
            self.storing[rank] = (Storing(*key), stop)
        else:
            self.loaded[(rank, *key)] = stop

    def _arrival(self, rank: int, action: Action, fact: Result) -> float:
        """A part of another rank holds when its message to this very stage is there, if any is."""
        if fact.stage == action.stage:
            return self.known[rank, fact]
        message = Message(fact.what, fact.stage, action.stage, fact.micro_batch)
        team = self.plan.spatial_group_for(fact.stage, fact.micro_batch)
        return max(self.arrived.get(((r, rank), message), self.known[r, fact]) for r in team)

    def _do(self, rank: int, action: Action, start: float, stop: float) -> None:
        self.free[rank] = stop
        self.stops[rank].append(stop)
        if stop > start or action.kind is Kind.ALL_REDUCE:
            self.events.append(Event(rank, str(action), start, stop, stop - start))
        for fact in results(action):
            self.known[rank, fact] = stop
        if action.kind in COLLECTIVES:
            self._meet(rank, action, stop)
        elif action.kind in OFFLOADS:
            self._move(rank, action, stop)
        elif action.computes and rank in self.storing and not self.storing[rank][0].travels():
            del self.storing[rank]
        if action.way == ">":
            message = action.message
            others = (
                r for r in self.plan.spatial_group_for(action.peer, action.micro_batch) if r != rank
            )
            for link in ((rank, other) for other in others):
                self.link_free[link] = max(stop, self.link_free[link]) + self.travel(message, link)
                self.arrived[link, message] = self.link_free[link]
                self.sent.append((link, message))

    def _meet(self, rank: int, action: Action, now: float) -> None:
        """Sums and gathers: each begins when its last rank has come to it, one after the other.
        What a rank fetches for itself waits for nobody."""
        if action.kind is Kind.UNSHARD and self.plan.zero < 3:
            start = max(now, self.fetching[rank])
            self.fetching[rank] = self.through[rank, action] = stop = start + self.meet(action)
            self.met.append(Event(rank, str(action), start, stop))
            return
        self.reached[action][rank] = now
        if action.kind is Kind.ALL_REDUCE:
            self.summed[rank].append(action.stage)
        for meeting in self.meetings.begin(rank, action):
            there = self.reached.pop(meeting)
            start = max(max(t, self.busy[rank]) for rank, t in there.items())
            stop = start + self.meet(meeting)
            for member in there:
                self.busy[member] = self.through[member, meeting] = stop
                self.met.append(Event(member, str(meeting), start, stop))

    def timeline(self, clock: str, sums: list[Event]) -> Timeline:
        rest = [event for event in self.events if not event.action.endswith("A")]
        return Timeline(tuple(rest + sums), clock)

    def bytes(
        self, plan: Plan, costs: Costs, state: float, copies: int
    ) -> dict[str, tuple[object, ...]]:
        """Live bytes of every rank after each action, peaks, and what each link carried."""
        found = live(self.schedule, plan, costs, state, copies)
        known = not costs.counts_micro_batches
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
            "max_in_flight": tuple(meter.max_in_flight for _, meter in found),
            "links": tuple((a, b, size) for (a, b), size in sorted(links.items())),
        }
