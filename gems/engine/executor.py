"""Carry out one rank's actions: receives posted early, sends and collectives in the background."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from gems.engine.adapter import Adapter, Tensors
from gems.engine.measured import Measured, Stamped
from gems.engine.messages import Messages
from gems.errors import ScheduleError, note
from gems.plans.plan import Plan
from gems.predict.timeline import Meter
from gems.schedule.action import OF_STAGE, WHOLE, Action, Kind, Message, Schedule
from gems.schedule.lower.messages import Receipts, receipts
from gems.schedule.lower.reduce import last_backwards, overlaps, start_of_update
from gems.schedule.machine import InFlight
from gems.transport.protocol import Done, Transport, Work

log = logging.getLogger(__name__)

# Steps the weights of a stage, at once or in the background. Returns the bytes of offloaded state
# that it loads for the duration of the step, and a handle to wait for.
Update = Callable[[int], tuple[int, Work]]


def nothing() -> None:
    pass


class Engine:
    """One rank of a schedule. It knows the order and the messages, and nothing about tensors.

    Which actions in flight an action waits for is decided by `InFlight`, the part of the schedule's
    state machine that belongs to one rank; here are the handles to wait for.
    """

    def __init__(
        self,
        plan: Plan,
        schedule: Schedule,
        adapter: Adapter,
        transport: Transport,
        update: Update | None = None,
    ) -> None:
        """`update` steps the weights of a stage, in schedules with optimizer steps."""
        self.plan, self.adapter, self.transport = plan, adapter, transport
        self.update = update
        self.actions = schedule.ranks[transport.rank]
        if parts := [str(action) for action in self.actions if action.part != WHOLE]:
            raise ScheduleError(
                f"{parts[0]} is of a part, but adapters run whole micro-batches; schedule those"
            )
        self.receipts = receipts(schedule, plan)[transport.rank]
        self.end = start_of_update(self.actions, plan)
        self.last = last_backwards(self.actions, plan)

    def step(self, number: int = 0, before_end: Callable[[], None] = nothing) -> Measured:
        """Run all actions but the update: before that, ranks must know that gradients are good.
        `before_end` is called when all have begun, and may begin a collective of all ranks."""
        self.clear()
        self.before_end = before_end
        self.adapter.start_clock()
        return self.run(self.actions[: self.end], self.receipts, number)

    def finish(self, number: int = 0) -> Measured:
        """Run the update. What was measured is that of the whole step."""
        self.before_end = nothing
        stamps, meter = self.stamps, self.meter
        self.run(self.actions[self.end :], {}, number)
        self.stamps = [*stamps, *self.stamps]
        if meter.peak.total >= self.meter.peak.total:
            self.meter.peak = meter.peak
        self.meter.max_in_flight = meter.max_in_flight
        return self._measured()

    def clear(self) -> None:
        """Nothing is in flight."""
        self.meter = Meter(self.adapter.resident_memory())
        self.messages = Messages(self.plan, self.adapter, self.transport)
        self.in_flight = InFlight(self.plan)
        self.handles: dict[Action, list[Work]] = defaultdict(list)
        self.rest: dict[Action, list[Begin]] = {}  # of an all-reduce, not yet begun
        self.before_end: Callable[[], None] = nothing

    def run(
        self, actions: Sequence[Action], receipts: Receipts, number: int = 0, *, ends: bool = True
    ) -> Measured:
        """Some actions, after those before. Unless it `ends`, what is in flight stays so."""
        self.meter = self.meter.continued()
        self.messages.attach(self.meter, receipts)
        self.stamps: list[Stamped] = []
        self.at = "the start"
        try:
            for action in actions:
                if action.kind in OF_STAGE or not self.adapter.skips(action.micro_batch):
                    self._run(action)
            if ends:
                self._finish()
        except BaseException as error:
            # Whatever it was, others wait for messages that will not come.
            note(error, f"rank {self.transport.rank}, step {number}, at {self.at}")
            self.transport.fail(error)
            raise
        return self._measured()

    def _run(self, action: Action) -> None:
        log.debug("rank %s %s", self.transport.rank, action)
        self.at = str(action)
        for begun in self.in_flight.begin(action):
            COMPLETE[begun.kind](self, begun)
        if action.way:
            move = self.messages.send if action.way == ">" else self.messages.post
            self._stamped(action, lambda: move(action))
        else:
            RUN[action.kind](self, action)

    def _stamped(self, action: Action, work: Callable[[], None]) -> None:
        start = self.adapter.stamp()
        work()
        self.stamps.append((action, start, self.adapter.stamp(), self.meter.now))

    def _wait(self, begun: Action) -> None:
        for handle in self.handles.pop(begun, ()):
            handle.wait()

    def _finish(self) -> None:
        self.at = "the end"
        self.before_end()
        rest = self.in_flight.end()
        stores = [begun for begun in rest if begun.kind is Kind.STORE]
        for begun in stores:
            self._end_store(begun)
        self.messages.finish()
        for begun in (begun for begun in rest if begun not in stores):
            COMPLETE[begun.kind](self, begun)
        self._count_state()

    def _count_state(self) -> None:
        self.meter.set_resident(self.adapter.resident_memory())

    # --- compute ----------------------------------------------------------------------------

    def _forward(self, action: Action) -> None:
        s, i = action.stage, action.micro_batch
        received: Tensors = {}
        for source in self.plan.sources[s]:
            received |= self.messages.take(Message("output", source, s, i, action.part))

        def work() -> None:
            outputs = self.adapter.forward(s, i, received)
            self.meter.save(*self._saved(action))
            if self.plan.activations[s].values:
                self._count_state()  # it has stored values, too
            for sink in self.plan.sinks[s]:
                self.messages.offer(Message("output", s, sink, i, action.part), outputs)

        self._stamped(action, work)

    def _recompute(self, action: Action) -> None:
        s, i = action.stage, action.micro_batch

        def work() -> None:
            inputs = self.adapter.activation_bytes(s, i)
            self.adapter.recompute(s, i)
            self.meter.recompute(inputs, self.adapter.activation_bytes(s, i))

        self._stamped(action, work)

    def _backward(self, action: Action) -> None:
        s, i = action.stage, action.micro_batch
        sinks = self.plan.sinks[s]
        gradients = [
            self.messages.take(Message("gradient", sink, s, i, action.part)) for sink in sinks
        ]
        whole = action.kind is Kind.BACKWARD
        reduce = partial(self._all_reduce, s) if action in self.last else None

        def work() -> None:
            found = self.adapter.backward(s, i, gradients, whole=whole, reduce=reduce)
            gradients.clear()
            if self.plan.activations[s].patches:  # the first patch made gradients of weights
                self._count_state()
            self.meter.spike("activations", self.adapter.temporary_bytes(s, i))
            if whole:
                self._free(s, i)
            for source in self.plan.sources[s]:
                self.messages.offer(Message("gradient", s, source, i, action.part), found)

        self._stamped(action, work)

    def _weight(self, action: Action) -> None:
        def work() -> None:
            self.adapter.weight(action.stage, action.micro_batch)
            self._free(action.stage, action.micro_batch)

        self._stamped(action, work)

    def _free(self, stage: int, micro_batch: int) -> None:
        self.meter.free(self.adapter.activation_bytes(stage, micro_batch))
        self._count_state()

    def _saved(self, action: Action) -> tuple[int, bool]:
        """Bytes that a forward has saved, and whether those are activations (else inputs)."""
        key = action.stage, action.micro_batch
        return self.adapter.activation_bytes(*key), not self.plan.recomputes(*key)

    # --- weights, gradients, optimizer state ------------------------------------------------

    def _all_reduce(self, stage: int, buffer: Any) -> None:
        handle = self.transport.all_reduce(buffer, self.plan.replica_groups[stage])
        self.handles[Action(Kind.ALL_REDUCE, stage)].append(handle)

    def _reduce(self, action: Action) -> None:
        ranks = self.plan.replica_groups[action.stage]
        if len(ranks) == 1:  # complete; if the weights are offloaded, not needed on the device
            if self.plan.residency[action.stage].weights_offload:
                self._stamped(action, lambda: self._reduced(action.stage))
            return

        def work() -> None:
            now, self.rest[action] = _reductions(self, action.stage)
            self.handles[action] += [begin() for begin in now]

        self._stamped(action, work)

    def _end_reduce(self, begun: Action) -> None:
        if begun in self.handles:
            self.handles[begun] += [begin() for begin in self.rest.pop(begun, ())]
            self._wait(begun)
            self._stamped(begun, lambda: self._reduced(begun.stage))

    def _reduced(self, stage: int) -> None:
        self.adapter.unbucket(stage)
        self._count_state()

    def _unshard(self, action: Action) -> None:
        ranks = self.plan.replica_groups[action.stage]

        def work() -> None:
            buffers, handles = self.adapter.unshard(action.stage)
            self._count_state()
            handles += [self.transport.all_gather(buffer, ranks) for buffer in buffers]
            self.handles[action] = handles

        self._stamped(action, work)

    def _reduce_tied(self, action: Action) -> None:
        def work() -> None:
            tied = self.adapter.tied_gradients(action.stage)
            self.handles[action] = [self.transport.all_reduce(*pair) for pair in tied]

        self._stamped(action, work)

    def _end_reduce_tied(self, begun: Action) -> None:
        self._wait(begun)
        self._stamped(begun, lambda: self.adapter.finish_tied(begun.stage))

    def _gather(self, action: Action) -> None:
        ranks = self.plan.replica_groups[action.stage]

        def work() -> None:
            buffers = self.adapter.updated(action.stage)
            self._count_state()
            self.handles[action] = [self.transport.all_gather(buffer, ranks) for buffer in buffers]

        self._stamped(action, work)

    def _end_gather(self, begun: Action) -> None:
        self._wait(begun)
        self.adapter.finish_updated(begun.stage)
        self._count_state()

    def _reshard(self, action: Action) -> None:
        def work() -> None:
            self.adapter.reshard(action.stage)
            self._count_state()

        self._stamped(action, work)

    def _step_optimizer(self, action: Action) -> None:
        update = self.update
        assert update is not None, f"{action} in a schedule of a trainer that updates by itself"

        def work() -> None:
            loaded, handle = update(action.stage)
            self.meter.spike("optimizer", loaded)
            self._count_state()
            self.handles[action] = [] if isinstance(handle, Done) else [handle]

        self._stamped(action, work)

    def _end_step(self, begun: Action) -> None:
        def work() -> None:
            self._wait(begun)
            self._count_state()

        if self.handles.get(begun):
            self._stamped(begun, work)

    # --- activations that are offloaded -----------------------------------------------------

    def _store(self, action: Action) -> None:
        def work() -> None:
            self.meter.begin_store(self._saved(action)[0])
            self.handles[action] = self.adapter.store(action.stage, action.micro_batch)

        self._stamped(action, work)

    def _end_store(self, begun: Action) -> None:
        self._wait(begun)
        self.adapter.release_stored(begun.stage, begun.micro_batch)
        self.meter.end_store(*self._saved(begun))

    def _load(self, action: Action) -> None:
        def work() -> None:
            self.meter.begin_load(*self._saved(action))
            self.handles[action] = self.adapter.load(action.stage, action.micro_batch)

        self._stamped(action, work)

    def _end_load(self, begun: Action) -> None:
        self._wait(begun)
        self.adapter.finish_load(begun.stage, begun.micro_batch)
        self.meter.end_load(self._saved(begun)[0])

    def _measured(self) -> Measured:
        meter, seconds, sent = self.meter, self.adapter.seconds, dict(self.messages.sent)
        rank, most = self.transport.rank, meter.max_in_flight
        return Measured(rank, self.stamps, meter.peak, most, seconds, sent)


Begin = Callable[[], Work]


def _reductions(engine: Engine, stage: int) -> tuple[list[Begin], list[Begin]]:
    """All-reduces of a stage's gradients: to begin now, and when they are waited for.

    Buffers are several if there are several types, or shards. Unless the stage's ranks have no
    other stage to run meanwhile, one begins now. On a GPU a second would be behind it in a hardware
    queue, before work that other ranks need to come to the first (gems/schedule/nccl.py).
    """
    adapter, transport, ranks = engine.adapter, engine.transport, engine.plan.replica_groups[stage]
    buckets = [partial(transport.all_reduce, x, ranks) for x in adapter.bucket(stage)]
    shards = [partial(transport.reduce_scatter, x, ranks) for x in adapter.scattered(stage)]
    if overlaps(engine.plan, stage):
        return [*buckets, *shards], []
    every = [*shards, *buckets]
    return every[:1], every[1:]


Do = Callable[[Engine, Action], None]
RUN: dict[Kind, Do] = {
    Kind.FORWARD: Engine._forward,
    Kind.RECOMPUTE: Engine._recompute,
    Kind.BACKWARD: Engine._backward,
    Kind.INPUT: Engine._backward,
    Kind.WEIGHT: Engine._weight,
    Kind.ALL_REDUCE: Engine._reduce,
    Kind.UNSHARD: Engine._unshard,
    Kind.RESHARD: Engine._reshard,
    Kind.TIED: Engine._reduce_tied,
    Kind.OPTIMIZER_STEP: Engine._step_optimizer,
    Kind.ALL_GATHER: Engine._gather,
    Kind.STORE: Engine._store,
    Kind.LOAD: Engine._load,
}
COMPLETE: dict[Kind, Do] = {
    Kind.ALL_REDUCE: Engine._end_reduce,
    Kind.UNSHARD: Engine._wait,
    Kind.TIED: Engine._end_reduce_tied,
    Kind.OPTIMIZER_STEP: Engine._end_step,
    Kind.ALL_GATHER: Engine._end_gather,
    Kind.STORE: Engine._end_store,
    Kind.LOAD: Engine._end_load,
}
