"""Copies of what a step changes before its optimizer step, so that a failed step can be undone.

Forward changes buffers (running statistics), backward adds to gradients, and each call of an
accumulation counts its samples. The optimizer step itself is not undone: it comes last, once all
ranks know that the loss is a number.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

Tensor = torch.Tensor
COUNTERS = ("steps", "window", "first")


@dataclass
class Rollback:
    """The state of a trainer at the beginning of a step."""

    counters: dict[str, int]
    gradients: list[tuple[nn.Parameter, Tensor | None]]
    buffers: list[tuple[Any, str, Tensor, Tensor]] = field(default_factory=list)

    @classmethod
    def at(cls, trainer: Any, parameters: Iterable[nn.Parameter]) -> Rollback:
        """Before a step begins. Gradients are copied only while they are accumulated; otherwise a
        step starts with none."""
        accumulating = trainer.window > 0
        return cls(
            {name: getattr(trainer, name) for name in COUNTERS},
            [
                (p, p.grad.clone() if accumulating and p.grad is not None else None)
                for p in parameters
            ],
        )

    def save_buffers(self, buffers: Iterable[tuple[Any, str]]) -> None:
        """Copy buffers that forward is about to change or assign: each as its owner and key."""
        self.buffers += [(own, key, own[key], own[key].detach().clone()) for own, key in buffers]

    def undo(self, trainer: Any) -> None:
        for name, value in self.counters.items():
            setattr(trainer, name, value)
        for parameter, gradient in self.gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for own, key, tensor, before in self.buffers:
                tensor.copy_(before)
                own[key] = tensor
