"""Messages of one rank in flight: offered to others, expected, and not yet known as received."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gems.engine.adapter import Adapter, Tensors
from gems.plans.plan import Plan
from gems.predict.timeline import Meter
from gems.schedule.action import Action, Message
from gems.schedule.lower.messages import Receipts
from gems.transport.protocol import Transport, Work


class Messages:
    """Between the stages of one rank and those of its peers. Bytes are counted in `meter`."""

    def __init__(self, plan: Plan, adapter: Adapter, transport: Transport) -> None:
        self.plan, self.adapter, self.transport = plan, adapter, transport
        self.receipts: Receipts = {}
        self.inbox: dict[Message, dict[int, tuple[list[Any], list[Work]]]] = {}
        self.at_hand: dict[Message, Tensors] = {}  # between stages of this rank, or to be sent
        self.sending: dict[tuple[Message, int], tuple[int, list[Work]]] = {}
        self.sent: dict[int, int] = {}  # bytes by rank, since there was nothing in flight

    def attach(self, meter: Meter, receipts: Receipts) -> None:
        """Go on with another meter, and with what held messages prove (see receipts())."""
        self.meter, self.receipts = meter, receipts

    def offer(self, message: Message, results: Tensors) -> None:
        """Lay out a message for a stage of this rank, or for the send that follows."""
        part = self.adapter.select(message, results)
        self.at_hand[message] = part
        self.meter.add("boundary", self.adapter.size(list(part.values())))

    def take(self, message: Message) -> Tensors:
        """What a stage needs from another: the part at hand, and what the other ranks send."""
        own = self._pick_up(message) if message in self.at_hand else None
        arrived = {}
        for source, (buffers, handles) in self.inbox.pop(message, {}).items():
            for handle in handles:
                handle.wait()
            self.meter.drop("boundary", self.adapter.size(buffers))
            self._free((m, source) for m in self.receipts.get((message, source), ()))
            if buffers:
                arrived[source] = buffers
        return self.adapter.unpack(message, own, arrived)

    def _pick_up(self, message: Message) -> Tensors:
        part = self.at_hand.pop(message)
        self.meter.drop("boundary", self.adapter.size(list(part.values())))
        return part

    def send(self, action: Action) -> None:
        """To every other rank of the peer stage, what it wants of our part."""
        message, peers = action.message, self._peers(action)
        part = self.at_hand[message]
        for target in peers:
            if target == self.transport.rank:
                continue
            buffers = self.adapter.pack(message, part, target)
            handles = [self.transport.isend(buffer, target) for buffer in buffers]
            stored = 0
            if self._stores(message):
                stored, works = self.adapter.send_stored(message, part, target)
                handles += works
            if not handles:
                continue
            size = self.adapter.size(buffers)
            self.meter.add("communication", size)
            self.sent[target] = self.sent.get(target, 0) + size + stored
            self.sending[message, target] = (size, handles)
        if self.transport.rank not in peers:
            self._pick_up(message)

    def post(self, action: Action) -> None:
        """Receive from every other rank of the peer stage what we want of its part."""
        message = action.message
        expected = self.inbox[message] = {}
        for source in self._peers(action):
            if source == self.transport.rank:
                continue
            buffers = self.adapter.buffers(message, source)
            handles = [self.transport.irecv(buffer, source) for buffer in buffers]
            if self._stores(message):
                handles += self.adapter.receive_stored(message, source)
            if not handles:
                continue
            self.meter.add("boundary", self.adapter.size(buffers))
            expected[source] = (buffers, handles)

    def _stores(self, message: Message) -> bool:
        """Whether values may go from store to store."""
        stages = (message.source, message.target)
        return all(self.plan.activations[stage].values for stage in stages)

    def _peers(self, action: Action) -> tuple[int, ...]:
        """The ranks of the stage at the other end."""
        return self.plan.spatial_group_for(action.peer, action.micro_batch)

    def _free(self, sent: Iterable[tuple[Message, int]]) -> None:
        """Free the buffers of messages that are known to have been received."""
        for key in sent:
            size, handles = self.sending.pop(key, (0, []))
            for handle in handles:
                handle.wait()
            self.meter.drop("communication", size)

    def finish(self) -> None:
        """Wait for all sends."""
        self._free(list(self.sending))
