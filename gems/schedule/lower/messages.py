"""Insert sends and receives, and derive which sends are known to be received."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from gems.plans.plan import Plan
from gems.schedule.action import Action, Kind, Message, Schedule

SILENT = (Kind.WEIGHT, Kind.RECOMPUTE)  # no other rank waits for these


def communicate(schedule: Schedule, plan: Plan, early: int = 1) -> Schedule:
    """Insert sends right after their producer, and receives `early` compute actions before use.

    Links are FIFO. The sender's order is the order of the link, so a receive is posted together
    with all that the sender sends before it; posting never blocks, hence this cannot deadlock.
    """
    sends = [
        [_sends(action, rank, plan) for action in row] for rank, row in enumerate(schedule.ranks)
    ]
    arriving: list[dict[int, list[Action]]] = [defaultdict(list) for _ in schedule.ranks]
    for rank, row in enumerate(sends):
        for action in (a for after in row for a in after):
            for target in _others(action, rank, plan):
                arriving[target][rank].append(_received(action))
    lowered = []
    for rank, row in enumerate(schedule.ranks):
        posts = _posts(row, list(arriving[rank].values()), early)
        lowered.append(
            tuple(
                a
                for action, before, after in zip(row, posts, sends[rank], strict=True)
                for a in (*before, action, *after)
            )
        )
    return Schedule(tuple(lowered))


def _posts(row: Sequence[Action], queues: list[list[Action]], early: int) -> list[list[Action]]:
    """The receives to post before each compute action of a rank, given what each link brings.

    One receive takes the parts of a whole spatial group, so it is in the queues of several links.
    """
    used = {_use(a): at for at, a in enumerate(row) if a.kind not in SILENT}
    due = {a: max(used[_use(a)] - early, 0) for queue in queues for a in queue}
    changed = True
    while changed:
        changed = False
        for queue in queues:
            for action, later in reversed(list(pairwise(queue))):
                if due[action] > due[later]:
                    due[action], changed = due[later], True
    posts: list[list[list[Action]]] = [[[] for _ in queues] for _ in row]
    for link, queue in enumerate(queues):
        for action in queue:
            posts[due[action]][link].append(action)
    return [_merged(by_link) for by_link in posts]


def _merged(queues: list[list[Action]]) -> list[Action]:
    """All that is in the queues, once, in an order that keeps to each of theirs.

    There is one: that in which they were sent. A spatial group sends jointly, hence in one order.
    """
    merged = []
    queues = [queue for queue in reversed(queues) if queue]
    while queues:
        heads = [queue[0] for queue in queues]
        free = (a for a in heads if not any(a in queue[1:] for queue in queues))
        merged.append(first := next(free, heads[0]))
        queues = [left for queue in queues if (left := [a for a in queue if a != first])]
    return merged


Receipts = dict[tuple[Message, int], list[Message]]


def receipts(schedule: Schedule, plan: Plan) -> list[Receipts]:
    """For each rank, which of its messages are surely received once it holds one of the receiver's.

    A send is complete when its receive is posted. Nothing tells the sender so, but if the receiver
    later sends something back, whoever holds that knows. So a rank can free its buffers without
    ever waiting for a peer that waits for it. Holding the part of a message that came from `other`
    proves that `other` has posted the receives listed under (message, other). Where that is known
    before the send, as receives are posted early, the next message after the send stands for it.
    """
    found: list[Receipts] = [{} for _ in schedule.ranks]
    sent = [{a.message: at for at, a in enumerate(row) if a.way == ">"} for row in schedule.ranks]
    used = [
        {_use(a): at for at, a in enumerate(row) if a.computes and a.kind not in SILENT}
        for row in schedule.ranks
    ]
    for other, row in enumerate(schedule.ranks):
        posted: dict[int, list[Message]] = defaultdict(list)
        for action in (a for a in row if a.way):
            for rank in _others(action, other, plan):
                if action.way == "<":
                    posted[rank].append(action.message)
                    continue
                held = used[rank][_use(_received(action))]
                if known := [m for m in posted[rank] if sent[rank][m] < held]:
                    found[rank][action.message, other] = known
                    posted[rank] = [m for m in posted[rank] if m not in known]
    return found


def _sends(action: Action, rank: int, plan: Plan) -> list[Action]:
    """The messages that a compute action gives rise to; a stage on this rank alone needs none.

    One action sends to all the other ranks of the peer stage what each of them wants of our part.
    """
    if action.kind in SILENT:
        return []
    forward = action.kind is Kind.FORWARD
    peers = plan.sinks[action.stage] if forward else plan.sources[action.stage]
    sends = (replace(action, way=">", peer=peer) for peer in peers)
    return [send for send in sends if _others(send, rank, plan)]


def _others(action: Action, rank: int, plan: Plan) -> list[int]:
    """The ranks, beside our own, that a message goes to or comes from."""
    return [r for r in plan.spatial_group_for(action.peer, action.micro_batch) if r != rank]


def _received(send: Action) -> Action:
    """The receive that answers a send."""
    return replace(send, stage=send.peer, peer=send.stage, way="<")


def _use(action: Action) -> tuple[tuple[int, int, int], bool]:
    """What a received message and the compute action that reads it have in common."""
    return action.unit, action.kind is Kind.FORWARD
