"""What the engine asks of PyTorch: its actions, given to the stage runner with their batch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from gems.distributed.transfer import Transfer
from gems.engine.adapter import Reduce
from gems.predict.timeline import Memory
from gems.schedule.action import Message
from gems.torch.offload.activations import OffloadedTensors
from gems.torch.offload.stored_value import StoredValue
from gems.torch.runtime.reshard import buffers, pack, unpack
from gems.torch.runtime.stage_runner import StageRunner, Tensors
from gems.torch.runtime.step_state import StepState
from gems.torch.runtime.stored_messages import StoredMessages
from gems.torch.state.rank_weights import size
from gems.torch.state.tied_gradients import pack_tied, unpack_tied
from gems.transport.protocol import Work

Tensor = torch.Tensor


class BatchesInFlight(Protocol):
    """The step states of the batches in flight. The engine numbers the micro-batches of all of
    them; `at` gives the state of one and its number in that batch."""

    def at(self, micro_batch: int) -> tuple[StepState, int]: ...

    def running(self, micro_batch: int) -> tuple[StepState, int]:
        """The same, with the weight version that the batch uses."""
        ...

    def reducing(self) -> StepState:
        """The batch whose gradients are reduced next."""
        ...

    @property
    def version_bytes(self) -> int:
        """Of weight versions besides the one that parameters have."""
        ...


class OneBatch:
    """One batch at a time, as with every schedule but the asynchronous one."""

    state: StepState
    version_bytes = 0

    def at(self, micro_batch: int) -> tuple[StepState, int]:
        return self.state, micro_batch

    running = at

    def reducing(self) -> StepState:
        return self.state


class TorchAdapter:
    """The engine's adapter. It adds nothing to the runner but whose batch an action is of."""

    def __init__(self, runner: StageRunner, batches: BatchesInFlight) -> None:
        self.runner, self.batches = runner, batches
        self.plan, self.weights = runner.plan, runner.weights
        self.device, self.rank = runner.programs.device, runner.weights.rank
        self.arriving: dict[Message, dict[str, StoredValue]] = {}  # from store to store
        self.start_clock()

    def skips(self, micro_batch: int) -> bool:
        state, i = self.batches.at(micro_batch)
        return not state.batch.sizes[i]

    # --- compute ------------------------------------------------------------------------------

    def forward(self, stage: int, micro_batch: int, received: Tensors) -> Tensors:
        state, i = self.batches.running(micro_batch)
        found = self.runner.forward(state, stage, i, received)
        if state.training and stage == self.plan.depth - 1:
            self._read_losses(state)
        return found

    def _read_losses(self, state: StepState) -> None:
        """Begin to read the losses as soon as all are there, so that nobody who wants them waits
        for the backwards that follow."""
        groups = (self.plan.spatial_group_for(self.plan.depth - 1, i) for i in state.position)
        if len(state.losses) == sum(self.rank in group for group in groups):
            state.read_losses()

    def recompute(self, stage: int, micro_batch: int) -> None:
        state, i = self.batches.running(micro_batch)
        self.runner.recompute(state, stage, i)

    def backward(
        self,
        stage: int,
        micro_batch: int,
        gradients: Sequence[Tensors],
        *,
        whole: bool,
        reduce: Reduce | None = None,
    ) -> Tensors:
        state, i = self.batches.running(micro_batch)
        found = self.runner.backward(state, stage, i, gradients, whole=whole, reduce=reduce)
        if stage == self.plan.depth - 1 and state.reading is None:
            self._read_losses(state)  # a streamed stage may have computed it only now
        return found

    def weight(self, stage: int, micro_batch: int) -> None:
        state, i = self.batches.running(micro_batch)
        self.runner.weight_gradients(state, stage, i)

    # --- offloaded activations ----------------------------------------------------------------

    def store(self, stage: int, micro_batch: int) -> list[Work]:
        assert self.runner.activation_store is not None
        return self._offloaded(stage, micro_batch).offload(self.runner.activation_store)

    def release_stored(self, stage: int, micro_batch: int) -> None:
        self._offloaded(stage, micro_batch).free()

    def load(self, stage: int, micro_batch: int) -> list[Work]:
        return self._offloaded(stage, micro_batch).prefetch()

    def finish_load(self, stage: int, micro_batch: int) -> None:
        self._offloaded(stage, micro_batch).finish_prefetch()

    def _offloaded(self, stage: int, micro_batch: int) -> OffloadedTensors:
        state, i = self.batches.at(micro_batch)
        found = state.saved[stage, i].offloaded
        assert found is not None, "the schedule does not offload these activations"
        return found

    # --- messages -----------------------------------------------------------------------------

    def select(self, message: Message, tensors: Tensors) -> Tensors:
        state, i = self.batches.at(message.micro_batch)
        return {v.name: tensors[v.name] for v in state.partitions[i].values(message)}

    def _transfers(self, message: Message) -> list[Transfer]:
        """Of what is not in a store."""
        state, i = self.batches.at(message.micro_batch)
        stored = self._stored(message)
        found = state.partitions[i].message_transfers(message, i)
        return [transfer for transfer in found if transfer.value.name not in stored]

    def _stored(self, message: Message) -> frozenset[str]:
        state, i = self.batches.at(message.micro_batch)
        return state.partitions[i].stored

    def pack(self, message: Message, tensors: Tensors, target: int) -> list[Tensor]:
        return pack(self._transfers(message), tensors, self.rank, target)

    def buffers(self, message: Message, source: int) -> list[Tensor]:
        return buffers(self._transfers(message), self.rank, source, self.device)

    def unpack(
        self, message: Message, own: Tensors | None, arrived: dict[int, list[Tensor]]
    ) -> Tensors:
        found = unpack(self._transfers(message), self.rank, own, arrived, self.device)
        stored = self._stored(message)
        found |= {name: x for name, x in (own or {}).items() if name in stored}
        arrived_stored = self.arriving.pop(message, {})
        return found | {n: x if x.written else None for n, x in arrived_stored.items()}

    # --- messages from store to store ---------------------------------------------------------

    def send_stored(
        self, message: Message, tensors: Tensors, target: int
    ) -> tuple[int, list[Work]]:
        moving = [
            self._messages.send(transfer, tensors[transfer.value.name], target)
            for transfer in self._stored_transfers(message)
        ]
        return sum(x.size for x in moving), [x.work for x in moving]

    def receive_stored(self, message: Message, source: int) -> list[Work]:
        state, i = self.batches.at(message.micro_batch)
        found: list[Work] = []
        for transfer in self._stored_transfers(message):
            into = state.partitions[i].place_stored(transfer.value, self._messages.store)
            self.arriving.setdefault(message, {})[transfer.value.name] = into
            found.append(self._messages.receive(transfer, into, source).work)
        return found

    def _stored_transfers(self, message: Message) -> list[Transfer]:
        """Tiles are where they are read."""
        state, i = self.batches.at(message.micro_batch)
        sent = self._stored(message).difference(state.partitions[i].handed_on)
        found = state.partitions[i].message_transfers(message, i)
        return [transfer for transfer in found if transfer.value.name in sent]

    @property
    def _messages(self) -> StoredMessages:
        found = self.runner.programs.stored_messages
        assert found is not None, "the plan has no values in a store"
        return found

    # --- gradients and weights ----------------------------------------------------------------

    def bucket(self, stage: int) -> list[Tensor]:
        state = self.batches.reducing()
        state.place_gradients(stage, self.weights)
        return state.buckets[stage].pack()

    def scattered(self, stage: int) -> list[Tensor]:
        reduced = self.batches.reducing().update and stage in self.weights.shards
        return self.weights.shards[stage].gradients if reduced else []

    def unbucket(self, stage: int) -> None:
        self.batches.reducing().finish_reduction(stage, self.weights)

    def unshard(self, stage: int) -> tuple[list[Tensor], list[Work]]:
        return self.weights.unshard(stage)

    def reshard(self, stage: int) -> None:
        advances = self.batches.reducing().advances
        if stage in advances:  # also on a rank that ran no sample
            advances[stage].prepare()
        self.weights.reshard(stage)

    def tied_gradients(self, stage: int) -> list[tuple[Tensor, tuple[int, ...]]]:
        state, groups = self.batches.reducing(), self.weights.owned.replica_groups
        if state.update:
            state.tied[stage] = pack_tied(self.weights, stage)
        return [(flat, groups[name]) for name, flat in state.tied.get(stage, {}).items()]

    def finish_tied(self, stage: int) -> None:
        unpack_tied(self.weights, self.batches.reducing().tied.pop(stage, {}))

    def updated(self, stage: int) -> list[Tensor]:
        return self.weights.shards[stage].load_updated() if stage in self.weights.shards else []

    def finish_updated(self, stage: int) -> None:
        if stage in self.weights.shards:
            self.weights.shards[stage].keep_updated()

    # --- bytes and seconds --------------------------------------------------------------------

    def activation_bytes(self, stage: int, micro_batch: int) -> int:
        state, i = self.batches.at(micro_batch)
        return state.activation_bytes.get((stage, i), 0)

    def temporary_bytes(self, stage: int, micro_batch: int) -> int:
        state, i = self.batches.at(micro_batch)
        return state.temporary_bytes[stage, i]

    def resident_memory(self) -> Memory:
        """With the values that are in a store now."""
        found, values = self.weights.resident_memory(), self.runner.programs.values
        stored = 0 if values is None else values.used
        weights = found.weights + self.batches.version_bytes
        return replace(found, weights=weights, offloaded=found.offloaded + stored)

    def size(self, buffers: Sequence[Any]) -> int:
        """On the device: of notes in host memory, and of values in a store, nothing is counted."""
        tensors = [x for x in buffers if isinstance(x, Tensor)]
        return size([x for x in tensors if x.device.type == self.device.type])

    def start_clock(self) -> None:
        """Of a GPU: the host's seconds, and an event. Events tell milliseconds between each other
        in float32, which is too coarse after some hours; so a clock runs for one step."""
        gpu = self.device.type == "cuda"
        self.clock = (time.perf_counter(), self._event()) if gpu else None

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def stamp(self) -> Any:
        if self.clock is not None:
            return _DeviceStamp(*self.clock, self._event())
        return time.perf_counter(), time.thread_time()

    def seconds(self, stamp: Any) -> tuple[float, float]:
        """On a GPU both are the device's time."""
        return stamp.seconds() if isinstance(stamp, _DeviceStamp) else stamp


@dataclass(frozen=True)
class _DeviceStamp:
    """An event, and where its clock started: at the host's seconds, and at another event."""

    started: float
    first: torch.cuda.Event
    event: torch.cuda.Event

    def seconds(self) -> tuple[float, float]:
        self.event.synchronize()
        found = self.started + self.first.elapsed_time(self.event) / 1e3
        return found, found
