"""Prove a schedule: all work done once and in its place, messages in one order, no deadlock."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from gems.errors import ScheduleError, faults
from gems.plan import Plan
from gems.schedule.core import Action, Fact, Kind, Message, Run, Schedule, gives


def check(schedule: Schedule, plan: Plan) -> list[str]:
    """Every fault of the schedule under the plan; an empty list is the proof that it runs.

    Both forms are understood: compute actions only, or lowered to messages and reductions.
    """
    if len(schedule.ranks) != plan.world:
        return [f"the schedule has {len(schedule.ranks)} ranks, the plan {plan.world}"]
    found = [*_wrong_work(schedule, plan)]
    if any(action.way for _, action in schedule):
        found += _wrong_messages(schedule, plan)
    found += _wrong_reductions(schedule, plan)
    return found or _deadlocks(schedule, plan)


def require(schedule: Schedule, plan: Plan) -> Schedule:
    """The schedule itself, or one error with all its faults."""
    if found := check(schedule, plan):
        raise ScheduleError(faults("this schedule cannot run:", found))
    return schedule


def _wrong_work(schedule: Schedule, plan: Plan) -> Iterator[str]:
    """Forward once and backward once, whole or as input and weight gradient, each in its place."""
    seen: Counter[Fact] = Counter()
    for rank, action in schedule:
        if action.kind is Kind.REDUCE:
            continue
        if action.stage >= plan.depth or action.micro_batch >= plan.total:
            yield (
                f"rank {rank}: {action} is outside the plan's {plan.depth} stages "
                f"and {plan.total} micro-batches"
            )
            continue
        replica = plan.replica_of(action.micro_batch)
        if action.replica != replica:
            yield f"rank {rank}: {action} belongs to replica {replica}, not {action.replica}"
        elif (home := plan.rank_of(action.stage, replica)) != rank:
            yield f"rank {rank}: {action} belongs on rank {home}"
        seen.update(gives(action))
    for stage in range(plan.depth):
        for i in range(plan.total):
            for what in ("output", "gradient", "weight"):
                if (times := seen[Fact(what, stage, i)]) != 1:
                    yield f"the {what} of stage {stage}, micro-batch {i} is computed {times} times"


def _wrong_messages(schedule: Schedule, plan: Plan) -> Iterator[str]:
    """Every message once on both ends and, because links are FIFO, in one order per link."""
    wanted = _messages(plan)
    sent, received = ([a.message for _, a in schedule if a.way == way] for way in "><")
    for verb, moved in (("sent", Counter(sent)), ("received", Counter(received))):
        for message in sorted({*wanted, *moved}):
            if (times := moved[message]) != (message in wanted):
                yield f"{_say(message)} is {verb} {times} times, not {int(message in wanted)}"
    both = set(sent) & set(received) & set(wanted)
    links: dict[tuple[int, int], tuple[list[Message], list[Message]]]
    links = defaultdict(lambda: ([], []))
    for end, messages in enumerate((sent, received)):
        for message in dict.fromkeys(m for m in messages if m in both):
            links[wanted[message]][end].append(message)
    for (a, b), ends in sorted(links.items()):
        for position, (x, y) in enumerate(zip(*ends, strict=True)):
            if x != y:
                yield (
                    f"link {a} to {b}, message {position}: rank {a} sends {_say(x)}, "
                    f"rank {b} expects {_say(y)}"
                )
                break


def _messages(plan: Plan) -> dict[Message, tuple[int, int]]:
    """What must travel in one step, and between which two ranks."""
    found = {}
    for i in range(plan.total):
        for a, b in plan.chain:
            here, there = plan.rank_for(a, i), plan.rank_for(b, i)
            if here != there:
                found[Message("output", a, b, i)] = (here, there)
                found[Message("gradient", b, a, i)] = (there, here)
    return found


def _say(message: Message) -> str:
    what, source, target, i = message
    return f"the {what} of stage {source} for stage {target}, micro-batch {i}"


def _wrong_reductions(schedule: Schedule, plan: Plan) -> Iterator[str]:
    """If any stage is reduced, each is, on all its holders, last, and in one order everywhere.

    Collectives on one device pair up by order, so two ranks must not issue two of them crosswise.
    """
    orders = [[a.stage for a in row if a.kind is Kind.REDUCE] for row in schedule.ranks]
    if not any(orders):
        return
    for rank, row in enumerate(schedule.ranks):
        done: set[int] = set()
        for step, action in enumerate(row):
            if action.computes and action.stage in done:
                yield f"rank {rank}, step {step}: {action} comes after {action.stage}R"
            if action.kind is Kind.REDUCE:
                if action.stage in done:
                    yield f"rank {rank}, step {step}: a second {action}"
                done.add(action.stage)
        if done != (mine := set(plan.stages_on[rank])):
            yield f"rank {rank} reduces stages {sorted(done)} but holds {sorted(mine)}"
    for a, first in enumerate(orders):
        for b in range(a):
            shared = set(first) & set(orders[b])
            if [s for s in first if s in shared] != [s for s in orders[b] if s in shared]:
                yield f"ranks {b} and {a} reduce stages {sorted(shared)} in different orders"


def _deadlocks(schedule: Schedule, plan: Plan) -> list[str]:
    """Run the order without time; whatever is left standing waits forever."""
    run = Run(schedule, plan)
    for _ in run:
        pass
    return [
        f"rank {rank}, step {step}: {action} waits forever for "
        + ", ".join(_spell(fact, action) for fact in missing)
        for rank, step, action, missing in run.stuck()
    ]


def _spell(fact: Fact, waiting: Action) -> str:
    back = Kind.INPUT if waiting.kind in (Kind.INPUT, Kind.WEIGHT) else Kind.BACKWARD
    kind = {"output": Kind.FORWARD, "gradient": back, "weight": Kind.WEIGHT}[fact.what]
    return str(Action(kind, fact.stage, fact.micro_batch, waiting.replica))
