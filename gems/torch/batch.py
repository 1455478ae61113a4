"""One step's samples, cut into micro-batches along their first dimension."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.utils import _pytree as pytree

from gems.errors import ShapeError
from gems.geometry import cuts

Tensor = torch.Tensor


@dataclass(frozen=True)
class Batch:
    """Inputs and targets of each micro-batch, in order. A size of 0 means that nobody runs it."""

    inputs: list[Any]
    targets: list[Any]
    sizes: list[int]

    @property
    def samples(self) -> int:
        return sum(self.sizes)


def tensors(tree: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)]


def describe(tree: Any) -> str:
    """Shapes and types, as people write them."""
    return ", ".join(f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" for x in tensors(tree))


def split(inputs: Any, targets: Any, micro_batches: int) -> Batch:
    """Near-equal micro-batches; fewer samples than micro-batches leave the last ones empty.

    Tensors in `targets` are cut like the inputs if they are as long; what is not goes to all.
    """
    given = tensors(inputs)
    lengths = {x.shape[0] if x.dim() else 0 for x in given}
    if len(lengths) != 1 or not min(lengths):
        raise ShapeError(
            "inputs must be tensors with the samples along their first dimension, equally many; "
            f"got {describe(inputs) or type(inputs).__name__}"
        )
    samples = lengths.pop()
    points = cuts(samples, micro_batches)

    def part(tree: Any, start: int, stop: int) -> Any:
        def cut(x: Any) -> Any:
            whole = isinstance(x, Tensor) and x.dim() > 0 and x.shape[0] == samples
            return x[start:stop] if whole else x

        return pytree.tree_map(cut, tree)

    spans = list(pairwise(points))
    return Batch(
        [part(inputs, a, b) for a, b in spans],
        [part(targets, a, b) for a, b in spans],
        [b - a for a, b in spans],
    )
