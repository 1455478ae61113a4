"""The state machine of a schedule: which action may run next, and what it waits for.

It is pure, and knows neither seconds nor bytes. Its drivers add those: `predict/simulate.py` lays
its transitions out in time, `predict/memory_trace.py` counts bytes by what is in flight on each
rank, `validate.py` reports where it gets stuck, and `engine/executor.py` runs one rank for real.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from typing import NamedTuple

from gems.plans.plan import Plan
from gems.schedule.action import COLLECTIVES, OFFLOADS, Action, Kind, Message, Schedule
from gems.schedule.dependencies import Result, dependencies, results

# These begin here and complete later, while the rank goes on.
BEGUN = (*COLLECTIVES, *OFFLOADS, Kind.OPTIMIZER_STEP)


class InFlight:
    """The actions that one rank has begun and not yet waited for.

    in flight        until the rank comes to
    unshard          a compute action of its stage, or its reshard
    store            the next store or load, or the second compute action from now
    load             the compute action that reads the activations
    all-reduce       an optimizer step; also the next all-reduce, where gradients are freed once
                     they are reduced, so that whole gradients of one stage at most exist
    optimizer step   the next one
    all-gather       the end; the next all-gather, where it brings offloaded weights
    """

    def __init__(self, plan: Plan) -> None:
        self.frees_gradients = plan.residency[0].frees_gradients
        self.loads_weights = bool(plan.residency[0].weights_offload)
        self.actions: list[Action] = []
        self.computed = False  # since the store in flight began

    def awaited(self, action: Action) -> list[Action]:
        """What must be complete before an action."""
        if not self.actions:
            return []
        return _steps_last([begun for begun in self.actions if self._waits(action, begun)])

    def _waits(self, action: Action, begun: Action) -> bool:
        if begun.kind is Kind.UNSHARD:
            return action.stage == begun.stage and (action.computes or action.kind is Kind.RESHARD)
        if begun.kind is Kind.STORE:
            return action.kind in OFFLOADS or (action.computes and self.computed)
        if begun.kind is Kind.LOAD:
            return action.unit == begun.unit and action.computes
        if action.kind is Kind.OPTIMIZER_STEP:
            return True
        if action.kind is begun.kind is Kind.ALL_GATHER:
            return self.loads_weights
        reduces = action.kind is begun.kind is Kind.ALL_REDUCE
        return reduces and self.frees_gradients

    def begin(self, action: Action) -> list[Action]:
        """The rank comes to an action. Returns what must be complete before."""
        if found := self.awaited(action):
            self.actions = [begun for begun in self.actions if begun not in found]
        if action.computes:
            self.computed = True
        elif action.kind in BEGUN and not action.way:
            self.actions.append(action)
            self.computed = self.computed and action.kind is not Kind.STORE
        return found

    def end(self) -> list[Action]:
        """The rank comes to the end of its actions. Returns all that is in flight."""
        found, self.actions = _steps_last(self.actions), []
        return found


def _steps_last(actions: list[Action]) -> list[Action]:
    return sorted(actions, key=lambda action: action.kind is Kind.OPTIMIZER_STEP)


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
        if not takes_others(action, self.plan):
            return [action]
        self.begun[rank][action] += 1
        self.queues[rank].append(action)
        completed: list[Action] = []
        heads = [rank] if len(self.queues[rank]) == 1 else []
        while heads:
            head = self.queues[heads.pop()][0]
            self.waiting[head] += 1
            group = group_of(head, self.plan)
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


def group_of(collective: Action, plan: Plan) -> tuple[int, ...]:
    """The ranks of a collective."""
    if collective.kind is Kind.TIED:
        return plan.tied_groups[collective.stage]
    return plan.replica_groups[collective.stage]


def takes_others(action: Action, plan: Plan) -> bool:
    """Whether it is collective: offloaded weights each rank fetches for itself, unless they are
    sharded as well."""
    return action.kind in COLLECTIVES and (
        action.kind is not Kind.UNSHARD or plan.residency[action.stage].shards_weights
    )


class Transition(NamedTuple):
    """One action of one rank, or of all ranks of a spatial group, which compute it jointly."""

    ranks: tuple[int, ...]
    action: Action
    awaited: list[list[Action]]  # of each rank, what was in flight and is complete before
    completed: list[Action]  # collectives that all ranks have reached by this


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
        self.in_flight = [InFlight(plan) for _ in schedule.ranks]
        self.collectives = Collectives(plan)

    def __iter__(self) -> Iterator[tuple[int, Action]]:
        return ((rank, step.action) for step in self.transitions() for rank in step.ranks)

    def transitions(self) -> Iterator[Transition]:
        awake = [True] * len(self.schedule.ranks)  # something has changed for them
        while any(awake):
            for rank in (r for r in range(len(awake)) if awake[r]):
                awake[rank] = False
                action = self.next_action(rank)
                if action is None or self.unmet(rank, action):
                    continue
                group = self._group(rank, action)
                if rank != group[0]:
                    awake[group[0]] = awake[group[0]] or self.next_action(group[0]) == action
                elif not self.unready(rank, group):
                    step = self._advance(group, action)
                    for other in (*group, *self._concerned(step)):
                        awake[other] = True
                    yield step

    def _concerned(self, step: Transition) -> Iterator[int]:
        """The ranks that may have waited for an action."""
        action = step.action
        for collective in step.completed:
            yield from group_of(collective, self.plan)
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

    def _advance(self, ranks: tuple[int, ...], action: Action) -> Transition:
        found, completed = results(action), []
        awaited = [self.in_flight[rank].begin(action) for rank in ranks]
        for rank in ranks:
            self.at[rank] += 1
            self.known[rank].update(found)
        if action.way:
            (self.sent if action.way == ">" else self.posted)[ranks[0]].add(action.message)
        elif action.kind in COLLECTIVES:
            completed = self.collectives.begin(ranks[0], action)
        return Transition(ranks, action, awaited, completed)

    def unmet(self, rank: int, action: Action) -> list[Result]:
        """The dependencies of an action that a rank still waits for."""
        needed = dependencies(action, self.plan)
        found = [result for result in needed if not self._holds(rank, result, action)]
        for begun in self.in_flight[rank].awaited(action):
            if begun.kind in COLLECTIVES and not self.collectives.completed(rank, begun):
                found.append(Result(begun.kind.value, begun.stage, 0))
        return found

    def _holds(self, rank: int, result: Result, action: Action) -> bool:
        if result.stage == action.stage:
            return result in self.known[rank]
        what, stage, micro_batch, part = result
        message = Message(what, stage, action.stage, micro_batch, part)
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
