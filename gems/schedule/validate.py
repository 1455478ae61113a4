"""Prove a schedule: all work done once and in its place, messages in one order, no deadlock, and no
hang under NCCL."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product

from gems.errors import ScheduleError, problems
from gems.plans.fields import BATCHES
from gems.plans.plan import Plan
from gems.schedule import nccl
from gems.schedule.action import COLLECTIVES, OF_STAGE, WHOLE, Action, Kind, Message, Schedule
from gems.schedule.async_window import batch_of
from gems.schedule.dependencies import Result, results
from gems.schedule.machine import ScheduleMachine

UPDATE = (Kind.TIED, Kind.OPTIMIZER_STEP, Kind.ALL_GATHER)
WORK = ("output", "activations", "gradient", "weight")


def check(schedule: Schedule, plan: Plan) -> list[str]:
    """Every problem of the schedule under the plan; an empty list is the proof that it runs.

    Both forms are understood: compute actions only, or lowered to messages and reductions.
    """
    if len(schedule.ranks) != plan.world:
        return [f"the schedule has {len(schedule.ranks)} ranks, the plan {plan.world}"]
    given, plan = plan, plan.unrolled
    found = [*_wrong_work(schedule, plan)]
    if any(action.way for _, action in schedule):
        found += _wrong_messages(schedule, plan)
    asynchronous = given.asynchronous
    found += (_wrong_updates if asynchronous else _wrong_reductions)(schedule, given)
    found += _wrong_gathers(schedule, plan)
    found += _wrong_stores(schedule, plan)
    found += () if asynchronous else _wrong_steps(schedule, plan)
    return found or _deadlocks(schedule, plan) or _hangs(schedule, given)


def is_lowered(schedule: Schedule) -> bool:
    """Whether it has what ranks carry out beside compute actions."""
    return any(a.way or a.kind in OF_STAGE for _, a in schedule)


def require(schedule: Schedule, plan: Plan) -> Schedule:
    """The schedule itself, or one error with all its problems."""
    if found := check(schedule, plan):
        raise ScheduleError(problems("this schedule cannot run:", found))
    return schedule


def _wrong_work(schedule: Schedule, plan: Plan) -> Iterator[str]:
    """Forward once and backward once, whole or as input and weight gradient, each in its place.

    All ranks of a spatial group do it, each of them once.
    """
    seen: Counter[tuple[Result, int]] = Counter()
    for rank, action in schedule:
        if action.kind in OF_STAGE and action.stage < plan.depth:
            continue
        if action.stage >= plan.depth or action.micro_batch >= plan.total:
            yield (
                f"rank {rank}: {action} is outside the plan's {plan.depth} stages "
                f"and {plan.total} micro-batches"
            )
            continue
        replica = plan.replica_of(action.micro_batch)
        group = plan.spatial_group_of(action.stage, replica)
        if action.replica != replica:
            yield f"rank {rank}: {action} belongs to replica {replica}, not {action.replica}"
        elif rank not in group:
            yield f"rank {rank}: {action} belongs on {_ranks(group)}"
        on_rank = group[0] if len(group) == 1 else rank
        seen.update((result, on_rank) for result in results(action))
    units, mixed = _units(schedule, plan)
    yield from (f"micro-batch {i} is run both as a whole and in parts" for i in mixed)
    for stage, (i, part), what in product(range(plan.depth), units, WORK):
        group = plan.spatial_group_for(stage, i)
        for rank in group:
            times = seen[Result(what, stage, i, part), rank]
            on = f" on rank {rank}" if len(group) > 1 else ""
            if what == "activations" and not plan.recomputes(stage, i):
                if times:
                    again = Action(Kind.RECOMPUTE, stage, i, plan.replica_of(i), part=part)
                    yield f"{again}{on} has nothing to do: by the plan, stage {stage} keeps it all"
            elif times != 1:
                verb = "are" if what == "activations" else "is"
                which = f"stage {stage}, {_unit(i, part)}"
                yield f"the {what} of {which} {verb} computed {times} times{on}"


def _units(schedule: Schedule, plan: Plan) -> tuple[list[tuple[int, int]], list[int]]:
    """Every micro-batch, or each part of it from 0 to the highest that is scheduled; and those that
    are scheduled both ways."""
    parts: dict[int, set[int]] = {i: set() for i in range(plan.total)}
    for _, action in schedule:
        if action.kind not in OF_STAGE and action.micro_batch in parts:
            parts[action.micro_batch].add(action.part)
    last = {i: max(found, default=WHOLE) for i, found in parts.items()}
    units = [(i, p) for i, n in last.items() for p in (range(n + 1) if n > WHOLE else (WHOLE,))]
    return units, [i for i, n in last.items() if n > WHOLE and WHOLE in parts[i]]


def _unit(micro_batch: int, part: int) -> str:
    return f"micro-batch {micro_batch}" + (f", part {part}" if part != WHOLE else "")


def _ranks(group: tuple[int, ...]) -> str:
    return f"rank{'s' * (len(group) > 1)} {', '.join(map(str, group))}"


def _wrong_messages(schedule: Schedule, plan: Plan) -> Iterator[str]:
    """Every message once on both ends and, because links are FIFO, in one order per link."""
    wanted = _messages(schedule, plan)
    for way, verb in ((">", "sent"), ("<", "received")):
        due = {(m, r) for m, ends in wanted.items() for r in ends[way]}
        moved = Counter((a.message, rank) for rank, a in schedule if a.way == way)
        for message, rank in sorted({*due, *moved}):
            if (times := moved[message, rank]) != ((message, rank) in due):
                ranks = wanted[message][way] if message in wanted else ()
                on = "" if ranks in ((), (rank,)) else f" on rank {rank}"
                wants = int((message, rank) in due)
                yield f"{_name(message)} is {verb} {times} times{on}, not {wants}"
    for (a, b), (sent, received) in sorted(_links(schedule, wanted).items()):
        both = set(sent) & set(received)
        ends = ([m for m in dict.fromkeys(end) if m in both] for end in (sent, received))
        for position, (x, y) in enumerate(zip(*ends, strict=True)):
            if x != y:
                yield (
                    f"link {a} to {b}, message {position}: rank {a} sends {_name(x)}, "
                    f"rank {b} expects {_name(y)}"
                )
                break


Ends = dict[str, tuple[int, ...]]  # the ranks that send (`>`) and that receive (`<`)


def _messages(schedule: Schedule, plan: Plan) -> dict[Message, Ends]:
    """What must travel in one step, and between which ranks."""
    found: dict[Message, Ends] = {}
    units, _ = _units(schedule, plan)
    for (i, part), (a, b) in product(units, plan.chain):
        here, there = plan.spatial_group_for(a, i), plan.spatial_group_for(b, i)
        up = tuple(r for r in here if {r} != set(there))
        down = tuple(r for r in there if {r} != set(here))
        if up:
            found[Message("output", a, b, i, part)] = {">": up, "<": down}
            found[Message("gradient", b, a, i, part)] = {">": down, "<": up}
    return found


def _links(
    schedule: Schedule, wanted: dict[Message, Ends]
) -> dict[tuple[int, int], tuple[list[Message], list[Message]]]:
    """For each pair of ranks what one sends to the other, and what that one expects, in order."""
    links = defaultdict(lambda: ([], []))
    for rank, action in schedule:
        ends = wanted.get(action.message) if action.way else None
        if ends is None or rank not in ends[action.way]:
            continue
        sends = action.way == ">"
        for other in (r for r in ends["<" if sends else ">"] if r != rank):
            sent, received = links[(rank, other) if sends else (other, rank)]
            (sent if sends else received).append(action.message)
    return links


def _name(message: Message) -> str:
    what, source, target, i, part = message
    return f"the {what} of stage {source} for stage {target}, {_unit(i, part)}"


def _wrong_reductions(schedule: Schedule, plan: Plan) -> Iterator[str]:
    """If any stage is reduced, each is, on its replica group, last, and in one order everywhere.

    Collectives on one device pair up by order, so two ranks must not issue two of them crosswise.
    """
    if not any(action.kind in (Kind.ALL_REDUCE, *UPDATE) for _, action in schedule):
        return
    for rank, row in enumerate(schedule.ranks):
        done: set[int] = set()
        for step, action in enumerate(row):
            if action.computes and action.stage in done:
                yield f"rank {rank}, step {step}: {action} comes after {action.stage}A"
            if action.kind is Kind.ALL_REDUCE:
                if action.stage in done:
                    yield f"rank {rank}, step {step}: a second {action}"
                done.add(action.stage)
        if done != (mine := set(plan.stages_on[rank])):
            yield f"rank {rank} reduces stages {sorted(done)} but holds {sorted(mine)}"
    # Copies of a pipeline have the same few orders: compare the first rank of each.
    kinds = set(COLLECTIVES)
    if not plan.residency[0].shards_weights:
        kinds.discard(Kind.UNSHARD)  # each rank fetches its own
    orders = [tuple(a for a in row if a.kind in kinds) for row in schedule.ranks]
    firsts = {order: rank for rank, order in reversed(list(enumerate(orders)))}
    for (one, a), (other, b) in combinations(sorted(firsts.items(), key=lambda kv: kv[1]), 2):
        both = set(one) & set(other)
        mine, theirs = ([x for x in order if x in both] for order in (one, other))
        if mine != theirs:
            stages = {x.stage for x in both}
            gather = " and gather" if any(x.kind is Kind.UNSHARD for x in mine) else ""
            yield f"ranks {a} and {b} reduce{gather} stages {sorted(stages)} in different orders"


def _wrong_updates(schedule: Schedule, plan: Plan) -> Iterator[str]:
    """Of 2BW: each batch's gradients are reduced when they are complete, and the optimizer steps
    before the next batch adds to them, and before the next but one reads the weights."""
    if not any(action.kind in OF_STAGE for _, action in schedule):
        return
    for rank, row in enumerate(schedule.ranks):
        left = Counter(
            batch_of(a.micro_batch, plan) for a in row if a.kind is Kind.BACKWARD and a.computes
        )
        reduces = steps = 0
        for step, action in enumerate(row):
            at, batch = f"rank {rank}, step {step}: {action}", batch_of(action.micro_batch, plan)
            if action.kind is Kind.ALL_REDUCE:
                if left[reduces]:
                    yield f"{at} comes before {left[reduces]} backwards of batch {reduces}"
                reduces += 1
            elif action.kind is Kind.OPTIMIZER_STEP:
                steps += 1
                if steps > reduces:
                    yield f"{at} has no all-reduce before it"
            elif action.computes and action.kind is Kind.BACKWARD:
                left[batch] -= 1
                if steps < batch:
                    yield f"{at} adds to gradients of batch {steps}, which wait for their step"
            elif action.computes and steps < batch - 1:
                yield f"{at} needs weights after {batch - 1} optimizer steps, not {steps}"
        if (reduces, steps) != (BATCHES, BATCHES):
            yield (
                f"rank {rank} has {reduces} all-reduces and {steps} optimizer steps, "
                f"not {BATCHES} each"
            )


def _wrong_gathers(schedule: Schedule, plan: Plan) -> Iterator[str]:
    """A stage's sharded or offloaded weights are gathered while it runs, and freed at the end."""
    lowered = is_lowered(schedule)
    for rank, row in enumerate(schedule.ranks):
        here: set[int] = set()
        for step, action in enumerate(row):
            s = action.stage
            shared = s < plan.depth and plan.residency[s].unsharded_on_demand
            at = f"rank {rank}, step {step}: {action}"
            if action.kind in (Kind.UNSHARD, Kind.RESHARD):
                if not shared or s not in plan.stages_on[rank]:
                    yield (
                        f"{at} has nothing to do: no weights of stage {s} are sharded or offloaded "
                        "there"
                    )
                elif (action.kind is Kind.UNSHARD) == (s in here):
                    state = "here already" if s in here else "not here"
                    yield f"{at}, but the weights of stage {s} are {state}"
                here ^= {s}
            elif lowered and shared and action.computes and s not in here:
                yield f"{at} has no weights; it needs {Action(Kind.UNSHARD, s)} before it"
        if here:
            yield f"rank {rank} never reshards the weights of stages {sorted(here)}"


