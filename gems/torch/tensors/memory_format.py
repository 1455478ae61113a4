"""The memory format of images and of the weights that are applied to them: channels last, or as
they come."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from gems.errors import PlanError

DIMS = {torch.channels_last: 4, torch.channels_last_3d: 5}
FORMATS = {str(memory_format).removeprefix("torch."): memory_format for memory_format in DIMS}


def formatted_like(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`y`, which is row-major, in the memory format of `x`."""
    for memory_format, dims in DIMS.items():
        if x.dim() == dims and x.is_contiguous(memory_format=memory_format):
            return y if x.is_contiguous() else y.contiguous(memory_format=memory_format)
    return y


class MemoryFormat:
    """A memory format that tensors of its number of dims get; None leaves all as they are."""

    def __init__(self, chosen: torch.memory_format | str | None = None) -> None:
        found = FORMATS.get(str(chosen).removeprefix("torch."))
        if chosen is not None and found is None:
            raise PlanError(
                f"memory_format {chosen!r} is unknown; give {' or '.join(map(repr, FORMATS))}, or "
                "leave it out to keep the strides of model and inputs"
            )
        self.format: Any = found
        self.dims = -1 if found is None else DIMS[found]

    def __str__(self) -> str:
        return str(self.format)

    def __call__(self, x: Any) -> Any:
        """An input of the model in this format, in memory of its own if it was in another."""
        if not isinstance(x, torch.Tensor) or x.dim() != self.dims:
            return x
        return x.contiguous(memory_format=self.format)

    def stand_ins(self, sample: Any) -> Any:
        """Inputs to record on: those in another format as tensors without memory."""
        return pytree.tree_map(self._stand_in, sample)

    def _stand_in(self, x: Any) -> Any:
        ours = isinstance(x, torch.Tensor) and x.dim() == self.dims
        if not ours or x.is_contiguous(memory_format=self.format):
            return x
        made = torch.empty(x.shape, dtype=x.dtype, device="meta", memory_format=self.format)
        return made.requires_grad_(x.requires_grad)

    def apply(self, model: nn.Module, sample: Any) -> None:
        """Give the weights of a model this format. They stay the same Python objects."""
        weights = [*model.parameters(), *model.buffers()]
        inputs = [x for x in pytree.tree_leaves(sample) if hasattr(x, "shape")]
        if self.format is not None and all(len(x.shape) != self.dims for x in (*weights, *inputs)):
            raise PlanError(
                f"memory_format {self} is for tensors of {self.dims} dims, and the model has no "
                "such weight or input; leave it out"
            )
        for weight in weights:
            if weight.dim() == self.dims:
                weight.data = self(weight.data)
