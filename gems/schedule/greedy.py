"""The fastest order we can find under a limit on the activations that each rank holds.

GEMS, GPipe, 1F1B and zero bubble are points of one continuum: how many activations a rank may hold,
which directions exist, whether backward is split. Here a clock runs over the costs; whenever a rank
is free it takes the most urgent action that is ready. The limit and the direction do the rest.

[Note: why admission cannot deadlock]
A micro-batch is admitted to a rank when its first forward there begins, and reserves memory for all
its stages on that rank at once; backward frees it stage by stage. The oldest sample that a rank has
not admitted yet may always take what is free; a younger one only if enough for one more, as large
as any, remains. Let i be the oldest unfinished sample. On a rank that has not admitted it, all that
is live is younger, so the last of them left enough for i when it was admitted. Hence i can proceed
everywhere, finishes, and so does every sample after it.

Where a stage saves its inputs only, there are two budgets, each with these same rules: one for what
forward saves, and one for what recomputation adds to it.

Where activations are offloaded, bytes do not limit how many samples are in flight: of what forward
saves, at most three stages' are on the device at a time. A limit on their number still does, and so
do bytes if backward is split: from I on, activations are on the device until W.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import product
from math import inf

from gems.errors import PlanError
from gems.model.costs import Costs
from gems.plans.plan import Plan
from gems.schedule.action import Action, Kind, Schedule
from gems.schedule.dependencies import Result, dependencies, results
from gems.schedule.machine import ScheduleMachine

Priority = Callable[[Action], tuple[int, ...]]

# What a free rank prefers among the actions that are ready; the smallest goes first.
# Input gradients free memory and unblock others; weight gradients can always wait.
PRIORITIES: dict[str, Priority] = {
    "drain, oldest first": lambda a: ("IBRFW".index(a.kind.value), a.micro_batch, -a.stage),
    "drain, deepest first": lambda a: ("IBRFW".index(a.kind.value), -a.stage, a.micro_batch),
    "fill, oldest first": lambda a: ("FIBRW".index(a.kind.value), a.micro_batch, -a.stage),
    "oldest first": lambda a: (a.kind is Kind.WEIGHT, a.micro_batch, -a.stage),
}
# Recomputation while there is nothing better to do.
IDLE: Priority = lambda a: ("IBFRW".index(a.kind.value), a.micro_batch, -a.stage)  # noqa: E731


class _Budget:
    """A rank's memory for one kind of bytes: what samples take of it, and which have it."""

    def __init__(self, parts: list[dict[int, float]], limit: float) -> None:
        self.parts, self.limit = parts, limit  # for each sample what each of its stages takes
        self.sizes = [sum(part.values()) for part in parts]
        self.largest = max(self.sizes)
        # Samples that want some of it and are not admitted yet, oldest first.
        self.waiting = [i for i, part in enumerate(parts) if part]
        self.admitted = {i for i, part in enumerate(parts) if not part}
        self.live = 0.0

    def admits(self, sample: int) -> bool:
        if sample in self.admitted:
            return True
        reserve = 0.0 if sample == self.waiting[0] else self.largest
        rounding = 1e-9 * self.largest
        return self.live + self.sizes[sample] + reserve <= self.limit + rounding

    def admit(self, sample: int) -> None:
        if sample not in self.admitted:
            self.admitted.add(sample)
            self.waiting.remove(sample)
            self.live += self.sizes[sample]

    def release(self, sample: int, stage: int) -> None:
        self.live -= self.parts[sample].get(stage, 0.0)


@dataclass
class _Rank:
    """What a rank is doing while the order is built. Some kinds of action must be admitted."""

    budgets: dict[Kind, _Budget]
    free_at: float = 0.0
    ready: list[tuple[tuple[int, ...], float, Action]] = field(default_factory=list)
    row: list[Action] = field(default_factory=list)


Shares = list[list[dict[int, float]]]  # of each rank and sample, stage by stage


def shares(plan: Plan, costs: Costs | None) -> Shares:
    """What each sample saves on each rank, stage by stage: bytes, or without costs parts of one.

    Where forward is recomputed this is what it saves, and `recomputed` what comes on top.
    """
    kept = _each(plan, lambda s, i: costs[s].activations if costs else 1.0)
    if costs is None:
        kept = [[{s: 1 / len(part) for s in part} for part in row] for row in kept]
    left = (
        (lambda s: float(min(costs.received(s), costs[s].activations)))
        if costs
        else (lambda s: 0.0)
    )
    return [
        [{s: left(s) if plan.recomputes(s, i) else n for s, n in part.items()} for i, part in row]
        for row in map(enumerate, kept)
    ]


