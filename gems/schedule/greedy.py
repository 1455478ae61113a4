"""The fastest order we can find under a cap on what each rank keeps for backward.

GEMS, GPipe, 1F1B and zero bubble are points of one continuum: how much a rank may keep, which
directions exist, whether backward is split. Here a clock runs over the costs; whenever a rank is
free it takes the most urgent action that is ready. The cap and the direction do the rest.

[Note: why admission cannot deadlock]
A micro-batch is admitted to a rank when its first forward there begins, and takes room for all its
stages on that rank at once; backward gives it back stage by stage. The oldest sample that a rank
has not admitted yet may always take what is free; a younger one only if room for one more, as
large as any, remains. Let i be the oldest unfinished sample. On a rank that has not admitted it,
everything live is younger, so the last of them left room enough for i when it was admitted. Hence
i can proceed everywhere, finishes, and so does every sample after it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import product
from math import inf

from gems.costs import Costs
from gems.errors import PlanError
from gems.plans import BIDIRECTIONAL, Plan
from gems.schedule.core import Action, Fact, Kind, Run, Schedule, gives, needs

Priority = Callable[[Action], tuple[int, ...]]

# What a free rank prefers among the actions that are ready; the smallest goes first.
# Input gradients free memory and unblock others; weight gradients can always wait.
PRIORITIES: dict[str, Priority] = {
    "drain, oldest first": lambda a: ("IBFW".index(a.kind.value), a.micro_batch, -a.stage),
    "drain, deepest first": lambda a: ("IBFW".index(a.kind.value), -a.stage, a.micro_batch),
    "fill, oldest first": lambda a: ("FIBW".index(a.kind.value), a.micro_batch, -a.stage),
    "oldest first": lambda a: (a.kind is Kind.WEIGHT, a.micro_batch, -a.stage),
}


@dataclass
class _Rank:
    """What a rank is doing while the order is built."""

    cap: float
    largest: float
    waiting: list[int]  # samples not admitted yet, oldest first
    live: float = 0.0
    free_at: float = 0.0
    admitted: set[int] = field(default_factory=set)
    ready: list[tuple[tuple[int, ...], float, Action]] = field(default_factory=list)
    row: list[Action] = field(default_factory=list)

    def admits(self, sample: int, room: float) -> bool:
        if sample in self.admitted:
            return True
        reserve = 0.0 if sample == self.waiting[0] else self.largest
        rounding = 1e-9 * self.largest
        return self.live + room + reserve <= self.cap + rounding

    def admit(self, sample: int, room: float) -> None:
        if sample not in self.admitted:
            self.admitted.add(sample)
            self.waiting.remove(sample)
            self.live += room


def shares(plan: Plan, costs: Costs | None) -> list[list[dict[int, float]]]:
    """What each sample keeps on each rank, stage by stage: bytes, or without costs parts of one."""
    kept: list[list[dict[int, float]]]
    kept = [[{} for _ in range(plan.micro_batches)] for _ in range(plan.ranks)]
    for i in range(plan.micro_batches):
        for stage in range(plan.depth):
            kept[plan.rank_for(stage, i)][i][stage] = costs[stage].stash if costs else 1.0
    if costs is None:
        kept = [[{s: 1 / len(part) for s in part} for part in row] for row in kept]
    return kept


def order(
    plan: Plan,
    costs: Costs,
    samples: int | None = None,
    memory: float | None = None,
    *,
    split: bool = True,
    priority: Priority = PRIORITIES["drain, oldest first"],
) -> Schedule:
    """The greedy order when a rank may keep so many samples, or so many bytes, or both."""
    return _Build(plan, costs, samples, memory, split, priority).run()[0]


def best(plan: Plan, costs: Costs, memory: float | None = None) -> Schedule:
    """The shortest greedy order, over priorities, split and whole backward, and caps.

    Without a cap of the plan's or the caller's, memory is worth something all the same: the
    smallest cap within two per cent of the fastest is taken.
    """
    caps = [plan.stashes] if plan.stashes else _caps(plan.micro_batches)
    fastest = _fastest(plan, costs, caps.pop(), memory)
    good = 1.02 * fastest[0]
    while caps:  # more room is hardly ever slower, so halving finds the smallest that is enough
        middle = len(caps) // 2
        found = _fastest(plan, costs, caps[middle], memory, good)
        if found[0] <= good:
            fastest, caps = found, caps[:middle]
        else:
            caps = caps[middle + 1 :]
    return fastest[1]


def least(plan: Plan, costs: Costs) -> float:
    """No order is shorter: the busiest rank works off all its micro-batches, after the first has
    come to it, and before the gradient of the last has gone all the way back.

    Under a cap of one sample, as in GEMS, a rank is taken while the sample is further on as well.
    """
    fill, drain = [0.0] * plan.depth, [0.0] * plan.depth
    for s in range(plan.depth):
        fill[s] = max((fill[q] + costs[q].f for q in plan.sources[s]), default=0.0)
        drain[s] = max((drain[q] + costs[q].i for q in plan.sources[s]), default=0.0)
    beyond = [0.0] * plan.depth
    if plan.schedule in BIDIRECTIONAL:
        for s in reversed(range(plan.depth)):
            later = (beyond[q] + costs[q].f + costs[q].i for q in plan.sinks[s])
            beyond[s] = max(later, default=0.0)
    loads, begins, ends = ([value] * plan.ranks for value in (0.0, inf, inf))
    share, more = divmod(plan.micro_batches, plan.directions)
    for direction, row in enumerate(plan.teams[: plan.directions]):
        for s, team in enumerate(row):
            for rank in team:
                loads[rank] += (share + (direction < more)) * (costs[s].seconds + beyond[s])
                begins[rank] = min(begins[rank], fill[s])
                # A weight gradient that was put off may well be the last that a rank does.
                ends[rank] = min(ends[rank], 0.0 if plan.split else drain[s])
    return max(map(sum, zip(loads, begins, ends, strict=True)))


def _fastest(
    plan: Plan, costs: Costs, cap: int, memory: float | None, good: float = 0.0
) -> tuple[float, Schedule]:
    """The shortest order under one cap, with its length; a whole backward wins a tie.

    The first that is at most `good`, or that no other could beat, is taken at once.
    """
    tried = []
    good = max(good, least(plan, costs) * (1 + 1e-9))
    shortest = min(cost.f for cost in costs.items)
    choices = product((False, True), PRIORITIES.values(), (0.0, PATIENCE * shortest))
    for split, priority, patience in choices:
        schedule, _ = _Build(plan, costs, cap, memory, split, priority, patience).run()
        schedule = joined(schedule, plan, costs) if split else schedule
        _, stops = times(schedule, plan, costs)
        tried.append((max(stops.values()), split, schedule))
        if tried[-1][0] <= good:
            break
    seconds, _, schedule = min(tried, key=lambda t: t[:2])
    return seconds, schedule


def _caps(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16 ... up to `most`."""
    steps = (n for power in range(most.bit_length() + 1) for n in (2**power, 3 * 2**power))
    return sorted({1, most, *(n for n in steps if n <= most)})


