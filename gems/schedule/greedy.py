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
from dataclasses import dataclass, field

from gems.costs import Costs
from gems.errors import PlanError
from gems.plan import Plan
from gems.schedule.core import Action, Fact, Kind, Schedule, gives, needs

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
    tried = []
    for cap in [plan.stashes] if plan.stashes else range(1, plan.micro_batches + 1):
        for split in (False, True):
            for priority in PRIORITIES.values():
                schedule, seconds = _Build(plan, costs, cap, memory, split, priority).run()
                tried.append((cap, seconds, split, schedule))
    limit = 1.02 * min(seconds for _, seconds, _, _ in tried)
    return min((t for t in tried if t[1] <= limit), key=lambda t: t[:3])[3]


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
    ) -> None:
        self.plan, self.costs, self.split, self.priority = plan, costs, split, priority
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
        """The most urgent action that is ready and, if it begins a sample, admitted."""
        passed, chosen = [], None
        while rank.ready and chosen is None:
            entry = heapq.heappop(rank.ready)
            _, since, action = entry
            starts = action.kind is Kind.FORWARD
            i = action.micro_batch
            if since > now or (starts and not rank.admits(i, self.room[r][i])):
                passed.append(entry)
            else:
                chosen = action
        for entry in passed:
            heapq.heappush(rank.ready, entry)
        return chosen

    def _start(self, action: Action, rank: _Rank, r: int, now: float) -> float:
        cost = self.costs[action.stage]
        seconds = {"F": cost.f, "B": cost.b, "I": cost.i, "W": cost.w}[action.kind.value]
        rank.free_at = now + seconds
        rank.row.append(action)
        if action.kind is Kind.FORWARD:
            rank.admit(action.micro_batch, self.room[r][action.micro_batch])
        elif action.kind is not Kind.INPUT:
            rank.live -= self.shares[r][action.micro_batch][action.stage]
        for fact in gives(action):
            for waiting in self.waits_for.get(fact, ()):
                self.unmet[waiting] -= 1
                at = max(self.known_at.get(waiting, 0.0), rank.free_at)
                self.known_at[waiting] = at
                if not self.unmet[waiting]:
                    self._make_ready(waiting, at)
        heapq.heappush(self.clock, (rank.free_at, r))
        return rank.free_at
