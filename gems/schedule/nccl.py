"""Prove that a lowered schedule cannot hang under NCCL, nor pair up the wrong operations.

    cold       The first use of a communicator blocks the host until all its ranks use it, because
               torch sets it up there. So ranks use all of them once before, in one sorted order.
    warm       The host never blocks. A stream runs its operations in order, streams run beside each
               other, and the k-th operation of a communicator is complete once the k-th has begun
               on all its ranks.
    n queues   The same, but the streams of a rank share n hardware queues, in each of which an
               operation begins after those that were issued before it have begun
               (CUDA_DEVICE_MAX_CONNECTIONS, 8 by default). An operation that has begun and waits
               for other ranks holds up nothing but what depends on it.

[Note: one queue is the worst case] In all three an operation begins once others have begun or are
complete, all of them: an operation that begins never keeps another from beginning. With one queue
an operation waits for all that were issued before it on its rank; with more queues, whatever stream
is in which, for some of these. So what ends with one queue ends with any number, and warm. The same
holds for a host that waits for its compute stream after every action.

Not modelled: kernels that wait for peers take up multiprocessors, and a call that synchronises the
whole device (cudaMalloc, say) in the middle of a step waits for them. Nothing here ran on a GPU.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random

from gems.plans.plan import Plan
from gems.schedule.action import Schedule
from gems.schedule.communicators import (
    Communicator,
    Operation,
    communicators,
    issued,
    most_communicators,
)
from gems.schedule.lower.passes import forward_only

Rows = Sequence[Sequence[Operation]]  # of each rank, in the order of its host
Queues = Callable[[int, Communicator | None], Hashable]  # the queue of a stream of a rank


def check(schedule: Schedule, plan: Plan) -> list[str]:
    """Every problem that a lowered schedule has under NCCL; none is the proof that it ends."""
    rows, known = issued(schedule, plan), communicators(plan)
    found = [*unprepared(rows, known), *unpaired(rows), *hangs_cold(warm_up(known, plan.world))]
    return found or hangs(rows, warm)


def check_prediction(plan: Plan) -> list[str]:
    """Every problem of the plan's forward-only schedule under NCCL."""
    return check(*_prediction(plan))


def _prediction(plan: Plan) -> tuple[Schedule, Plan]:
    """What prediction runs: one batch in flight, also where training has two."""
    plan = replace(plan, schedule="sequential") if plan.asynchronous else plan
    return forward_only(plan), plan


def queues(schedule: Schedule, plan: Plan) -> int:
    """How many hardware queues a device needs, to train and to predict: one, or as many as a rank
    has streams at most.

    Two messages that follow each other on one link are in order on its stream. Where skips make a
    stage send both at once, one may stand in a shared queue before work that the other waits for.
    """
    if not (hangs(issued(schedule, plan)) or hangs(issued(*_prediction(plan)))):
        return 1
    return 1 + most_communicators(plan)


def summary(schedule: Schedule, plan: Plan) -> str:
    """What was proven of a lowered schedule that has no problems, in one line."""
    needed = "would hang" if hangs_cold(issued(schedule, plan)) else "would not hang either"
    least = queues(schedule, plan)
    enough = "any number of" if least == 1 else f"{least} or more"
    return (
        f"NCCL: no hang, cold or warm, with {enough} hardware queues; {len(communicators(plan))} "
        f"communicators, {most_communicators(plan)} on a rank at most, set up in one order "
        f"(without that it {needed})"
    )


# --- communicators --------------------------------------------------------------------------------


def warm_up(known: Sequence[Communicator], world: int) -> list[list[Operation]]:
    """What each rank uses when all ranks set up communicators in this order."""
    return [[Operation(c, None) for c in known if rank in c.ranks] for rank in range(world)]


def unprepared(rows: Rows, known: Sequence[Communicator]) -> Iterator[str]:
    """Communicators that steps use and set-up does not know."""
    there = set(known)
    for rank, row in enumerate(rows):
        used = _first_uses(row)
        for missing in sorted(used.keys() - there):
            yield (
                f"rank {rank}: {used[missing].action} is the first to use {missing}, whose set-up "
                "then blocks the host; set it up before the first step"
            )


def unpaired(rows: Rows) -> Iterator[str]:
    """Operations that the other ranks of a communicator have none, or another one, for."""
    for communicator, by_rank in sorted(_by_communicator(rows).items()):
        one, *others = communicator.ranks
        mine = [rows[one][i] for i in by_rank.get(one, ())]
        for other in others:
            theirs = [rows[other][i] for i in by_rank.get(other, ())]
            at = next((k for k, (a, b) in enumerate(zip(mine, theirs, strict=False))
                       if a.subject != b.subject), min(len(mine), len(theirs)))  # fmt: skip
            if at < max(len(mine), len(theirs)):
                a, b = (ops[at].action if at < len(ops) else "nothing" for ops in (mine, theirs))
                yield (
                    f"{communicator}, operation {at}: rank {one} issues {a}, rank {other} {b}; "
                    "issue them in one order on all its ranks"
                )


