"""The state machine of a schedule: which action may run next, which collectives are complete."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator

from gems.plans.plan import Plan
from gems.schedule.action import COLLECTIVES, Action, Kind, Message, Schedule
from gems.schedule.dependencies import Result, collective_before, dependencies, results


class Collectives:
    """Collectives in flight. One is complete when every rank of its stage's replica group has
    reached it, and has completed all it began before: a device runs its collectives in order."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.queues: list[deque[Action]] = [deque() for _ in range(plan.world)]
        self.waiting: Counter[Action] = Counter()  # ranks that have it at the head of their queue
        self.begun: list[Counter[Action]] = [Counter() for _ in range(plan.world)]
        self.ended: Counter[Action] = Counter()

    def begin(self, rank: int, action: Action) -> list[Action]:
        """A rank has reached a collective. Returns those that are complete now, in order."""
        if not _takes_others(action, self.plan):
            return [action]
        self.begun[rank][action] += 1
        self.queues[rank].append(action)
        completed: list[Action] = []
        heads = [rank] if len(self.queues[rank]) == 1 else []
        while heads:
            head = self.queues[heads.pop()][0]
            self.waiting[head] += 1
            group = self.plan.replica_groups[head.stage]
            if self.waiting[head] == len(group):
                del self.waiting[head]
                self.ended[head] += 1
                completed.append(head)
                for member in group:
                    self.queues[member].popleft()
                heads += [member for member in group if self.queues[member]]
        return completed

    def completed(self, rank: int, action: Action) -> bool:
        """Whether all of it that a rank has begun is complete."""
        return self.ended[action] >= self.begun[rank][action]


def _takes_others(action: Action, plan: Plan) -> bool:
    """Whether it is collective: offloaded weights each rank fetches for itself, unless they are
    sharded as well."""
    return action.kind in COLLECTIVES and (action.kind is not Kind.UNSHARD or plan.zero == 3)


class ScheduleMachine:
    """Runs a schedule without time. Iterating gives (rank, action) in an order that can happen.

    A rank runs its next action once all dependencies are there. The ranks of a spatial group
    compute a stage jointly: once all of them have reached the action and have its dependencies.
    In a lowered schedule another rank's result counts as there once that rank has sent its message
    and the receive was posted.
    """

    def __init__(self, schedule: Schedule, plan: Plan) -> None:
        self.schedule, self.plan = schedule, plan
        self.lowered = any(action.way for _, action in schedule)
        self.cut = plan.cut
        self.at = [0] * len(schedule.ranks)
        self.known: list[set[Result]] = [set() for _ in schedule.ranks]
        self.posted: list[set[Message]] = [set() for _ in schedule.ranks]
        self.sent: list[set[Message]] = [set() for _ in schedule.ranks]
        kinds = {action.kind for _, action in schedule}
        waits = plan.frees_gradients or Kind.OPTIMIZER_STEP in kinds
        self.tracks_collectives = waits and not kinds.isdisjoint(COLLECTIVES)
        self.collectives = Collectives(plan)
        self.reduced: list[list[int]] = [[] for _ in schedule.ranks]
        self.completed: list[Action] = []  # collectives, by the last action

    def __iter__(self) -> Iterator[tuple[int, Action]]:
        return ((rank, action) for ranks, action in self.by_group() for rank in ranks)

    def by_group(self) -> Iterator[tuple[tuple[int, ...], Action]]:
        """The same, with all the ranks that run an action jointly."""
        awake = [True] * len(self.schedule.ranks)  # something has changed for them
        while any(awake):
            for rank in (r for r in range(len(awake)) if awake[r]):
                awake[rank] = False
                action = self.next_action(rank)
                if action is None or self.unmet(rank, action):
                    continue
                group = self._group(rank, action)
                if rank != group[0]:
                    awake[group[0]] = True
                elif not self.unready(rank, group):
                    self.completed = []
                    for member in group:
                        self._advance(member, action)
                        awake[member] = True
                    for other in self._concerned(action):
                        awake[other] = True
                    yield group, action

    def _concerned(self, action: Action) -> Iterator[int]:
        """The ranks that may have waited for an action."""
        for collective in self.completed:
            yield from self.plan.replica_groups[collective.stage]
        if action.way == ">":
            yield from self.plan.spatial_group_for(action.peer, action.micro_batch)
        elif action.computes and not self.lowered:
            for stage in (*self.plan.sources[action.stage], *self.plan.sinks[action.stage]):
                yield from self.plan.spatial_group_for(stage, action.micro_batch)

    def next_action(self, rank: int) -> Action | None:
        """The action that a rank has reached; None at the end."""
        row, at = self.schedule.ranks[rank], self.at[rank]
        return row[at] if at < len(row) else None

    def _group(self, rank: int, action: Action) -> tuple[int, ...]:
        """The ranks that must run this jointly; messages and collectives a rank begins alone."""
        if not (self.cut and action.computes):
            return (rank,)
        group = self.plan.spatial_group_for(action.stage, action.micro_batch)
        return group if rank in group else (rank,)

    def _advance(self, rank: int, action: Action) -> None:
        self.at[rank] += 1
        self.known[rank].update(results(action))
        if action.way == ">":
            self.sent[rank].add(action.message)
        elif action.way == "<":
            self.posted[rank].add(action.message)
        elif self.tracks_collectives and action.kind in COLLECTIVES:
            self.completed += self.collectives.begin(rank, action)
            if action.kind is Kind.ALL_REDUCE:
                self.reduced[rank].append(action.stage)

    def unmet(self, rank: int, action: Action) -> list[Result]:
        """The dependencies of an action that a rank still waits for."""
        needed = dependencies(action, self.plan)
        found = [result for result in needed if not self._holds(rank, result, action)]
        if not self.tracks_collectives:
            return found
        collective = collective_before(action, self.plan, self.reduced[rank])
        if collective is not None and not self.collectives.completed(rank, collective):
            what = "gathered" if collective.kind is Kind.UNSHARD else "reduced"
            found.append(Result(what, collective.stage, 0))
        return found

    def _holds(self, rank: int, result: Result, action: Action) -> bool:
        if result.stage == action.stage:
            return result in self.known[rank]
        message = Message(result.what, result.stage, action.stage, result.micro_batch)
        for other in self.plan.spatial_group_for(result.stage, result.micro_batch):
            if other == rank or not self.lowered:
                if result not in self.known[other]:
                    return False
            elif message not in self.sent[other] or message not in self.posted[rank]:
                return False
        return True

    def unready(self, rank: int, group: tuple[int, ...] = ()) -> list[int]:
        """The other ranks of a spatial group that have not reached its action, or cannot run it."""
        if (action := self.next_action(rank)) is None:
            return []
        others = [r for r in group or self._group(rank, action) if r != rank]
        return [r for r in others if self.next_action(r) != action or self.unmet(r, action)]

    def stuck(self) -> list[tuple[int, int, Action, list[Result]]]:
        """For each rank that could not finish: rank, step, action and its unmet dependencies."""
        waiting = [(rank, at, self.next_action(rank)) for rank, at in enumerate(self.at)]
        return [(r, at, a, self.unmet(r, a)) for r, at, a in waiting if a is not None]