def _wrong_stores(schedule: Schedule, plan: Plan) -> Iterator[str]:
    """Offloaded activations are stored once, after forward, and loaded once, before their use."""
    for rank, row in enumerate(schedule.ranks):
        state: dict[tuple[int, int, int], str] = {}
        for step, action in enumerate(row):
            key, at = action.unit, f"rank {rank}, step {step}: {action}"
            was = state.get(key, "")
            if action.kind is Kind.STORE:
                if not plan.activations[0].offload:
                    yield f"{at} has nothing to do: the plan offloads no activations"
                elif was:
                    yield f"{at}, but it is {was} already"
                state[key] = "stored"
            elif action.kind is Kind.LOAD:
                if was != "stored":
                    yield f"{at}, but it is {was or 'not stored'}{' already' * bool(was)}"
                state[key] = "loaded"
            elif action.computes and action.kind is not Kind.FORWARD:
                if was == "stored":
                    load = replace(action, kind=Kind.LOAD)
                    yield f"{at} reads what is stored; it needs {load} before it"
                state[key] = "used"


def _wrong_steps(schedule: Schedule, plan: Plan) -> Iterator[str]:
    """What follows the all-reduces: gradients of tied stages are summed once, each stage has one
    optimizer step, and weights that are updated shard by shard are gathered."""
    if not any(action.kind in (Kind.ALL_REDUCE, *UPDATE) for _, action in schedule):
        return
    for rank, row in enumerate(schedule.ranks):
        due = _due(rank, plan)
        found: list[Action] = []
        for step, action in enumerate(row):
            if action.kind not in UPDATE:
                continue
            at = f"rank {rank}, step {step}: {action}"
            if action not in due:
                yield f"{at} has nothing to do there"
            elif action in found:
                yield f"{at} is the second of its stage"
            elif missing := [str(a) for a in due[action] if a not in row[:step]]:
                yield f"{at} comes before {', '.join(missing)}"
            found.append(action)
        if lost := [str(action) for action in due if action not in found]:
            yield f"rank {rank} never does {', '.join(lost)}"


