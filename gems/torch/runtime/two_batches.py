"""Two batches under way at once: an adapter that is of one of them, then of the other.

The engine names micro-batches by turns (see schedule/async_window.py). Each action is done by the
plain adapter, which is given the state of its batch, and the version of weights that it uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from gems.plans.plan import Plan
from gems.predict.timeline import Memory
from gems.schedule.action import Message
from gems.schedule.async_window import AT_ONCE, place
from gems.torch.runtime.adapter import OF_A_BATCH, TorchAdapter
from gems.torch.runtime.microbatch import Batch
from gems.torch.state.weight_versions import WeightVersions
from gems.torch.tracing.op_meter import storage_of
from gems.transport.protocol import Work

Tensor = torch.Tensor
Tensors = dict[str, Tensor]


class Turns:
    """What the engine asks of a framework, for two batches."""

    def __init__(self, adapter: TorchAdapter, plan: Plan) -> None:
        self.plain, self.plan = adapter, plan
        self.versions = WeightVersions(())
        self.states: list[dict[str, Any]] = [{}, {}]
        self.now: int | None = None  # whose state the adapter has
        self.begun = self.summed = 0  # batches

    def begin(self, batch: Batch, step: int) -> None:
        """Get ready for the next batch, while the one before is under way."""
        self.cover()
        self.now = None  # if the next line raises, the state is nobody's
        self.plain.begin(batch, step, training=True)
        turn = self.begun % AT_ONCE
        earlier = self.states[1 - turn].get("statistics", {}) if self.begun > self.summed else {}
        for stage, statistics in self.plain.statistics.items():
            if stage in earlier:
                statistics.follow(earlier[stage])
        self.states[turn] = {name: getattr(self.plain, name) for name in OF_A_BATCH}
        self.now = turn
        self.begun += 1

    def cover(self) -> None:
        """Have two versions of all that is trained."""
        new = self.versions.cover(self.plain.parameters_here)
        self.plain.weight_storages.update(map(storage_of, new))

    def rest(self) -> None:
        """Show the newest weights; whoever looks at the model between steps sees those."""
        self.versions.show(self.versions.updates)

    def restart(self) -> None:
        """Nothing is under way: the next batch uses the version before the newest."""
        self.begun = self.summed = self.versions.updates
        self.states, self.now = [{}, {}], None
        self.rest()

    def turn_to(self, turn: int) -> None:
        """Have the state of the even batch, or of the odd one."""
        if turn != self.now:
            for name, value in self.states[turn].items():
                setattr(self.plain, name, value)
            self.now = turn

    def _at(self, name: int) -> int:
        """Turn to the batch of a micro-batch; gives its number there."""
        turn, i = place(name, self.plan)
        self.turn_to(turn)
        return i

    def _run_at(self, name: int) -> int:
        """The same, with the weights that the batch uses."""
        i = self._at(name)
        newest = self.begun - 1
        batch = newest if newest % AT_ONCE == self.now else newest - 1
        self.versions.show(max(batch - 1, 0))
        return i

    def _plainly(self, message: Message) -> Message:
        return message._replace(micro_batch=self._at(message.micro_batch))

    # --- what the engine asks -----------------------------------------------------------------

    def skips(self, micro_batch: int) -> bool:
        return self.plain.skips(self._at(micro_batch))

    def forward(self, stage: int, micro_batch: int, received: Tensors) -> Tensors:
        return self.plain.forward(stage, self._run_at(micro_batch), received)

    def recompute(self, stage: int, micro_batch: int) -> None:
        self.plain.recompute(stage, self._run_at(micro_batch))

    def backward(
        self, stage: int, micro_batch: int, gradients: Sequence[Tensors], *, whole: bool
    ) -> Tensors:
        return self.plain.backward(stage, self._run_at(micro_batch), gradients, whole=whole)

    def weight(self, stage: int, micro_batch: int) -> None:
        self.plain.weight(stage, self._run_at(micro_batch))

    def select(self, message: Message, tensors: Tensors) -> Tensors:
        return self.plain.select(self._plainly(message), tensors)

    def pack(self, message: Message, tensors: Tensors, target: int) -> list[Tensor]:
        return self.plain.pack(self._plainly(message), tensors, target)

    def buffers(self, message: Message, source: int) -> list[Tensor]:
        return self.plain.buffers(self._plainly(message), source)

    def unpack(
        self, message: Message, own: Tensors | None, arrived: dict[int, list[Tensor]]
    ) -> Tensors:
        return self.plain.unpack(self._plainly(message), own, arrived)

    def bucket(self, stage: int) -> list[Tensor]:
        self.turn_to(self.summed % AT_ONCE)
        return self.plain.bucket(stage)

    def scattered(self, stage: int) -> list[Tensor]:
        return self.plain.scattered(stage)

    def unbucket(self, stage: int) -> None:
        self.turn_to(self.summed % AT_ONCE)
        self.plain.unbucket(stage)

    def unshard(self, stage: int) -> tuple[list[Tensor], list[Work]]:
        return self.plain.unshard(stage)

    def reshard(self, stage: int) -> None:
        self.plain.reshard(stage)

    def store(self, stage: int, micro_batch: int) -> list[Work]:
        return self.plain.store(stage, self._at(micro_batch))

    def release_stored(self, stage: int, micro_batch: int) -> None:
        self.plain.release_stored(stage, self._at(micro_batch))

    def load(self, stage: int, micro_batch: int) -> list[Work]:
        return self.plain.load(stage, self._at(micro_batch))

    def finish_load(self, stage: int, micro_batch: int) -> None:
        self.plain.finish_load(stage, self._at(micro_batch))

    def activation_bytes(self, stage: int, micro_batch: int) -> int:
        return self.plain.activation_bytes(stage, self._at(micro_batch))

    def temporary_bytes(self, stage: int, micro_batch: int) -> int:
        return self.plain.temporary_bytes(stage, self._at(micro_batch))

    def resident_memory(self) -> Memory:
        found = self.plain.resident_memory()
        return replace(found, weights=found.weights + self.versions.bytes)

    def size(self, buffers: Sequence[Tensor]) -> int:
        return self.plain.size(buffers)

    def stamp(self) -> Any:
        return self.plain.stamp()

    def seconds(self, stamp: Any) -> tuple[float, float]:
        return self.plain.seconds(stamp)
