"""What the engine asks of TensorFlow: its actions, given to the stage runner."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from gems.distributed.transfer import Transfer
from gems.engine.adapter import Reduce
from gems.keras.arrays import Array, size
from gems.keras.runtime.reshard import buffers, pack, unpack
from gems.keras.runtime.stage_runner import StageRunner, Tensors
from gems.keras.runtime.step_state import StepState
from gems.predict.timeline import Memory
from gems.schedule.action import Message
from gems.transport.protocol import Work


class KerasAdapter:
    """The engine's adapter, for one batch at a time. Tensors are on the CPU."""

    state: StepState

    def __init__(self, runner: StageRunner) -> None:
        self.runner, self.weights, self.rank = runner, runner.weights, runner.weights.rank

    def skips(self, micro_batch: int) -> bool:
        return micro_batch not in self.state.partitions

    # --- compute ------------------------------------------------------------------------------

    def forward(self, stage: int, micro_batch: int, received: Tensors) -> Tensors:
        return self.runner.forward(self.state, stage, micro_batch, received)

    def recompute(self, stage: int, micro_batch: int) -> None:
        self.runner.recompute(self.state, stage, micro_batch)

    def backward(
        self,
        stage: int,
        micro_batch: int,
        gradients: Sequence[Tensors],
        *,
        whole: bool,
        reduce: Reduce | None = None,
    ) -> Tensors:
        return self.runner.backward(self.state, stage, micro_batch, gradients, whole=whole)

    def weight(self, stage: int, micro_batch: int) -> None:
        self.runner.weight_gradients(self.state, stage, micro_batch)

    # --- messages -----------------------------------------------------------------------------

    def _transfers(self, message: Message) -> list[Transfer]:
        i = message.micro_batch
        return self.state.partitions[i].message_transfers(message, i)

    def select(self, message: Message, tensors: Tensors) -> Tensors:
        values = self.state.partitions[message.micro_batch].values(message)
        return {value.name: tensors[value.name] for value in values}

    def pack(self, message: Message, tensors: Tensors, target: int) -> list[Array]:
        return pack(self._transfers(message), tensors, self.rank, target)

    def buffers(self, message: Message, source: int) -> list[Array]:
        return buffers(self._transfers(message), self.rank, source)

    def unpack(
        self, message: Message, own: Tensors | None, arrived: dict[int, list[Array]]
    ) -> Tensors:
        return unpack(self._transfers(message), self.rank, own, arrived)

    # --- gradients and weights ----------------------------------------------------------------

    def bucket(self, stage: int) -> list[Array]:
        return self.weights.buckets[stage].buffers

    def unbucket(self, stage: int) -> None:
        """They were summed in place."""

    def tied_gradients(self, stage: int) -> list[tuple[Array, tuple[int, ...]]]:
        return self.weights.tied(stage)

    def finish_tied(self, stage: int) -> None:
        """They were summed in place."""

    # Nothing is sharded or offloaded: plans with such fields are rejected (offered.py).

    def send_stored(
        self, message: Message, tensors: Tensors, target: int
    ) -> tuple[int, list[Work]]:
        return 0, []

    def receive_stored(self, message: Message, source: int) -> list[Work]:
        return []

    def scattered(self, stage: int) -> list[Array]:
        return []

    def unshard(self, stage: int) -> tuple[list[Array], list[Work]]:
        return [], []

    def reshard(self, stage: int) -> None:
        return None

    def updated(self, stage: int) -> list[Array]:
        return []

    def finish_updated(self, stage: int) -> None:
        return None

    def store(self, stage: int, micro_batch: int) -> list[Work]:
        return []

    def release_stored(self, stage: int, micro_batch: int) -> None:
        return None

    def load(self, stage: int, micro_batch: int) -> list[Work]:
        return []

    def finish_load(self, stage: int, micro_batch: int) -> None:
        return None

    # --- bytes and seconds --------------------------------------------------------------------

    def activation_bytes(self, stage: int, micro_batch: int) -> int:
        return self.state.activation_bytes.get((stage, micro_batch), 0)

    def temporary_bytes(self, stage: int, micro_batch: int) -> int:
        return self.state.temporary_bytes[stage, micro_batch]

    def resident_memory(self) -> Memory:
        return self.weights.resident_memory()

    def size(self, buffers: Sequence[Any]) -> int:
        return sum(map(size, buffers))

    def start_clock(self) -> None:
        """Stamps are absolute."""

    def stamp(self) -> tuple[float, float]:
        """TensorFlow computes in threads of its own, so CPU seconds are the process's."""
        return time.perf_counter(), time.process_time()

    def seconds(self, stamp: tuple[float, float]) -> tuple[float, float]:
        return stamp
