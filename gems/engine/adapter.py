"""What the engine asks of a framework."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from gems.predict.timeline import Memory
from gems.schedule.action import Message
from gems.transport.protocol import Work

Tensors = dict[str, Any]
Reduce = Callable[[Any], None]  # begin to all-reduce a flat buffer over a stage's replica group


class Adapter(Protocol):
    """Runs stages of a model on this rank's device. Tensors are opaque to the engine."""

    def skips(self, micro_batch: int) -> bool:
        """Whether this micro-batch has no samples in this step, so that nobody runs it."""
        ...

    def forward(self, stage: int, micro_batch: int, received: Tensors) -> Tensors:
        """Run a stage on what others sent; its outputs by name."""
        ...

    def recompute(self, stage: int, micro_batch: int) -> None:
        """Recompute a forward that saved only its inputs, and save its activations."""
        ...

    def backward(
        self,
        stage: int,
        micro_batch: int,
        gradients: Sequence[Tensors],
        *,
        whole: bool,
        reduce: Reduce | None = None,
    ) -> Tensors:
        """Gradients of the inputs, given the outputs'. Not `whole`: those of weights follow.

        `reduce`: the stage's last, inside which it may begin to all-reduce parts of `bucket`.
        """
        ...

    def weight(self, stage: int, micro_batch: int) -> None:
        """The deferred weight gradients."""
        ...

    def select(self, message: Message, tensors: Tensors) -> Tensors:
        """The part of a stage's results that a message carries."""
        ...

    def pack(self, message: Message, tensors: Tensors, target: int) -> list[Any]:
        """Flat buffers to send to a rank: what it wants of this rank's part; none if nothing."""
        ...

    def buffers(self, message: Message, source: int) -> list[Any]:
        """Flat buffers to receive from a rank, as `pack` makes them there."""
        ...

    def unpack(
        self, message: Message, own: Tensors | None, arrived: dict[int, list[Any]]
    ) -> Tensors:
        """A message put together: the part of this rank itself, if any, and what others sent."""
        ...

    def send_stored(
        self, message: Message, tensors: Tensors, target: int
    ) -> tuple[int, list[Work]]:
        """Begin to send what a rank wants of values that are in a store, if the plan has any: its
        bytes, and handles. `pack` has the others."""
        ...

    def receive_stored(self, message: Message, source: int) -> list[Work]:
        """Begin to receive them."""
        ...

    def bucket(self, stage: int) -> list[Any]:
        """Gradients to all-reduce over the replica group of a stage, in place; but for those that
        its last backward has begun to."""
        ...

    def scattered(self, stage: int) -> list[Any]:
        """Gradients to reduce-scatter, so that each rank has its own shard, in place."""
        ...

    def unbucket(self, stage: int) -> None:
        """The reduced gradients are there."""
        ...

    def unshard(self, stage: int) -> tuple[list[Any], list[Work]]:
        """Allocate a stage's weights: what to all-gather, if they are sharded, and what is being
        loaded, if they are offloaded."""
        ...

    def reshard(self, stage: int) -> None:
        """Free all weights of a stage but the own shard."""
        ...

    def tied_gradients(self, stage: int) -> list[tuple[Any, tuple[int, ...]]]:
        """Gradients of weights that a stage shares with later ones, to all-reduce in place, each
        over its own ranks."""
        ...

    def finish_tied(self, stage: int) -> None:
        """Their sums are there."""
        ...

    def updated(self, stage: int) -> list[Any]:
        """Weights of a stage to all-gather, of which each rank has updated its shard."""
        ...

    def finish_updated(self, stage: int) -> None:
        """All of them are there."""
        ...

    def store(self, stage: int, micro_batch: int) -> list[Work]:
        """Begin to offload what a micro-batch saved on a stage."""
        ...

    def release_stored(self, stage: int, micro_batch: int) -> None:
        """It is stored: free its memory."""
        ...

    def load(self, stage: int, micro_batch: int) -> list[Work]:
        """Allocate it, and begin to load it."""
        ...

    def finish_load(self, stage: int, micro_batch: int) -> None:
        """It is here again."""
        ...

    def activation_bytes(self, stage: int, micro_batch: int) -> int:
        """Bytes that are saved for backward now, after forward or after recomputation."""
        ...

    def temporary_bytes(self, stage: int, micro_batch: int) -> int:
        """Bytes that were live beside the activations while backward recomputed blocks."""
        ...

    def resident_memory(self) -> Memory:
        """Bytes of weights, gradients and optimizer state, as they are now."""
        ...

    def size(self, buffers: Sequence[Any]) -> int:
        """Bytes of these buffers."""
        ...

    def start_clock(self) -> None:
        """A step begins, and its stamps count from here."""
        ...

    def stamp(self) -> Any:
        """Now, on the clock of the device."""
        ...

    def seconds(self, stamp: Any) -> tuple[float, float]:
        """Wall and CPU seconds of a stamp. The host waits until the device has come there."""
        ...