def _due(rank: int, plan: Plan) -> dict[Action, list[Action]]:
    """The actions of an update on a rank, and those that each must follow."""
    mine = plan.stages_on[rank]
    reduces = [Action(Kind.ALL_REDUCE, s) for s in mine]
    ties = [Action(Kind.TIED, s) for s, ranks in plan.tied_groups.items() if rank in ranks]
    found: dict[Action, list[Action]] = dict.fromkeys(ties, reduces)
    for reduce, s in zip(reduces, mine, strict=True):
        state, step = plan.residency[s], Action(Kind.OPTIMIZER_STEP, s)
        found[step] = [reduce] if state.eager else [*reduces, *ties]
        if state.gathers_updates:
            found[Action(Kind.ALL_GATHER, s)] = [step]
    return found


def _deadlocks(schedule: Schedule, plan: Plan) -> list[str]:
    """Run the state machine; whatever is left waits forever."""
    machine = ScheduleMachine(schedule, plan)
    for _ in machine:
        pass
    return [
        f"rank {rank}, step {step}: {action} waits forever for "
        + ", ".join(
            [_awaited_action(result, action) for result in missing] or _unready(machine, rank)
        )
        for rank, step, action, missing in machine.stuck()
    ]


def _hangs(schedule: Schedule, plan: Plan) -> list[str]:
    """What would hang under NCCL, if the schedule is lowered."""
    if plan.world == 1 or not is_lowered(schedule):
        return []
    found = [f"under NCCL, {problem}" for problem in nccl.check(schedule, plan)]
    return found or [f"in prediction under NCCL, {p}" for p in nccl.check_prediction(plan)]


def _unready(machine: ScheduleMachine, rank: int) -> Iterator[str]:
    """The other ranks of a spatial group that are not ready, and what they are at."""
    for other in machine.unready(rank):
        head = machine.next_action(other)
        if head == machine.next_action(rank):
            yield f"rank {other}, which waits too"
        else:
            yield f"rank {other}, which is " + (f"at {head}" if head else "done")


def _awaited_action(result: Result, waiting: Action) -> str:
    if result.what in COLLECTIVES:
        return f"{Action(Kind(result.what), result.stage)} on all its ranks"
    back = Kind.INPUT if waiting.kind in (Kind.INPUT, Kind.WEIGHT) else Kind.BACKWARD
    kinds = {"output": Kind.FORWARD, "activations": Kind.RECOMPUTE, "gradient": back}
    kinds["stored"] = Kind.STORE
    kind = kinds.get(result.what, Kind.WEIGHT)
    unit = result.stage, result.micro_batch
    return str(Action(kind, *unit, waiting.replica, part=result.part))