def recomputed(plan: Plan, costs: Costs | None) -> Shares:
    """What recomputation adds for each sample on each rank; nothing where all is saved."""

    def added(stage: int, stages: int) -> float:
        if costs is None:
            return 1 / stages
        return max(costs[stage].activations - costs.received(stage), 0.0)

    return [
        [{s: added(s, len(p)) for s in p if plan.recomputes(s, i)} for i, p in enumerate(row)]
        for row in _each(plan, lambda s, i: 0.0)
    ]


def _each(plan: Plan, of: Callable[[int, int], float]) -> Shares:
    """A number for each stage and sample, where the stage is."""
    found: Shares = [[{} for _ in range(plan.micro_batches)] for _ in range(plan.ranks)]
    for i in range(plan.micro_batches):
        for stage in range(plan.depth):
            found[plan.rank_for(stage, i)][i][stage] = of(stage, i)
    return found


def order(
    plan: Plan,
    costs: Costs,
    samples: int | None = None,
    memory: float | None = None,
    *,
    split: bool = True,
    priority: Priority = PRIORITIES["drain, oldest first"],
) -> Schedule:
    """The greedy order when a rank may hold so many samples, or so many bytes, or both."""
    return _Build(plan, costs, samples, memory, split, priority).run()[0]


def best(plan: Plan, costs: Costs, memory: float | None = None) -> Schedule:
    """The shortest greedy order, over priorities, split and whole backward, and limits.

    Without a limit from the plan or the caller it still saves memory: the smallest limit within two
    per cent of the fastest is taken.
    """
    tried = [plan.max_in_flight] if plan.max_in_flight else limits(plan.micro_batches)
    fastest = _fastest(plan, costs, tried.pop(), memory)
    good = 1.02 * fastest[0]
    while tried:  # more memory is hardly ever slower, so halving finds the smallest that is enough
        middle = len(tried) // 2
        found = _fastest(plan, costs, tried[middle], memory, good)
        if found[0] <= good:
            fastest, tried = found, tried[:middle]
        else:
            tried = tried[middle + 1 :]
    return fastest[1]


def least(plan: Plan, costs: Costs) -> float:
    """No order is shorter: the busiest rank works off all its micro-batches, after the first has
    come to it, and before the gradient of the last has gone all the way back.

    Under a limit of one sample, as in GEMS, a rank stays reserved while the sample is further on as
    well; unless there is recomputation.
    """
    again = [costs[s].f * plan.recomputes(s, 0) for s in range(plan.depth)]
    fill, drain = [0.0] * plan.depth, [0.0] * plan.depth
    for s in range(plan.depth):
        fill[s] = max((fill[q] + costs[q].f for q in plan.sources[s]), default=0.0)
        drain[s] = max((drain[q] + costs[q].i for q in plan.sources[s]), default=0.0)
    beyond = [0.0] * plan.depth
    if plan.alternates and plan.max_in_flight < 2 and not any(again):
        for s in reversed(range(plan.depth)):
            later = (beyond[q] + costs[q].f + costs[q].i for q in plan.sinks[s])
            beyond[s] = max(later, default=0.0)
    loads, begins, ends = ([value] * plan.ranks for value in (0.0, inf, inf))
    share, more = divmod(plan.micro_batches, plan.directions)
    for direction, row in enumerate(plan.spatial_groups[: plan.directions]):
        for s, group in enumerate(row):
            for rank in group:
                times = share + (direction < more)
                loads[rank] += times * (costs[s].seconds + beyond[s])
                loads[rank] += max(times - (plan.activations[s].spares_last), 0) * again[s]
                begins[rank] = min(begins[rank], fill[s])
                # A deferred weight gradient may well be the last action of a rank.
                ends[rank] = min(ends[rank], 0.0 if plan.split else drain[s])
    return max(map(sum, zip(loads, begins, ends, strict=True)))


def _fastest(
    plan: Plan, costs: Costs, limit: int, memory: float | None, good: float = 0.0
) -> tuple[float, Schedule]:
    """The shortest order under one limit, with its length; a whole backward wins a tie, and is all
    that is tried where the plan does not split it.

    The first that is at most `good`, or that no other could beat, is taken at once.
    """
    tried = []
    good = max(good, least(plan, costs) * (1 + 1e-9))
    shortest = min(cost.f for cost in costs.items)
    some = any(plan.recomputes(s, 0) for s in range(plan.depth))
    priorities = [*PRIORITIES.values(), *([IDLE] if some else [])]
    halves = (False, True) if plan.split else (False,)
    choices = product(halves, priorities, (0.0, PATIENCE * shortest))
    for split, priority, patience in choices:
        schedule, _ = _Build(plan, costs, limit, memory, split, priority, patience).run()
        schedule = joined(schedule, plan, costs) if split else schedule
        _, stops = times(schedule, plan, costs)
        tried.append((max(stops.values()), split, schedule))
        if tried[-1][0] <= good:
            break
    seconds, _, schedule = min(tried, key=lambda t: t[:2])
    return seconds, schedule


