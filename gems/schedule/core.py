"""Actions, the schedule that orders them per rank, and the one rule of what must precede what.

The text form is what one writes on a whiteboard, and it parses back:

    2F0      forward of stage 2, micro-batch 0            2B0     backward
    2I0      its input gradient                           2W0     its weight gradient
    2R0      recompute its forward, to have the activations that it did not save
    2S0      store its activations, on the host or on disk
    2L0      load them again
    2F0<1    post the receive of 2F0's input from stage 1
    2F0>3    send 2F0's output to stage 3
    2B0<3    post the receive of 2B0's gradient from 3    2B0>1   send the input's gradient to 1
    2A       all-reduce the gradients of stage 2 over its replica group
    2U       unshard its weights: all-gather them (zero=3), or fetch them from host or disk
    2D       reshard them: drop all but the own shard
    2O       optimizer step on its weights, with the gradients that were reduced last
    2F0@1    the same, in replica 1
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from gems.errors import ScheduleError, short
from gems.plans.plan import Plan


class Kind(str, Enum):
    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    WEIGHT = "W"
    RECOMPUTE = "R"
    ALL_REDUCE = "A"
    UNSHARD = "U"
    RESHARD = "D"
    OPTIMIZER_STEP = "O"
    STORE = "S"
    LOAD = "L"


# Of a stage, not of a micro-batch.
OF_STAGE = (Kind.ALL_REDUCE, Kind.UNSHARD, Kind.RESHARD, Kind.OPTIMIZER_STEP)
AWAY = (Kind.STORE, Kind.LOAD)  # memory comes and goes, while other actions run
TOGETHER = (Kind.ALL_REDUCE, Kind.UNSHARD)  # all holders of a stage take part


class Fact(NamedTuple):
    """Something that holds once an action is done: a stage's `output`, `activations` (if they were
    recomputed), `gradient` or `weight`; that activations are `stored`, or `loaded` again; or, of
    all micro-batches, once the whole replica group is through: its weights are `gathered`, its
    gradients `summed`."""

    what: str
    stage: int
    micro_batch: int


class Message(NamedTuple):
    """One way of one micro-batch between two stages. `what` is `output` or `gradient`."""

    what: str
    source: int
    target: int
    micro_batch: int


@dataclass(frozen=True)
class Action:
    """One thing that a rank does. With a `peer` stage it moves a message: `way` is `<` or `>`."""

    kind: Kind
    stage: int
    micro_batch: int = 0
    replica: int = 0
    way: str = ""
    peer: int = 0

    def __str__(self) -> str:
        if self.kind in OF_STAGE:
            return f"{self.stage}{self.kind.value}"
        to = f"{self.way}{self.peer}" if self.way else ""
        at = f"@{self.replica}" if self.replica else ""
        return f"{self.stage}{self.kind.value}{self.micro_batch}{to}{at}"

    @cached_property
    def computes(self) -> bool:
        return not self.way and self.kind not in OF_STAGE and self.kind not in AWAY

    @property
    def message(self) -> Message:
        """What is moved, named the same on both ends."""
        what = "output" if self.kind is Kind.FORWARD else "gradient"
        ends = (self.stage, self.peer) if self.way == ">" else (self.peer, self.stage)
        return Message(what, *ends, self.micro_batch)


LONGEST = 60  # characters of an action: numbers of a dozen digits
SPELLED = re.compile(
    r"(\d+)([FBIW]|[RSL](?!\d+[<>]))(\d+)(?:([<>])(\d+))?(?:@(\d+))?|(\d+)([AUDO])"
)


def parse_action(text: str) -> Action:
    match = SPELLED.fullmatch(text)
    if not match:
        raise ScheduleError(
            f"{short(text, 60)!r} is not an action; "
            "write one like 2F0, 1B3@1, 2R0, 2S0, 2F0>3, 1A or 1U"
        )
    if len(text) > LONGEST:
        raise ScheduleError(f"{short(text, 60)!r} has numbers that no plan has; give smaller ones")
    stage, kind, micro_batch, way, peer, replica, whole, letter = match.groups()
    if whole:
        return Action(Kind(letter), int(whole))
    return Action(
        Kind(kind), int(stage), int(micro_batch), int(replica or 0), way or "", int(peer or 0)
    )


@dataclass(frozen=True)
class Schedule:
    """The actions of every rank, in order."""

    ranks: tuple[tuple[Action, ...], ...]

    def __str__(self) -> str:
        rows = (" ".join(map(str, row)) for row in self.ranks)
        return "".join(f"{rank}: {row}".rstrip() + "\n" for rank, row in enumerate(rows))

    def __iter__(self) -> Iterator[tuple[int, Action]]:
        """Every action with its rank, rank by rank."""
        return ((rank, action) for rank, row in enumerate(self.ranks) for action in row)


def parse(text: str) -> Schedule:
    """The schedule that `str()` wrote. Blank lines and `# comments` are passed over."""
    rows: list[tuple[Action, ...]] = []
    for line in text.splitlines():
        line = line.partition("#")[0].strip()
        if not line:
            continue
        rank, colon, actions = line.partition(":")
        if not colon or rank.strip() != str(len(rows)):
            raise ScheduleError(
                f"expected a line '{len(rows)}: actions of rank {len(rows)}', got {line[:40]!r}"
            )
        rows.append(tuple(map(parse_action, actions.split())))
    return Schedule(tuple(rows))


def needs(action: Action, plan: Plan) -> tuple[Fact, ...]:
    """What must hold before `action` may run. The only place that knows the order of training."""
    s, i = action.stage, action.micro_batch
    if action.way == ">":
        return (Fact("output" if action.kind is Kind.FORWARD else "gradient", s, i),)
    if action.way == "<":
        return ()
    if action.kind is Kind.FORWARD:
        return tuple(Fact("output", q, i) for q in plan.sources[s])
    if action.kind is Kind.WEIGHT:
        return (Fact("gradient", s, i),)
    if action.kind in (Kind.RECOMPUTE, Kind.STORE):
        return (Fact("output", s, i),)
    if action.kind is Kind.LOAD:
        return (Fact("stored", s, i),)
    if action.kind in OF_STAGE:
        return ()  # the ranks' own order decides; `check` sees to it that nothing comes after
    # So it does with what was stored: `check` sees to it that it is loaded in time.
    own = "activations" if plan.recomputes(s, i) else "output"
    return (Fact(own, s, i), *(Fact("gradient", q, i) for q in plan.sinks[s]))


GIVES = {
    Kind.FORWARD: ("output",),
    Kind.RECOMPUTE: ("activations",),
    Kind.BACKWARD: ("gradient", "weight"),
    Kind.INPUT: ("gradient",),
    Kind.WEIGHT: ("weight",),
    Kind.STORE: ("stored",),
    Kind.LOAD: ("loaded",),
}


def gives(action: Action) -> tuple[Fact, ...]:
    """What holds once an action of a micro-batch is done."""
    if action.way or action.kind in OF_STAGE:
        return ()
    return tuple(Fact(what, action.stage, action.micro_batch) for what in GIVES[action.kind])


class Meetings:
    """Sums and gathers under way. One is through when all the holders of its stage have come to it,
    and are through with all that they began before: collectives of a device run in order."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.queues: list[deque[Action]] = [deque() for _ in range(plan.world)]
        self.waiting: Counter[Action] = Counter()  # holders that have it at their head
        self.begun: list[Counter[Action]] = [Counter() for _ in range(plan.world)]
        self.ended: Counter[Action] = Counter()

    def begin(self, rank: int, action: Action) -> list[Action]:
        """A rank has come to it. Gives those that are through now, in order."""
        if not _meets(action, self.plan):
            return [action]
        self.begun[rank][action] += 1
        self.queues[rank].append(action)
        through: list[Action] = []
        heads = [rank] if len(self.queues[rank]) == 1 else []
        while heads:
            head = self.queues[heads.pop()][0]
            self.waiting[head] += 1
            holders = self.plan.replica_groups[head.stage]
            if self.waiting[head] == len(holders):
                del self.waiting[head]
                self.ended[head] += 1
                through.append(head)
                for holder in holders:
                    self.queues[holder].popleft()
                heads += [holder for holder in holders if self.queues[holder]]
        return through

    def over(self, rank: int, action: Action) -> bool:
        """Whether all of it that a rank has begun is through."""
        return self.ended[action] >= self.begun[rank][action]


