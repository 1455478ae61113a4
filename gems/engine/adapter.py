"""What the engine asks of a framework."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from gems.predict.timeline import Memory
from gems.schedule.action import Message
from gems.transport.protocol import Work

Tensors = dict[str, Any]


class Adapter(Protocol):
    """Runs stages of a model on this rank's device. Tensors are opaque to the engine."""

    def skips(self, micro_batch: int) -> bool:
        """Whether this micro-batch has no samples in this step, so that nobody runs it."""
        ...

    def forward(self, stage: int, micro_batch: int, received: Tensors) -> Tensors:
        """Run a stage on what others sent; its outputs by name."""
        ...

    def recompute(self, stage: int, micro_batch: int) -> None:
        """Run a forward again that kept only what it received, and keep all this time."""
        ...

    def backward(
        self, stage: int, micro_batch: int, gradients: Sequence[Tensors], *, whole: bool
    ) -> Tensors:
        """Gradients of what was received, given the outputs'. Not `whole`: weights come later."""
        ...

    def weight(self, stage: int, micro_batch: int) -> None:
        """The weight gradients that were put off."""
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

    def bucket(self, stage: int) -> list[Any]:
        """What to sum over the holders of a stage, in place."""
        ...

    def scattered(self, stage: int) -> list[Any]:
        """What to sum so that each holder has its own part, in place."""
        ...

    def unbucket(self, stage: int) -> None:
        """The sums are there."""
        ...

    def unshard(self, stage: int) -> tuple[list[Any], list[Work]]:
        """Make room for a stage's weights: what to gather, if each holder has a part, and what is
        under way from where it was put away."""
        ...

    def reshard(self, stage: int) -> None:
        """Let go of all weights of a stage but the own part."""
        ...

    def store(self, stage: int, micro_batch: int) -> list[Work]:
        """Begin to put away what a micro-batch keeps on a stage."""
        ...

    def release_stored(self, stage: int, micro_batch: int) -> None:
        """That is stored: its memory may go."""
        ...

    def load(self, stage: int, micro_batch: int) -> list[Work]:
        """Make room for it, and begin to fetch it."""
        ...

    def finish_load(self, stage: int, micro_batch: int) -> None:
        """It is here again."""
        ...

    def activation_bytes(self, stage: int, micro_batch: int) -> int:
        """Bytes that are kept for backward now, after forward or after recomputation."""
        ...

    def temporary_bytes(self, stage: int, micro_batch: int) -> int:
        """Bytes that were live beside the stash while backward recomputed blocks."""
        ...

    def resident_memory(self) -> Memory:
        """Bytes of weights, gradients and optimizer state, as they are now."""
        ...

    def size(self, buffers: Sequence[Any]) -> int:
        """Bytes of these buffers."""
        ...

    def stamp(self) -> Any:
        """Now, on the clock of the device."""
        ...

    def seconds(self, stamp: Any) -> tuple[float, float]:
        """Wall and CPU seconds of a stamp, once the step is over."""
        ...