def limits(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16 ... up to `most`."""
    steps = (n for power in range(most.bit_length() + 1) for n in (2**power, 3 * 2**power))
    return sorted({1, most, *(n for n in steps if n <= most)})


def joined(schedule: Schedule, plan: Plan, costs: Costs) -> Schedule:
    """I and W as one B wherever they follow each other and nobody waits for I alone.

    A whole backward is cheaper than its two halves. Nothing starts later for it.
    """
    starts, stops = times(schedule, plan, costs)
    begins = {(a.stage, a.micro_batch): t for a, t in starts.items() if a.kind in BACK}

    def joins(a: Action, b: Action) -> bool:
        if (a.kind, b.kind) != (Kind.INPUT, Kind.WEIGHT):
            return False
        if (a.stage, a.micro_batch) != (b.stage, b.micro_batch):
            return False
        waiting = ((q, begins[q, a.micro_batch]) for q in plan.sources[a.stage])
        return all(start >= stops[b] + costs.travel("gradient", a.stage, q) for q, start in waiting)

    rows = []
    for row in schedule.ranks:
        new: list[Action] = []
        for action in row:
            if new and joins(new[-1], action):
                new[-1] = replace(action, kind=Kind.BACKWARD)
            else:
                new.append(action)
        rows.append(tuple(new))
    return Schedule(tuple(rows))


BACK = (Kind.BACKWARD, Kind.INPUT)


def times(
    schedule: Schedule, plan: Plan, costs: Costs
) -> tuple[dict[Action, float], dict[Action, float]]:
    """Start and stop of every compute action if each rank keeps its order; halves cost more."""
    free = [0.0] * plan.ranks
    known: dict[Result, float] = {}
    starts: dict[Action, float] = {}
    stops: dict[Action, float] = {}
    for rank, action in ScheduleMachine(schedule, plan):
        arrivals = (known[f] + travel(f, action, plan, costs) for f in dependencies(action, plan))
        starts[action] = begin = max([free[rank], *arrivals])
        cost = costs[action.stage]
        guessed = action.kind in (Kind.INPUT, Kind.WEIGHT) and cost.halves == 1
        price = HALVES if guessed else 1.0
        free[rank] = stops[action] = begin + price * cost.of(action.kind.value)
        known.update(dict.fromkeys(results(action), free[rank]))
    return starts, stops


def travel(result: Result, action: Action, plan: Plan, costs: Costs) -> float:
    """Seconds until a result of one rank reaches an action on another."""
    if plan.rank_of(result.stage, action.replica) == plan.rank_of(action.stage, action.replica):
        return 0.0
    return costs.travel(result.what, result.stage, action.stage)


PATIENCE = 0.25  # of the shortest forward: how long a rank may wait for something more urgent
ON_DEVICE = 3  # if offloaded: one is made or read, one is copied, one is too near to offload
HALVES = 1.1  # what a backward costs in two halves; 0.9 to 1.2 was seen on real networks


def _budgets(
    rank: int,
    kept: list[dict[int, float]],
    added: list[dict[int, float]],
    samples: int | None,
    memory: float | None,
    offloaded: bool = False,
) -> dict[Kind, _Budget]:
    """What a rank has for forward, and for recomputation: so many samples, or what memory there is.

    One sample must fit both. If memory allows, all samples may run forward; recomputation has the
    rest. A number of samples limits those whose activations are held, saved or recomputed. If what
    forward saves is `offloaded`, it takes the memory of those that are on the device.
    """
    forward, again = _Budget(kept, inf), _Budget(added, inf)
    limit = inf if memory is None else memory
    largest = max((size for part in kept for size in part.values()), default=0.0)
    here = ON_DEVICE * largest if offloaded else forward.largest
    if (needed := here + again.largest) > limit:
        what = f"{ON_DEVICE} stages of a micro-batch need" if offloaded else "one micro-batch needs"
        raise PlanError(
            f"rank {rank} may hold {limit:,.0f} bytes of activations, but {what} "
            f"{needed:,.0f}; use more stages, a smaller micro-batch or more memory"
        )
    again.limit = max(again.largest, limit - (here if offloaded else len(kept) * forward.largest))
    if samples:
        again.limit = min(again.limit, samples * again.largest)
    forward.limit = limit - again.limit if limit < inf and not offloaded else inf
    pairs = zip(kept, added, strict=True)
    if samples and any(part.keys() - more.keys() for part, more in pairs):
        forward.limit = min(forward.limit, samples * forward.largest)
    return {Kind.FORWARD: forward, Kind.RECOMPUTE: again}


class _Build:
    """One run of the clock."""

    def __init__(
        self,
        plan: Plan,
        costs: Costs,
        samples: int | None,
        memory: float | None,
        split: bool,
        priority: Priority,
        patience: float = 0.0,
    ) -> None:
        self.plan, self.costs, self.split, self.priority = plan, costs, split, priority
        self.patience = patience
        counted = None if memory is None else costs
        pairs = zip(shares(plan, counted), recomputed(plan, counted), strict=True)
        offloaded = bool(plan.activations[0].offload) and not split
        self.ranks = [
            _Rank(_budgets(r, *pair, samples, memory, offloaded)) for r, pair in enumerate(pairs)
        ]
        self.unmet: dict[Action, int] = {}
        self.known_at: dict[Action, float] = {}
        self.waits_for: dict[Result, list[Action]] = {}
        self.clock: list[tuple[float, int]] = []

    def run(self) -> tuple[Schedule, float]:
        self._all_actions()
        end = 0.0
        while self.clock:
            now, r = heapq.heappop(self.clock)
            rank = self.ranks[r]
            if now < rank.free_at:
                continue  # a stale wake-up: the rank is busy and will look again when it is free
            if (action := self._choose(rank, now)) is not None:
                end = max(end, self._start(action, rank, r, now))
        return Schedule(tuple(tuple(rank.row) for rank in self.ranks)), end

    def _all_actions(self) -> None:
        back = (Kind.INPUT, Kind.WEIGHT) if self.split else (Kind.BACKWARD,)
        for i in range(self.plan.micro_batches):
            replica = self.plan.replica_of(i)
            for stage in range(self.plan.depth):
                again = (Kind.RECOMPUTE,) if self.plan.recomputes(stage, i) else ()
                for kind in (Kind.FORWARD, *again, *back):
                    action = Action(kind, stage, i, replica)
                    needed = dependencies(action, self.plan)
                    self.unmet[action] = len(needed)
                    for result in needed:
                        self.waits_for.setdefault(result, []).append(action)
                    if not needed:
                        self._make_ready(action, 0.0)

    def _rank_of(self, action: Action) -> int:
        return self.plan.rank_of(action.stage, action.replica)

    def _make_ready(self, action: Action, now: float) -> None:
        r = self._rank_of(action)
        heapq.heappush(self.ranks[r].ready, (self.priority(action), now, action))
        heapq.heappush(self.clock, (now, r))

    def _choose(self, rank: _Rank, now: float) -> Action | None:
        """The most urgent action that is ready and, if it begins a sample, admitted.

        If one that is more urgent is about to be ready, the rank waits for it.
        """
        passed, chosen = [], None
        while rank.ready and chosen is None:
            entry = heapq.heappop(rank.ready)
            _, since, action = entry
            budget = rank.budgets.get(action.kind)
            if budget is not None and not budget.admits(action.micro_batch):
                passed.append(entry)
            elif since > now:
                passed.append(entry)
                if since <= now + self.patience:
                    break  # the clock has an entry for it
            else:
                chosen = action
        for entry in passed:
            heapq.heappush(rank.ready, entry)
        return chosen

    def _start(self, action: Action, rank: _Rank, r: int, now: float) -> float:
        rank.free_at = now + self.costs[action.stage].of(action.kind.value)
        rank.row.append(action)
        if (budget := rank.budgets.get(action.kind)) is not None:
            budget.admit(action.micro_batch)
        elif action.kind is not Kind.INPUT:
            for budget in rank.budgets.values():
                budget.release(action.micro_batch, action.stage)
        for result in results(action):
            for waiting in self.waits_for.get(result, ()):
                self.unmet[waiting] -= 1
                arrival = rank.free_at + travel(result, waiting, self.plan, self.costs)
                at = max(self.known_at.get(waiting, 0.0), arrival)
                self.known_at[waiting] = at
                if not self.unmet[waiting]:
                    self._make_ready(waiting, at)
        heapq.heappush(self.clock, (rank.free_at, r))
        return rank.free_at
