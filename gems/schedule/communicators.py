"""Communicators of a plan, and what each rank issues on them, in the order of its host.

A communicator is what NCCL pairs operations in: the k-th operation of one rank goes with the k-th
of the others. Each has a stream of its own on the device of each of its ranks.

    kind      ranks                      carries
    group     of a replica group, or     all-reduce (A), all-gather (U, G) of gradients and weights;
              of tied stages             of gradients of tied weights (T)
    link      source, target             messages between stages, in one direction
    spatial   of a spatial group         exchanges between tiles or slices, inside a stage
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gems.plans.plan import Plan
from gems.schedule.action import Action, Kind, Message, Schedule
from gems.schedule.lower.messages import Receipts, receipts
from gems.schedule.lower.reduce import last_backwards, overlaps, start_of_update
from gems.schedule.machine import InFlight, group_of, takes_others

BUFFERS = 2  # that a collective has at least, as with two types of weights
CHUNKS = 2  # of gradients that may begin inside backward


class Communicator(NamedTuple):
    """Sorting them gives the one order in which all ranks set them up."""

    kind: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        if self.kind == "link":
            return "the link from rank {} to rank {}".format(*self.ranks)
        name = "the group" if self.kind == "group" else "the spatial group"
        return f"{name} of ranks {', '.join(map(str, self.ranks))}"


def communicators(
    plan: Plan, tied: Iterable[tuple[int, ...]] | None = None
) -> tuple[Communicator, ...]:
    """All that the steps of a plan use, in the order of their set-up.

    `tied` are the ranks of each tied weight, where the model is known. (Of weights that some of the
    stages of a set share, fewer ranks than all of the set's have them.)
    """
    found: set[Communicator] = set()
    groups = plan.tied_groups.values() if tied is None else tied
    found.update(Communicator("group", ranks) for ranks in (*plan.replica_groups, *groups))
    for replica in {plan.replica_of(i) for i in range(plan.total)}:
        for stage in range(plan.depth):
            found.add(_spatial(plan.spatial_group_of(stage, replica)))
        for edge in plan.chain:
            one, other = (plan.spatial_group_of(stage, replica) for stage in edge)
            pairs = [(a, b) for a in one for b in other if a != b]
            found.update(_link(a, b) for a, b in pairs)
            found.update(_link(b, a) for a, b in pairs)
    return tuple(sorted(c for c in found if len(c.ranks) > 1))


def most_communicators(plan: Plan) -> int:
    """Of the rank that is in most of those that the plan's steps use."""
    counts = Counter(rank for found in communicators(plan) for rank in found.ranks)
    return max(counts.values(), default=0)


def _link(source: int, target: int) -> Communicator:
    return Communicator("link", (source, target))


def _spatial(group: tuple[int, ...]) -> Communicator:
    """The second direction of a plan has the ranks of a group in another order, and shares it."""
    return Communicator("spatial", tuple(sorted(group)))


class Operation(NamedTuple):
    """One thing that a rank's host issues: on a communicator, or else on its compute stream.

    An operation on a communicator begins when the compute stream has come to where it was issued.
    One on the compute stream begins when `waits`, earlier operations of this rank, are complete.
    """

    communicator: Communicator | None
    action: Action | None  # None: the end of the step
    waits: tuple[int, ...] = ()

    @property
    def subject(self) -> Message | Action | None:
        """What is moved or summed, the same for all operations that pair up."""
        return self.action.message if self.action is not None and self.action.way else self.action


def issued(schedule: Schedule, plan: Plan) -> list[list[Operation]]:
    """For each rank what the engine issues in a step of a lowered schedule.

    How many exchanges a stage has, and with whom, depends on the model: here each compute action of
    a spatial group has one, of all its ranks. All-reduces of tied weights that only some ranks of a
    set have count as of all; they come in one order everywhere. A message is one operation.
    """
    proofs = receipts(schedule, plan.unrolled)
    return [
        _Host(rank, plan, row, proofs[rank]).operations for rank, row in enumerate(schedule.ranks)
    ]


class _Host:
    """One rank's host in one step: gems/engine/executor.py and messages.py without tensors."""

    def __init__(self, rank: int, plan: Plan, row: Sequence[Action], proofs: Receipts) -> None:
        self.rank, self.plan, self.proofs = rank, plan.unrolled, proofs
        self.operations: list[Operation] = []
        self.inbox: dict[Message, list[tuple[int, int]]] = {}
        self.sending: dict[tuple[Message, int], int] = {}
        self.begun: dict[Action, list[int]] = defaultdict(list)
        self.in_flight = InFlight(self.plan)
        self.last = last_backwards(row, plan)
        self.alone = {s for s in plan.stages_on[rank] if overlaps(plan, s)}
        self.rest: dict[Action, int] = {}
        end = start_of_update(row, plan)
        for part in (row[:end], row[end:]):
            for action in part:
                self._run(action)
            self._finish()

    def _run(self, action: Action) -> None:
        waits = [i for begun in self.in_flight.begin(action) for i in self._completed(begun)]
        if action.computes:
            self._compute(action, waits)
            return
        if waits:
            self._issue(None, action, waits)
        if action.way == ">":
            for other in self._others(action):
                sent = self._issue(_link(self.rank, other), action)
                self.sending[action.message, other] = sent
        elif action.way:
            self.inbox[action.message] = [
                (other, self._issue(_link(other, self.rank), action))
                for other in self._others(action)
            ]
        elif takes_others(action, self.plan):
            self._begin(action)

    def _issue(
        self, on: Communicator | None, action: Action | None, waits: Iterable[int] = ()
    ) -> int:
        self.operations.append(Operation(on, action, tuple(waits)))
        return len(self.operations) - 1

    def _others(self, action: Action) -> list[int]:
        group = self.plan.spatial_group_for(action.peer, action.micro_batch)
        return [rank for rank in group if rank != self.rank]

    def _compute(self, action: Action, waits: list[int]) -> None:
        for message in self._received(action):
            for source, received in self.inbox.pop(message, ()):
                freed = ((m, source) for m in self.proofs.get((message, source), ()))
                waits += [received, *(self.sending.pop(x) for x in freed if x in self.sending)]
        self._issue(None, action, waits)
        self._exchange(action)
        # Chunks of gradients begin where all ranks of a spatial group have them complete. Copies
        # may differ: without samples, say, they begin them after backward. Here every other does.
        begins = action in self.last and self.plan.replica_of(action.micro_batch) % 2 == 0
        reduce = Action(Kind.ALL_REDUCE, action.stage)
        if begins:
            self._collective(reduce, CHUNKS // 2)
        if action.kind is Kind.BACKWARD and action.stage in self.alone:
            self._exchange(action)
        if begins:
            self._collective(reduce, CHUNKS // 2)

    def _exchange(self, action: Action) -> None:
        group = self.plan.spatial_group_for(action.stage, action.micro_batch)
        if len(group) > 1:
            self._issue(None, action, [self._issue(_spatial(group), action)])

    def _received(self, action: Action) -> Iterable[Message]:
        """The messages from other stages that a compute action reads."""
        s, i, part = action.unit
        if action.kind is Kind.FORWARD:
            return [Message("output", q, s, i, part) for q in self.plan.sources[s]]
        if action.kind in (Kind.BACKWARD, Kind.INPUT):
            return [Message("gradient", q, s, i, part) for q in self.plan.sinks[s]]
        return ()

    def _begin(self, action: Action) -> None:
        """A collective: of two buffers, or what is left of chunks and two buffers, at once; where
        the engine begins one at a time, of the first."""
        if action.kind is not Kind.ALL_REDUCE:
            self._collective(action, BUFFERS)
        elif action.stage in self.alone:
            self._collective(action, CHUNKS + BUFFERS - len(self.begun.get(action, ())))
        else:
            self._collective(action, 1)
            self.rest[action] = BUFFERS - 1

    def _collective(self, action: Action, times: int) -> None:
        on = Communicator("group", group_of(action, self.plan))
        if len(on.ranks) > 1:
            self.begun[action] += [self._issue(on, action) for _ in range(times)]

    def _completed(self, begun: Action) -> list[int]:
        """Begin the rest of it. Returns the operations to wait for."""
        self._collective(begun, self.rest.pop(begun, 0))
        return self.begun.pop(begun, [])

    def _finish(self) -> None:
        waits = [*self.sending.values()]
        waits += [i for begun in self.in_flight.end() for i in self._completed(begun)]
        self.sending.clear()
        if waits:
            self._issue(None, None, waits)
