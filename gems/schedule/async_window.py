"""An asynchronous (flush-free) pipeline, one window of actions per step.

An unrolled schedule has a few consecutive batches (`plan.unrolled`) and, after its last window, the
rest of the last batch. Ranks repeat one window for as long as there are batches. Two batches are in
flight at once, so there micro-batches are numbered by the parity of their batch: micro-batch i of
batch t is number t % 2 x m + i of `plan.on_end(2)`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from gems.plans.fields import BATCHES
from gems.plans.plan import Plan
from gems.schedule.action import Action, Kind, Message, Schedule

AT_ONCE = 2  # batches in flight
Proofs = dict[tuple[Message, int], list[Message]]


def update(schedule: Schedule, plan: Plan) -> Schedule:
    """Insert all-reduces and optimizer steps, and post each receive in the window that reads it.

    A window runs before the next batch, and hence its shapes, are known, or whether there is one.
    All messages between two ranks go in one direction and are read in the order in which they were
    sent, so this keeps the order of every link.
    """
    rows = ((a for _, a in sorted(_placed(row, plan), key=_window)) for row in schedule.ranks)
    return Schedule(tuple(map(tuple, rows)))


def _window(placed: tuple[int, Action]) -> int:
    return placed[0]


def batch_of(micro_batch: int, plan: Plan) -> int:
    """The batch of a micro-batch of an unrolled schedule."""
    return micro_batch % plan.unrolled.micro_batches // plan.micro_batches


def first_of(batch: int, plan: Plan) -> int:
    """The first micro-batch of a batch of an unrolled schedule."""
    return batch * plan.micro_batches


def number_of(micro_batch: int, plan: Plan) -> int:
    """The number of a micro-batch of an unrolled schedule in its batch, over all copies."""
    copy = micro_batch // plan.unrolled.micro_batches
    return copy * plan.micro_batches + micro_batch % plan.micro_batches


def window_of(stage: int, micro_batch: int, plan: Plan, *, forward: bool) -> int:
    """The window in which a stage runs it: backward is as many forwards later as stages follow."""
    late = 0 if forward else plan.depth - 1 - stage
    return (micro_batch % plan.unrolled.micro_batches + late) // plan.micro_batches


def _placed(row: Sequence[Action], plan: Plan) -> Iterator[tuple[int, Action]]:
    """Each action with its window; an all-reduce after the messages of a batch's last backward, an
    optimizer step before the first backward of the next batch, or at the end."""
    backwards = [at for at, a in enumerate(row) if a.kind is Kind.BACKWARD and a.way != "<"]
    last = {batch_of(row[at].micro_batch, plan): at for at in backwards}
    reduced: set[int] = set()
    steps = window = 0
    for at, action in enumerate(row):
        s, i, forward = action.stage, action.micro_batch, action.kind is Kind.FORWARD
        window = window_of(s, i, plan, forward=forward)
        begins = action.computes and not forward and batch_of(i, plan) not in reduced
        if begins and steps < len(reduced):
            yield window, Action(Kind.OPTIMIZER_STEP, s)
            steps += 1
        yield window, action
        if at in last.values():
            yield window, Action(Kind.ALL_REDUCE, s)
            reduced.add(batch_of(i, plan))
    yield BATCHES, Action(Kind.OPTIMIZER_STEP, row[-1].stage)


# --- what one rank carries out, window by window --------------------------------------------------


class Window(NamedTuple):
    """One rank's actions, and what holding a message proves (see lower.messages.receipts)."""

    actions: tuple[Action, ...]
    proofs: Proofs


class Windows(NamedTuple):
    """Of one rank: for the first batch, for any other, and for the rest of the last one.

    Each twice: for a newest batch with an even number, and with an odd one.
    """

    first: tuple[Window, Window]
    next: tuple[Window, Window]
    drain: tuple[Window, Window]


def windows(row: Sequence[Action], proofs: Proofs, plan: Plan) -> Windows:
    """A rank's row of an unrolled schedule as windows, numbered as two batches at once."""
    parts = [
        Window(tuple(a), p) for a, p in zip(_actions(row, plan), _proofs(proofs, plan), strict=True)
    ]
    middle = BATCHES // 2
    return Windows(
        first=_both(parts[0], 0, plan),
        next=_both(parts[middle], middle, plan),
        drain=_both(parts[BATCHES], BATCHES - 1, plan),
    )


def _actions(row: Sequence[Action], plan: Plan) -> list[list[Action]]:
    found: list[list[Action]] = [[] for _ in range(BATCHES + 1)]
    for window, action in _placed([a for a in row if a.kind not in _ADDED], plan):
        found[window].append(action)
    return found


_ADDED = (Kind.ALL_REDUCE, Kind.OPTIMIZER_STEP)


def _proofs(proofs: Proofs, plan: Plan) -> list[Proofs]:
    """What each window learns from the messages that it receives."""
    found: list[Proofs] = [{} for _ in range(BATCHES + 1)]
    for (message, source), taken in proofs.items():
        forward = message.what == "output"
        window = window_of(message.target, message.micro_batch, plan, forward=forward)
        found[window][message, source] = taken
    return found


def _both(window: Window, newest: int, plan: Plan) -> tuple[Window, Window]:
    """For a newest batch with an even number, and with an odd one."""
    even, odd = (
        _renumbered(window, (newest + parity) % AT_ONCE, plan) for parity in range(AT_ONCE)
    )
    return even, odd


def _renumbered(window: Window, shift: int, plan: Plan) -> Window:
    def number(micro_batch: int) -> int:
        m = plan.micro_batches
        copy = micro_batch // plan.unrolled.micro_batches
        parity = (batch_of(micro_batch, plan) + shift) % AT_ONCE
        return (copy * AT_ONCE + parity) * m + micro_batch % m

    def message(old: Message) -> Message:
        return old._replace(micro_batch=number(old.micro_batch))

    actions = tuple(
        a if a.kind in _ADDED else replace(a, micro_batch=number(a.micro_batch))
        for a in window.actions
    )
    proofs = {
        (message(held), source): [message(old) for old in taken]
        for (held, source), taken in window.proofs.items()
    }
    return Window(actions, proofs)


def place(number: int, plan: Plan) -> tuple[int, int]:
    """Of a micro-batch of `plan.on_end(2)`: the parity of its batch, and its number in that."""
    copy, within = divmod(number, AT_ONCE * plan.micro_batches)
    parity, i = divmod(within, plan.micro_batches)
    return parity, copy * plan.micro_batches + i
