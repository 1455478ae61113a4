"""Between which ranks messages of a plan go, and in which groups they sum and exchange: links and
groups of a transport may be dear."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from gems.distributed.transfer import Transfer
from gems.geometry.layout import coordinate
from gems.plans.plan import Plan
from gems.schedule.action import Message, Schedule
from gems.transport.protocol import Link

Transfers = Callable[[Message, int], Sequence[Transfer]]  # of a message of a micro-batch


def links_between_stages(
    transfers: Transfers, plan: Plan, schedules: Iterable[Schedule]
) -> set[Link]:
    """(source, target) of all messages, if every micro-batch is partitioned like this."""
    found: set[Link] = set()
    known: set[tuple[int, ...]] = set()  # of other micro-batches
    for _, action in (each for schedule in schedules for each in schedule):
        if action.way != ">":
            continue
        message = action.message
        back, i = message.what == "gradient", message.micro_batch
        key = (message.source, message.target, plan.replica_of(i), back)
        if key in known:
            continue
        known.add(key)
        for transfer in transfers(message, i):
            moves = ((m.target, m.source) if back else (m.source, m.target) for m in transfer.moves)
            found |= {(a, b) for a, b in moves if a != b}
    return found


def exchanges_inside_stages(plan: Plan) -> dict[tuple[int, ...], list[Link]]:
    """The spatial groups of a plan, and between which of their ranks halos go."""
    return {
        tuple(sorted(ranks)): neighbours(plan.grids[stage].shape, ranks)
        for row in plan.spatial_groups
        for stage, ranks in enumerate(row)
        if len(ranks) > 1
    }


def neighbours(grid: tuple[int, ...], ranks: tuple[int, ...]) -> list[Link]:
    """The pairs of ranks whose tiles meet in a side, an edge or a corner, both ways."""
    cells = [(rank, coordinate(grid, m)) for m, rank in enumerate(ranks)]
    return [
        (a, b)
        for a, at in cells
        for b, to in cells
        if a != b and all(abs(i - j) <= 1 for i, j in zip(at, to, strict=True))
    ]
