"""Lay a schedule out in time: each rank runs its order, each action waits for its dependencies.

A rank computes. Beside that, each link carries one message after the other, a rank's collectives
run one after the other, and so do its copies to the host and those from it (to and from a disk they
share one lane).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import repeat

from gems.errors import ScheduleError
from gems.hardware import Link, Machine
from gems.model.costs import Costs
from gems.plans.fields import BATCHES
from gems.plans.plan import Plan
from gems.plans.residency import ADAM, StateResidency
from gems.predict.memory_trace import kept, live
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
from gems.schedule.async_window import first_of, number_of, place
from gems.schedule.dependencies import Result, dependencies, results
from gems.schedule.machine import BEGUN, ScheduleMachine, group_of

Seconds = Callable[[int, Action], float]  # of a rank's own work
MessageSeconds = Callable[[Message, tuple[int, int]], float]  # over a link
Background = Callable[[Action], float]  # of what goes on beside the computation


def simulate(
    schedule: Schedule,
    plan: Plan,
    costs: Costs,
    over: Link | Machine | None = None,
    state: float = ADAM,
    copies: int = 1,
) -> Timeline:
    """The timeline of a step whose stages cost `costs`, with live bytes over time.

    Messages and collectives go over one link, or over those of a machine. Without either, messages
    take the time in `costs` and collectives none. Offloaded state goes over a machine's links to
    its host or disk. `state` is the optimizer's bytes per byte of trained weights. The plan may
    stand for `copies` of itself on further ranks: their steps are the same, but collectives span
    all of them. For 2BW, whose pipeline never drains, it is a step in the middle of a run. Where a
    schedule has parts, `costs` are those of a part.
    """

    residency = plan.residency_over(copies)

    def offload_seconds(action: Action) -> float:
        return _offload_seconds(action, residency[action.stage], costs, over, state)

    def seconds(rank: int, action: Action) -> float:
        if action.kind is Kind.OPTIMIZER_STEP:
            held = residency[action.stage]
            return offload_seconds(action) + _state_calls(action, held, costs, over, state)
        if action.kind in OFFLOADS:
            size, cost = kept(action.stage, action.micro_batch, plan, costs), costs[action.stage]
            return _own_seconds(plan.activations[0].offload, size, cost.tensors, over)
        if not action.computes:
            return 0.0
        return costs[action.stage].of(action.kind.value)

    def message_seconds(message: Message, ranks: tuple[int, int]) -> float:
        if over is None:
            return costs.travel(*message[:3])
        link = over.link_of(*ranks) if isinstance(over, Machine) else over
        return link.seconds(costs.part(*message[:3]))

    def background(action: Action) -> float:
        if action.kind in COLLECTIVES:
            held = residency[action.stage]
            found = _collective_seconds(action, held, plan, costs, over, copies)
            return found + offload_seconds(action)
        if not isinstance(over, Machine):
            return 0.0
        way = over.way_to(plan.activations[0].offload)
        return way.seconds(kept(action.stage, action.micro_batch, plan, costs))

    clock = _Clock(schedule, plan.unrolled, seconds, message_seconds, background)
    whole = clock.timeline("simulated", clock.in_background)
    whole = replace(whole, **clock.bytes(plan, costs, state, copies))
    return _period(whole, plan) if plan.asynchronous else whole


def _period(run: Timeline, plan: Plan) -> Timeline:
    """One step of an asynchronous pipeline in its steady state: from when the first stage begins
    the last batch but one until it begins the last."""
    starts = {e.action: e.start for e in run.events}
    first, last = (first_of(BATCHES - n, plan) for n in (2, 1))
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


def _collective_seconds(
    action: Action,
    residency: StateResidency,
    plan: Plan,
    costs: Costs,
    over: Link | Machine | None,
    copies: int,
) -> float:
    """Of a stage's gradients or weights, over its replica group.

    An all-reduce is a reduce-scatter and an all-gather of the same length. With ZeRO gradients are
    reduce-scattered; the all-gather of weights is the unshard with zero=3, and with zero=1 and 2 it
    follows the optimizer step.
    """
    firsts = range(0, copies * plan.world, plan.world)
    ranks = [first + rank for first in firsts for rank in group_of(action, plan)]
    tied = action.kind is Kind.TIED
    size = costs.tied_bytes(action.stage) if tied else costs[action.stage].gradients
    alone = len(ranks) == 1 or (action.kind is Kind.UNSHARD and not residency.shards_weights)
    if over is None or alone:
        return 0.0
    part = 0.5 if residency.sharded and not tied else 1.0
    if isinstance(over, Machine):
        return part * over.allreduce_seconds(size, ranks)
    return part * over.allreduce_seconds(size, len(ranks))


def _own_seconds(place: str, size: float, tensors: float, over: Link | Machine | None) -> float:
    """What offloading takes of a rank's own time: a call for each tensor; and where the rank is a
    core of the host, that core also copies them, and a thread that reads and writes takes its turn.
    """
    if not isinstance(over, Machine):
        return 0.0
    device = over.device
    if not device.is_host:
        return tensors * device.call
    return tensors * (device.call + over.way_to(place).latency) + size / over.host_link.bandwidth


def _state_calls(
    action: Action,
    residency: StateResidency,
    costs: Costs,
    over: Link | Machine | None,
    state: float,
) -> float:
    """The calls of an optimizer step that reads and writes offloaded state: as many tensors per
    weight as it has bytes per byte of the weight. The bytes wait for their link anyway."""
    if not residency.optimizer_offload or residency.steps_on_host:
        return 0.0
    flat = residency.sharded or residency.weights_offload
    trained = 1.0 if flat else costs[action.stage].trained
    return _own_seconds(residency.optimizer_offload, 0.0, 2 * state * trained, over)


def _offload_seconds(
    action: Action,
    residency: StateResidency,
    costs: Costs,
    over: Link | Machine | None,
    state: float,
) -> float:
    """Of a stage's offloaded state: weights that are fetched, gradients that are stored, and for an
    optimizer step all that is read and written."""
    cost = costs[action.stage]
    if not isinstance(over, Machine) or not residency.offloads:
        return 0.0
    mine = residency.bytes(cost.weights, cost.gradients)
    update = 2 * state * mine.own + (mine.own + 2 * mine.host_copy if mine.host_copy else 0.0)
    if residency.steps_on_host:
        update = 0.0  # the optimizer runs there
    size = {
        Kind.OPTIMIZER_STEP: update,
        Kind.UNSHARD: mine.host_copy,
        Kind.ALL_REDUCE: mine.own if mine.host_copy else 0.0,
        Kind.ALL_GATHER: 2 * mine.host_copy,  # fetched, and written back
    }.get(action.kind, 0.0)
    return over.way_to(residency.optimizer_offload).seconds(size) if size else 0.0


def virtual(timeline: Timeline, schedule: Schedule, plan: Plan) -> Timeline:
    """The measured step as if every rank had a core of its own, from the CPU time of each action.

    It is repeatable on a busy machine, and lets more ranks be measured than there are cores.
    """
    asynchronous = plan.asynchronous
    name = partial(_in_batch, plan=plan) if asynchronous else str
    cpu = {(e.rank, name(e.action)): e.cpu for e in timeline.events}

    def seconds(rank: int, action: Action) -> float:
        if asynchronous and action.computes:
            batch = replace(action, micro_batch=number_of(action.micro_batch, plan))
            return cpu.get((rank, str(batch)), 0.0)
        return cpu.get((rank, str(action)), 0.0)

    none = lambda *_: 0.0  # noqa: E731
    clock = _Clock(schedule, plan.unrolled, seconds, none, none)
    reduces = [event for event in clock.events if event.action.endswith("A")]
    whole = replace(
        clock.timeline("virtual", reduces),
        peaks=timeline.peaks,
        max_in_flight=timeline.max_in_flight,
    )
    return _period(whole, plan) if asynchronous else whole


def _in_batch(action: str, plan: Plan) -> str:
    """An action of a window, in which each micro-batch comes once, by its number in its batch."""
    parsed = parse_action(action)
    if not parsed.computes:
        return action
    return str(replace(parsed, micro_batch=place(parsed.micro_batch, plan)[1]))


class _Clock:
    """Drives a schedule's state machine in time: every action as early as the order allows.

    The ranks of a spatial group begin jointly, when all are free and have their dependencies.
    """

    def __init__(
        self,
        schedule: Schedule,
        plan: Plan,
        seconds: Seconds,
        message_seconds: MessageSeconds,
        background: Background,
    ) -> None:
        self.schedule, self.plan = schedule, plan
        self.message_seconds, self.background = message_seconds, background
        self.free = [0.0] * len(schedule.ranks)
        self.lanes: dict[tuple[int, str], float] = defaultdict(float)  # beside the computation
        self.until: dict[tuple[int, Action], float] = {}  # when what is in flight is complete
        self.reached: dict[Action, dict[int, float]] = defaultdict(dict)  # collectives, by rank
        self.link_free: dict[tuple[int, int], float] = defaultdict(float)
        self.known: dict[tuple[int, Result], float] = {}
        self.arrived: dict[tuple[tuple[int, int], Message], float] = {}
        self.sent: list[tuple[tuple[int, int], Message]] = []
        self.events: list[Event] = []
        self.in_background: list[Event] = []
        self.stops: list[list[float]] = [[] for _ in schedule.ranks]
        machine = ScheduleMachine(schedule, plan)
        for ranks, action, awaited, completed in machine.transitions():
            start = max(map(self._ready, ranks, repeat(action), awaited))
            for rank in ranks:
                self._run(rank, action, start, start + seconds(rank, action))
                if action.way == ">":
                    self._send(rank, action)
                elif action.kind in BEGUN and not action.computes:
                    self._begin(rank, action, completed)
        if stuck := machine.stuck():
            rank, step, action, _ = stuck[0]
            raise ScheduleError(
                f"rank {rank}, step {step}: {action} can never run; check() lists the reasons"
            )

    def _ready(self, rank: int, action: Action, awaited: list[Action]) -> float:
        """When a rank is free and has all dependencies of an action."""
        arrivals = (self._arrival(rank, action, need) for need in dependencies(action, self.plan))
        complete = (self.until.get((rank, begun), 0.0) for begun in awaited)
        return max((self.free[rank], *complete, *arrivals))

    def _arrival(self, rank: int, action: Action, need: Result) -> float:
        """Another rank's part is here when its message to this very stage is, if one is sent."""
        if need.stage == action.stage:
            return self.known[rank, need]
        what, stage, micro_batch, part = need
        message = Message(what, stage, action.stage, micro_batch, part)
        group = self.plan.spatial_group_for(need.stage, need.micro_batch)
        return max(self.arrived.get(((r, rank), message), self.known[r, need]) for r in group)

    def _run(self, rank: int, action: Action, start: float, stop: float) -> None:
        self.free[rank] = stop
        self.stops[rank].append(stop)
        if stop > start or action.kind is Kind.ALL_REDUCE:
            self.events.append(Event(rank, str(action), start, stop, stop - start))
        for result in results(action):
            self.known[rank, result] = stop

    def _send(self, rank: int, action: Action) -> None:
        message, now = action.message, self.free[rank]
        for other in self.plan.spatial_group_for(action.peer, action.micro_batch):
            if (link := (rank, other)) == (rank, rank):
                continue
            seconds = self.message_seconds(message, link)
            self.link_free[link] = max(now, self.link_free[link]) + seconds
            self.arrived[link, message] = self.link_free[link]
            self.sent.append((link, message))

    def _begin(self, rank: int, action: Action, completed: list[Action]) -> None:
        """What runs beside the computation. A collective begins when its last rank reaches it."""
        now = self.free[rank]
        if action.kind in OFFLOADS:
            disk = self.plan.activations[0].offload == "disk"
            self._occupy({rank: now}, action, "disk" if disk else action.kind.value)
        elif action.kind is Kind.UNSHARD and not self.plan.residency[action.stage].shards_weights:
            self._occupy({rank: now}, action, "weights")
        elif action.kind in COLLECTIVES:
            self.reached[action][rank] = now
            for collective in completed:
                self._occupy(self.reached.pop(collective), collective, "collectives")

    def _occupy(self, reached: dict[int, float], action: Action, lane: str) -> None:
        """Run one thing on a lane of each rank, after all that the lane has before it."""
        start = max(max(at, self.lanes[rank, lane]) for rank, at in reached.items())
        stop = start + self.background(action)
        for rank in reached:
            self.lanes[rank, lane] = self.until[rank, action] = stop
            self.in_background.append(Event(rank, str(action), start, stop))

    def timeline(self, clock: str, background: list[Event]) -> Timeline:
        """What goes on in the background is drawn there, also if a rank's core has a part in it."""
        there = {(event.rank, event.action) for event in background}
        rest = [event for event in self.events if (event.rank, event.action) not in there]
        return Timeline(tuple(rest + background), clock)

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