def joined(schedule: Schedule, plan: Plan, costs: Costs) -> Schedule:
    """I and W as one B wherever they follow each other and nobody waits for what I gives.

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
    known: dict[Fact, float] = {}
    starts: dict[Action, float] = {}
    stops: dict[Action, float] = {}
    for rank, action in Run(schedule, plan):
        arrivals = (known[f] + travel(f, action, plan, costs) for f in needs(action, plan))
        starts[action] = begin = max([free[rank], *arrivals])
        cost = costs[action.stage]
        guessed = action.kind in (Kind.INPUT, Kind.WEIGHT) and cost.halves == 1
        price = HALVES if guessed else 1.0
        free[rank] = stops[action] = begin + price * cost.of(action.kind.value)
        known.update(dict.fromkeys(gives(action), free[rank]))
    return starts, stops


def travel(fact: Fact, action: Action, plan: Plan, costs: Costs) -> float:
    """Seconds until what holds on one rank is known to an action on another."""
    if plan.rank_of(fact.stage, action.replica) == plan.rank_of(action.stage, action.replica):
        return 0.0
    return costs.travel(fact.what, fact.stage, action.stage)


PATIENCE = 0.25  # of the shortest forward: how long a rank may wait for something more urgent
HALVES = 1.1  # what a backward costs in two halves; 0.9 to 1.2 was seen on real networks


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
        self.shares = shares(plan, None if memory is None else costs)
        self.room = [[sum(part.values()) for part in row] for row in self.shares]
        self.ranks = []
        for r, kept in enumerate(self.room):
            cap = float("inf") if memory is None else memory
            if max(kept) > cap:
                raise PlanError(
                    f"rank {r} may keep {cap:,.0f} bytes for backward, but one micro-batch needs "
                    f"{max(kept):,.0f}; use more stages, a smaller micro-batch or more memory"
                )
            cap = min(cap, samples * max(kept)) if samples else cap
            self.ranks.append(_Rank(cap, max(kept), list(range(plan.micro_batches))))
        self.unmet: dict[Action, int] = {}
        self.known_at: dict[Action, float] = {}
        self.waits_for: dict[Fact, list[Action]] = {}
        self.clock: list[tuple[float, int]] = []

    def run(self) -> tuple[Schedule, float]:
        self._all_actions()
        end = 0.0
        while self.clock:
            now, r = heapq.heappop(self.clock)
            rank = self.ranks[r]
            if now < rank.free_at:
                continue  # a stale wake-up: the rank is busy and will look again when it is free
            if (action := self._choose(rank, r, now)) is not None:
                end = max(end, self._start(action, rank, r, now))
        return Schedule(tuple(tuple(rank.row) for rank in self.ranks)), end

    def _all_actions(self) -> None:
        back = (Kind.INPUT, Kind.WEIGHT) if self.split else (Kind.BACKWARD,)
        for i in range(self.plan.micro_batches):
            replica = self.plan.replica_of(i)
            for stage in range(self.plan.depth):
                for kind in (Kind.FORWARD, *back):
                    action = Action(kind, stage, i, replica)
                    facts = needs(action, self.plan)
                    self.unmet[action] = len(facts)
                    for fact in facts:
                        self.waits_for.setdefault(fact, []).append(action)
                    if not facts:
                        self._make_ready(action, 0.0)

    def _home(self, action: Action) -> int:
        return self.plan.rank_of(action.stage, action.replica)

    def _make_ready(self, action: Action, now: float) -> None:
        r = self._home(action)
        heapq.heappush(self.ranks[r].ready, (self.priority(action), now, action))
        heapq.heappush(self.clock, (now, r))

    def _choose(self, rank: _Rank, r: int, now: float) -> Action | None:
        """The most urgent action that is ready and, if it begins a sample, admitted.

        If one that is more urgent is about to be ready, the rank waits for it.
        """
        passed, chosen = [], None
        while rank.ready and chosen is None:
            entry = heapq.heappop(rank.ready)
            _, since, action = entry
            starts = action.kind is Kind.FORWARD
            i = action.micro_batch
            if starts and not rank.admits(i, self.room[r][i]):
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
        if action.kind is Kind.FORWARD:
            rank.admit(action.micro_batch, self.room[r][action.micro_batch])
        elif action.kind is not Kind.INPUT:
            rank.live -= self.shares[r][action.micro_batch][action.stage]
        for fact in gives(action):
            for waiting in self.waits_for.get(fact, ()):
                self.unmet[waiting] -= 1
                arrival = rank.free_at + travel(fact, waiting, self.plan, self.costs)
                at = max(self.known_at.get(waiting, 0.0), arrival)
                self.known_at[waiting] = at
                if not self.unmet[waiting]:
                    self._make_ready(waiting, at)
        heapq.heappush(self.clock, (rank.free_at, r))
        return rank.free_at
