"""Between which ranks messages of a schedule really go: a link of a transport may be dear."""

from __future__ import annotations

from collections.abc import Iterable

from gems.plans.plan import Plan
from gems.schedule.action import Schedule
from gems.torch.runtime.partitioned_model import PartitionedModel
from gems.transport.protocol import Link


def links_between_stages(
    partitioned: PartitionedModel, plan: Plan, schedules: Iterable[Schedule]
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
        for transfer in partitioned.message_transfers(message, i):
            moves = ((m.target, m.source) if back else (m.source, m.target) for m in transfer.moves)
            found |= {(a, b) for a, b in moves if a != b}
    return found
