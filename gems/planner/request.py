"""What a search is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gems.hardware import Machine


@dataclass(frozen=True)
class Wish:
    """What is asked for: so many ranks, bytes on each of them, micro-batches per step.

    `state` is what the optimizer keeps, in units of the gradients; `schedule` the only one wanted,
    or any that trains as one device does.
    """

    ranks: int
    memory: float
    micro_batches: int
    objective: str = "time"
    state: float = 2.0
    schedule: str = ""

    @classmethod
    def on(
        cls, machine: Machine, ranks: int, memory: float | None, micro_batches: int = 0, **rest: Any
    ) -> Wish:
        """By default all of the machine's memory, and two micro-batches per rank."""
        memory = machine.device.memory if memory is None else memory
        return cls(ranks, memory, micro_batches or 2 * ranks, **rest)