def _meets(action: Action, plan: Plan) -> bool:
    """Whether it takes others: weights that are put away each rank fetches for itself, unless they
    are shared out as well."""
    return action.kind in TOGETHER and (action.kind is not Kind.UNSHARD or plan.zero == 3)


def awaits(action: Action, plan: Plan, summed: Sequence[int]) -> Action | None:
    """The sum or gather that a rank must be through with before an action of a lowered schedule.

    An update waits for its gradients' sum. Where weights come and go each action waits for its
    stage's. Where gradients go once they are summed, a sum waits for the one before it, so that no
    more than one stage's are there as a whole.
    """
    if action.kind is Kind.OPTIMIZER_STEP:
        return Action(Kind.ALL_REDUCE, action.stage)
    if action.computes and (plan.zero == 3 or "weights" in plan.offloaded_state):
        return Action(Kind.UNSHARD, action.stage)
    if action.kind is Kind.ALL_REDUCE and plan.frees_gradients and summed:
        return Action(Kind.ALL_REDUCE, summed[-1])
    return None


class Run:
    """A schedule run without time: iterating gives (rank, action) in an order that could happen.

    Every turn each rank does its next action if all it needs holds. The ranks of a team do a
    stage's work together: when all of them have come to it, and all of them have what it needs.
    In a lowered schedule another rank's part of a fact holds here once that rank has sent its
    message and its receive was posted.
    """

    def __init__(self, schedule: Schedule, plan: Plan) -> None:
        self.schedule, self.plan = schedule, plan
        self.lowered = any(action.way for _, action in schedule)
        self.cut = plan.cut
        self.at = [0] * len(schedule.ranks)
        self.known: list[set[Fact]] = [set() for _ in schedule.ranks]
        self.posted: list[set[Message]] = [set() for _ in schedule.ranks]
        self.sent: list[set[Message]] = [set() for _ in schedule.ranks]
        kinds = {action.kind for _, action in schedule}
        waits = plan.frees_gradients or Kind.OPTIMIZER_STEP in kinds
        self.meets = waits and not kinds.isdisjoint(TOGETHER)
        self.meetings = Meetings(plan)
        self.summed: list[list[int]] = [[] for _ in schedule.ranks]
        self.through: list[Action] = []  # with the last action

    def __iter__(self) -> Iterator[tuple[int, Action]]:
        return ((rank, action) for team, action in self.turns() for rank in team)

    def turns(self) -> Iterator[tuple[tuple[int, ...], Action]]:
        """The same, with all the ranks that do an action together."""
        awake = [True] * len(self.schedule.ranks)  # something has changed for them
        while any(awake):
            for rank in (r for r in range(len(awake)) if awake[r]):
                awake[rank] = False
                action = self.head(rank)
                if action is None or self.missing(rank, action):
                    continue
                team = self._team(rank, action)
                if rank != team[0]:
                    awake[team[0]] = True
                elif not self.absent(rank, team):
                    self.through = []
                    for member in team:
                        self._do(member, action)
                        awake[member] = True
                    for other in self._concerned(action):
                        awake[other] = True
                    yield team, action

    def _concerned(self, action: Action) -> Iterator[int]:
        """The ranks that an action may have been waited for by."""
        for meeting in self.through:
            yield from self.plan.replica_groups[meeting.stage]
        if action.way == ">":
            yield from self.plan.spatial_group_for(action.peer, action.micro_batch)
        elif action.computes and not self.lowered:
            for stage in (*self.plan.sources[action.stage], *self.plan.sinks[action.stage]):
                yield from self.plan.spatial_group_for(stage, action.micro_batch)

    def head(self, rank: int) -> Action | None:
        """What a rank has come to; None if it is done."""
        row, at = self.schedule.ranks[rank], self.at[rank]
        return row[at] if at < len(row) else None

    def _team(self, rank: int, action: Action) -> tuple[int, ...]:
        """The ranks that must do this together: messages and sums are every rank's own."""
        if not (self.cut and action.computes):
            return (rank,)
        team = self.plan.spatial_group_for(action.stage, action.micro_batch)
        return team if rank in team else (rank,)

    def _do(self, rank: int, action: Action) -> None:
        self.at[rank] += 1
        self.known[rank].update(gives(action))
        if action.way == ">":
            self.sent[rank].add(action.message)
        elif action.way == "<":
            self.posted[rank].add(action.message)
        elif self.meets and action.kind in TOGETHER:
            self.through += self.meetings.begin(rank, action)
            if action.kind is Kind.ALL_REDUCE:
                self.summed[rank].append(action.stage)

    def missing(self, rank: int, action: Action) -> list[Fact]:
        facts = [fact for fact in needs(action, self.plan) if not self._holds(rank, fact, action)]
        meeting = awaits(action, self.plan, self.summed[rank]) if self.meets else None
        if meeting is not None and not self.meetings.over(rank, meeting):
            what = "gathered" if meeting.kind is Kind.UNSHARD else "summed"
            facts.append(Fact(what, meeting.stage, 0))
        return facts

    def _holds(self, rank: int, fact: Fact, action: Action) -> bool:
        if fact.stage == action.stage:
            return fact in self.known[rank]
        message = Message(fact.what, fact.stage, action.stage, fact.micro_batch)
        for other in self.plan.spatial_group_for(fact.stage, fact.micro_batch):
            if other == rank or not self.lowered:
                if fact not in self.known[other]:
                    return False
            elif message not in self.sent[other] or message not in self.posted[rank]:
                return False
        return True

    def absent(self, rank: int, team: tuple[int, ...] = ()) -> list[int]:
        """The others of a rank's team that have not come to its action, or cannot do it either."""
        if (action := self.head(rank)) is None:
            return []
        others = [r for r in team or self._team(rank, action) if r != rank]
        return [r for r in others if self.head(r) != action or self.missing(r, action)]

    def stuck(self) -> list[tuple[int, int, Action, list[Fact]]]:
        """For each rank that could not finish: rank, step, action and what it waits for."""
        waiting = [(rank, at, self.head(rank)) for rank, at in enumerate(self.at)]
        return [(r, at, a, self.missing(r, a)) for r, at, a in waiting if a is not None]
