"""Carry out one rank's actions: receives posted early, sends and sums in the background."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from gems.engine.adapter import Adapter, Tensors
from gems.errors import note
from gems.plans.plan import Plan
from gems.predict.timeline import Event, Memory, Meter, Timeline
from gems.schedule.action import OF_STAGE, Action, Kind, Message, Schedule
from gems.schedule.lower.messages import Receipts, receipts
from gems.schedule.lower.offload import Storing
from gems.transport.protocol import Done, Transport, Work

log = logging.getLogger(__name__)

# Steps the weights of a stage, at once or beside the work. Gives the bytes that it brought back
# from where they are put away, for as long as it took, and a handle to wait for.
Update = Callable[[int], tuple[int, Work]]


class Engine:
    """One rank of a schedule. It knows the order and the messages, and nothing about tensors."""

    def __init__(
        self,
        plan: Plan,
        schedule: Schedule,
        adapter: Adapter,
        transport: Transport,
        update: Update | None = None,
    ) -> None:
        """`update` steps the weights of a stage, in schedules that say when; see `Update`."""
        self.plan, self.adapter, self.transport = plan, adapter, transport
        self.update = update
        self.actions = schedule.ranks[transport.rank]
        self.receipts = receipts(schedule, plan)[transport.rank]

    def step(self, number: int = 0) -> Timeline:
        """Run all actions once; gradients are summed over their holders at the end."""
        self.clear()
        return self.run(self.actions, self.receipts, number)

    def clear(self) -> None:
        """Nothing is under way."""
        self.meter = Meter(self.adapter.resident_memory())
        self.inbox: dict[Message, dict[int, tuple[list[Any], list[Work]]]] = {}
        self.at_hand: dict[Message, Tensors] = {}  # between stages of this rank, or to be sent
        self.sending: dict[tuple[Message, int], tuple[int, list[Work]]] = {}
        self.sums: list[tuple[int, list[Work]]] = []
        self.gathering: dict[int, list[Work]] = {}
        self.updating: tuple[Action, Work] | None = None
        self.storing: tuple[Storing, list[Work]] | None = None
        self.loading: dict[tuple[int, int], list[Work]] = {}

    def run(
        self, actions: Sequence[Action], receipts: Receipts, number: int = 0, *, ends: bool = True
    ) -> Timeline:
        """Some actions, after those before. If nothing `ends`, what is under way stays so."""
        self.receipts = receipts
        self.meter = self.meter.on()
        self.stamps: list[tuple[Action, Any, Any, Memory]] = []
        self.at = "the start"
        try:
            self._run_all(actions)
            if ends:
                self._finish()
        except BaseException as error:
            # Whatever it was, others wait for messages that will not come.
            note(error, f"rank {self.transport.rank}, step {number}, at {self.at}")
            self.transport.fail(error)
            raise
        return self._timeline()

    def _run_all(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if action.kind not in OF_STAGE and self.adapter.skips(action.micro_batch):
                continue
            log.debug("rank %s %s", self.transport.rank, action)
            self.at = str(action)
            self._run(action)

    def _run(self, action: Action) -> None:
        if action.way:
            move = self._send if action.way == ">" else self._post
            self._stamped(action, lambda: move(action))
        else:
            RUN[action.kind](self, action)

    def _stamped(self, action: Action, work: Callable[[], None]) -> None:
        start = self.adapter.stamp()
        work()
        self.stamps.append((action, start, self.adapter.stamp(), self.meter.now))

    # --- compute ----------------------------------------------------------------------------

    def _compute(self, action: Action) -> None:
        for handle in self.gathering.pop(action.stage, ()):
            handle.wait()
        if self.storing is not None and not self.storing[0].travels():
            self._let_go_stored()
        key = action.stage, action.micro_batch
        if key in self.loading:
            for handle in self.loading.pop(key):
                handle.wait()
            self.adapter.finish_load(*key)
            self.meter.arrive(self.adapter.activation_bytes(*key))
        COMPUTE[action.kind](self, action)

    def _forward(self, action: Action) -> None:
        s, i = action.stage, action.micro_batch
        received: Tensors = {}
        for source in self.plan.sources[s]:
            received |= self._take(Message("output", source, s, i))

        def work() -> None:
            outputs = self.adapter.forward(s, i, received)
            keep = self.meter.hold if self.plan.recomputes(s, i) else self.meter.keep
            keep(self.adapter.activation_bytes(s, i))
            for sink in self.plan.sinks[s]:
                self._offer(Message("output", s, sink, i), outputs)

        self._stamped(action, work)

    def _recompute(self, action: Action) -> None:
        s, i = action.stage, action.micro_batch

        def work() -> None:
            held = self.adapter.activation_bytes(s, i)
            self.adapter.recompute(s, i)
            self.meter.turn(held, self.adapter.activation_bytes(s, i))

        self._stamped(action, work)

    def _backward(self, action: Action) -> None:
        s, i = action.stage, action.micro_batch
        gradients = [self._take(Message("gradient", sink, s, i)) for sink in self.plan.sinks[s]]
        whole = action.kind is Kind.BACKWARD

        def work() -> None:
            found = self.adapter.backward(s, i, gradients, whole=whole)
            gradients.clear()
            self.meter.spike(self.adapter.temporary_bytes(s, i))
            if whole:
                self._release(s, i)
            for source in self.plan.sources[s]:
                self._offer(Message("gradient", s, source, i), found)

        self._stamped(action, work)

    def _weight(self, action: Action) -> None:
        def work() -> None:
            self.adapter.weight(action.stage, action.micro_batch)
            self._release(action.stage, action.micro_batch)

        self._stamped(action, work)

    def _release(self, stage: int, micro_batch: int) -> None:
        self.meter.release(self.adapter.activation_bytes(stage, micro_batch))
        self.meter.settle(self.adapter.resident_memory())

    # --- messages ---------------------------------------------------------------------------

    def _offer(self, message: Message, results: Tensors) -> None:
        """Lay out a message for a stage of this rank, or for the send that follows."""
        part = self.adapter.select(message, results)
        self.at_hand[message] = part
        self.meter.add("boundary", self.adapter.size(list(part.values())))

    def _take(self, message: Message) -> Tensors:
        """What a stage needs from another: the part at hand, and what the other ranks send."""
        own = self._pick_up(message) if message in self.at_hand else None
        arrived = {}
        for source, (buffers, handles) in self.inbox.pop(message, {}).items():
            for handle in handles:
                handle.wait()
            self.meter.drop("boundary", self.adapter.size(buffers))
            self._let_go((m, source) for m in self.receipts.get((message, source), ()))
            arrived[source] = buffers
        return self.adapter.unpack(message, own, arrived)

    def _pick_up(self, message: Message) -> Tensors:
        part = self.at_hand.pop(message)
        self.meter.drop("boundary", self.adapter.size(list(part.values())))
        return part

    def _send(self, action: Action) -> None:
        """To every other rank of the peer stage, what it wants of our part."""
        message = action.message
        part = self.at_hand[message]
        for target in self._others(action):
            buffers = self.adapter.pack(message, part, target)
            if not buffers:
                continue
            handles = [self.transport.isend(buffer, target) for buffer in buffers]
            size = self.adapter.size(buffers)
            self.meter.add("communication", size)
            self.sending[message, target] = (size, handles)
        if self.transport.rank not in self._team(action):
            self._pick_up(message)

    def _let_go(self, sent: Iterable[tuple[Message, int]]) -> None:
        """Forget the buffers of messages that are known to have been taken."""
        for key in sent:
            size, handles = self.sending.pop(key, (0, []))
            for handle in handles:
                handle.wait()
            self.meter.drop("communication", size)

    def _post(self, action: Action) -> None:
        """Expect from every other rank of the peer stage what we want of its part."""
        message = action.message
        expected = self.inbox[message] = {}
        for source in self._others(action):
            buffers = self.adapter.buffers(message, source)
            if not buffers:
                continue
            handles = [self.transport.irecv(buffer, source) for buffer in buffers]
            self.meter.add("boundary", self.adapter.size(buffers))
            expected[source] = (buffers, handles)

    def _team(self, action: Action) -> tuple[int, ...]:
        """The ranks of the stage at the other end."""
        return self.plan.spatial_group_for(action.peer, action.micro_batch)

    def _others(self, action: Action) -> list[int]:
        return [rank for rank in self._team(action) if rank != self.transport.rank]

    # --- sums -------------------------------------------------------------------------------

    def _reduce(self, action: Action) -> None:
        ranks = self.plan.replica_groups[action.stage]
        if (
            len(ranks) == 1 and "weights" in self.plan.offloaded_state
        ):  # complete, and not needed here
            self._stamped(action, partial(self._settle, action.stage))
        if len(ranks) == 1:
            return

        if self.plan.frees_gradients:  # of whole gradients, have one stage's at a time
            self._settle_sums()

        def work() -> None:
            s, to = action.stage, self.transport
            handles = [to.all_reduce(buffer, ranks) for buffer in self.adapter.bucket(s)]
            handles += [to.reduce_scatter(buffer, ranks) for buffer in self.adapter.scattered(s)]
            self.sums.append((action.stage, handles))

        self._stamped(action, work)

    def _settle_sums(self) -> None:
        """Wait for the sums under way."""
        for stage, handles in self.sums:
            for handle in handles:
                handle.wait()
            self._stamped(Action(Kind.ALL_REDUCE, stage), partial(self._settle, stage))
        self.sums.clear()

    def _settle(self, stage: int) -> None:
        self.adapter.unbucket(stage)
        self.meter.settle(self.adapter.resident_memory())

    def _gather(self, action: Action) -> None:
        ranks = self.plan.replica_groups[action.stage]

        def work() -> None:
            buffers, handles = self.adapter.unshard(action.stage)
            self.meter.settle(self.adapter.resident_memory())
            handles += [self.transport.all_gather(buffer, ranks) for buffer in buffers]
            self.gathering[action.stage] = handles

        self._stamped(action, work)

    def _drop(self, action: Action) -> None:
        for handle in self.gathering.pop(action.stage, ()):  # nothing ran in between
            handle.wait()

        def work() -> None:
            self.adapter.reshard(action.stage)
            self.meter.settle(self.adapter.resident_memory())

        self._stamped(action, work)

    def _update(self, action: Action) -> None:
        self._settle_sums()
        update = self.update
        assert update is not None, f"{action} in a schedule of a trainer that updates by itself"

        def work() -> None:
            brought, handle = update(action.stage)
            self.meter.add("optimizer", brought)
            self.meter.drop("optimizer", brought)
            self.meter.settle(self.adapter.resident_memory())
            self.updating = (action, handle)

        self._settle_update()
        self._stamped(action, work)

    def _settle_update(self) -> None:
        """Wait for the update under way."""
        if self.updating is None:
            return
        action, handle = self.updating
        self.updating = None

        def work() -> None:
            handle.wait()
            self.meter.settle(self.adapter.resident_memory())

        if not isinstance(handle, Done):
            self._stamped(action, work)

    # --- memory put away ----------------------------------------------------------------------

    def _store(self, action: Action) -> None:
        self._let_go_stored()
        s, i = action.stage, action.micro_batch

        def work() -> None:
            self.meter.put_away(self.adapter.activation_bytes(s, i))
            self.storing = (Storing(s, i), self.adapter.store(s, i))

        self._stamped(action, work)

    def _load(self, action: Action) -> None:
        self._let_go_stored()
        s, i = action.stage, action.micro_batch

        def work() -> None:
            counts = not self.plan.recomputes(s, i)
            self.meter.fetch(self.adapter.activation_bytes(s, i), counts=counts)
            self.loading[s, i] = self.adapter.load(s, i)

        self._stamped(action, work)

    def _let_go_stored(self) -> None:
        """The store under way must be through by now; what it took away is gone from here."""
        if self.storing is None:
            return
        storing, handles = self.storing
        for handle in handles:
            handle.wait()
        s, i = storing.stage, storing.micro_batch
        self.adapter.release_stored(s, i)
        self.meter.let_go(
            self.adapter.activation_bytes(s, i), counts=not self.plan.recomputes(s, i)
        )
        self.storing = None

    def _finish(self) -> None:
        self.at = "the end"
        self._let_go_stored()
        self._let_go(list(self.sending))
        self._settle_sums()
        self._settle_update()
        self.meter.settle(self.adapter.resident_memory())

    # --- what was measured --------------------------------------------------------------------

    def _timeline(self) -> Timeline:
        rank, events, memory = self.transport.rank, [], []
        for action, begin, end, live in self.stamps:
            start, cpu_start = self.adapter.seconds(begin)
            stop, cpu_stop = self.adapter.seconds(end)
            events.append(Event(rank, str(action), start, stop, cpu_stop - cpu_start))
            memory.append((stop, live))
        return Timeline(
            tuple(events),
            memory=(tuple(memory),),
            peaks=(self.meter.peak,),
            max_in_flight=(self.meter.max_in_flight,),
        )


Do = Callable[[Engine, Action], None]
COMPUTE: dict[Kind, Do] = {
    Kind.FORWARD: Engine._forward,
    Kind.RECOMPUTE: Engine._recompute,
    Kind.BACKWARD: Engine._backward,
    Kind.INPUT: Engine._backward,
    Kind.WEIGHT: Engine._weight,
}
RUN: dict[Kind, Do] = {
    **dict.fromkeys(COMPUTE, Engine._compute),
    Kind.ALL_REDUCE: Engine._reduce,
    Kind.UNSHARD: Engine._gather,
    Kind.RESHARD: Engine._drop,
    Kind.OPTIMIZER_STEP: Engine._update,
    Kind.STORE: Engine._store,
    Kind.LOAD: Engine._load,
}