def _by_communicator(rows: Rows) -> Mapping[Communicator, Mapping[int, list[int]]]:
    """For each communicator and rank the operations on it, in order."""
    found: dict[Communicator, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, row in enumerate(rows):
        for at, op in enumerate(row):
            if op.communicator is not None:
                found[op.communicator][rank].append(at)
    return found


def _first_uses(row: Sequence[Operation]) -> dict[Communicator, Operation]:
    found: dict[Communicator, Operation] = {}
    for op in row:
        if op.communicator is not None:
            found.setdefault(op.communicator, op)
    return found


def hangs_cold(rows: Rows) -> list[str]:
    """Where ranks wait forever if no communicator was set up before."""
    uses = [deque(_first_uses(row).values()) for row in rows]
    arrived: dict[Communicator, int] = defaultdict(int)
    ready = deque(rank for rank, row in enumerate(uses) if row)
    while ready:
        communicator = uses[ready.popleft()][0].communicator
        assert communicator is not None
        arrived[communicator] += 1
        if arrived[communicator] == len(communicator.ranks):
            for member in communicator.ranks:
                uses[member].popleft()
                ready += [member] if uses[member] else []
    return [
        f"rank {rank}: {row[0].action or 'set-up'} blocks the host in its first use of "
        f"{row[0].communicator}, which not all its ranks come to; set up communicators in one "
        "order on all ranks before the first step"
        for rank, row in enumerate(uses)
        if row
    ]


# --- streams and queues ---------------------------------------------------------------------------


def one_queue(rank: int, stream: Communicator | None) -> Hashable:
    return 0


def warm(rank: int, stream: Communicator | None) -> Hashable:
    return stream


def some_queues(count: int, seed: int) -> Queues:
    """Streams in queues at random; a stream stays in its queue."""
    drawn: dict[Hashable, int] = {}
    random = Random(seed)
    return lambda rank, stream: drawn.setdefault((rank, stream), random.randrange(count))


def hangs(rows: Rows, queues: Queues = one_queue) -> list[str]:
    """Where devices wait forever. [Note: one queue is the worst case]"""
    devices = _Devices(rows, queues)
    devices.run()
    return list(devices.stuck())


class _Devices:
    """The devices of all ranks: which operations have begun, and which are complete."""

    def __init__(self, rows: Rows, queues: Queues) -> None:
        self.rows = rows
        self.needs = [_needs(row) for row in rows]  # operations that must be complete before
        self.begun = [bytearray(len(row)) for row in rows]
        self.done = [bytearray(len(row)) for row in rows]
        self.sets: list[dict[int, _Set]] = [{} for _ in rows]
        for communicator, by_rank in _by_communicator(rows).items():
            for k in range(max(map(len, by_rank.values()))):
                members = {rank: at[k] for rank, at in by_rank.items() if k < len(at)}
                one = _Set(len(communicator.ranks), members)
                for rank, at in members.items():
                    self.sets[rank][at] = one
        self.queues = [_split(row, partial(queues, rank)) for rank, row in enumerate(rows)]

    def run(self) -> None:
        awake = deque(range(len(self.rows)))
        while awake:
            rank = awake.popleft()
            moved = True
            while moved:
                moved = False
                for queue in self.queues[rank]:
                    while queue and self._free(rank, queue[0]):
                        moved = True
                        awake += self._begin(rank, queue.popleft())

    def _free(self, rank: int, at: int) -> bool:
        needs, done = self.needs[rank][at], self.done[rank]
        while needs and done[needs[-1]]:
            needs.pop()
        return not needs

    def _begin(self, rank: int, at: int) -> Iterable[int]:
        """An operation begins. Returns the other ranks on which one is complete by that."""
        self.begun[rank][at] = True
        if at not in self.sets[rank]:
            self.done[rank][at] = True
            return ()
        together = self.sets[rank][at]
        together.left -= 1
        if together.left:
            return ()
        for member, index in together.members.items():
            self.done[member][index] = True
        return (member for member in together.members if member != rank)

    def stuck(self) -> Iterator[str]:
        """The first operation of each rank that cannot begin, and what it waits for."""
        for rank, queues in enumerate(self.queues):
            heads = sorted(queue[0] for queue in queues if queue)
            if heads:
                needs = (n for at in heads for n in self.needs[rank][at] if n in self.sets[rank])
                action = self.rows[rank][heads[0]].action or "the end of the step"
                why = next((why for n in needs if (why := self._unmet(rank, n))), "another stream")
                yield f"rank {rank}: {action} waits forever for {why}"

    def _unmet(self, rank: int, need: int) -> str:
        """An operation on a communicator that is not complete, and who has not begun it."""
        op, together = self.rows[rank][need], self.sets[rank][need].members
        assert op.communicator is not None
        absent = [
            f"rank {other}"
            for other in op.communicator.ranks
            if other not in together or not self.begun[other][together[other]]
        ]
        begins = ", which " + " and ".join(absent) + f" never begin{'s' * (len(absent) == 1)}"
        return f"{op.action} over {op.communicator}" + begins * bool(absent)


@dataclass
class _Set:
    """Operations that pair up, by rank, and how many of them have not begun."""

    left: int
    members: dict[int, int]


def _needs(row: Sequence[Operation]) -> list[list[int]]:
    """For each operation of a rank those that must be complete before it begins: what it waits for,
    the one before on its stream, and the last before on the compute stream."""
    last: dict[Communicator | None, int] = {}
    found = []
    for at, op in enumerate(row):
        found.append([*op.waits, *(last[x] for x in {None, op.communicator} if x in last)])
        last[op.communicator] = at
    return found


def _split(
    row: Sequence[Operation], queue_of: Callable[[Communicator | None], Hashable]
) -> list[deque[int]]:
    """The operations of a rank by their queue, in the order in which they were issued."""
    numbers = {stream: queue_of(stream) for stream in dict.fromkeys(op.communicator for op in row)}
    found: dict[Hashable, deque[int]] = defaultdict(deque)
    for at, op in enumerate(row):
        found[numbers[op.communicator]].append(at)
    return list(found.values())
