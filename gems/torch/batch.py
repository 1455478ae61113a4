"""One step's samples, cut into micro-batches along their first dimension."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.utils import _pytree as pytree

from gems.errors import ShapeError
from gems.geometry import Box, cuts

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


class Lazy:
    """Some samples of an array that is read box by box: a slide, a volume, a memory map.

    Anything with `shape`, `dtype` and slices will do: numpy, h5py, zarr, or one's own.
    """

    def __init__(self, source: Any, start: int, stop: int) -> None:
        self.source, self.start = source, start
        self.shape = torch.Size((stop - start, *source.shape[1:]))
        self.dtype = _dtype(source.dtype)

    def read(self, box: Box) -> Tensor:
        first, *rest = box.slices()
        where = slice(first.start + self.start, first.stop + self.start)
        return torch.as_tensor(self.source[(where, *rest)]).to(self.dtype).contiguous()

    def dim(self) -> int:
        return len(self.shape)

    def stand_in(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


def _dtype(dtype: Any) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    name = str(dtype).removeprefix("torch.")
    name = {"float": "float32"}.get(name, name)
    try:
        return getattr(torch, name)
    except AttributeError:
        raise ShapeError(f"an array of {dtype} has no counterpart in torch; convert it") from None


def is_lazy(x: Any) -> bool:
    """Whether something is an array, but not a tensor."""
    return not isinstance(x, (Tensor, Lazy)) and all(
        hasattr(x, name) for name in ("shape", "dtype", "__getitem__")
    )


def read_box(x: Any, box: Box | None) -> Any:
    """A box of a tensor or an array, or all of it; anything else as it is."""
    if isinstance(x, Lazy):
        return x.read(box or Box.whole(x.shape))
    if box is None or not isinstance(x, Tensor):
        return x
    part = x[box.slices()]
    # A copy, so that the whole image need not stay for the sake of a part.
    return x if part.shape == x.shape else part.clone(memory_format=torch.contiguous_format)


def tensors(tree: Any) -> list[Any]:
    """The tensors, and the arrays to be read, in a tree."""
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, (Tensor, Lazy))]


def stand_ins(tree: Any) -> Any:
    """The same without arrays: tensors of their shape and type, and no memory."""
    return pytree.tree_map(lambda x: x.stand_in() if isinstance(x, Lazy) else x, tree)


def signature(tree: Any) -> tuple[Any, ...]:
    """What a recording depends on: shapes, strides and types, and all that is no tensor."""
    return tuple(
        (tuple(x.shape), x.stride(), x.dtype) if isinstance(x, Tensor) else x
        for x in pytree.tree_leaves(stand_ins(tree))
    )


def describe(tree: Any) -> str:
    """Shapes and types, as people write them."""
    return ", ".join(f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" for x in tensors(tree))


def _whole(x: Any) -> Any:
    return Lazy(x, 0, x.shape[0]) if is_lazy(x) and len(x.shape) else x


def split(inputs: Any, targets: Any, micro_batches: int) -> Batch:
    """Near-equal micro-batches; fewer samples than micro-batches leave the last ones empty.

    Tensors in `targets` are cut like the inputs if they are as long; what is not goes to all.
    """
    inputs, targets = pytree.tree_map(_whole, (inputs, targets))
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
            if not isinstance(x, (Tensor, Lazy)) or not x.dim() or x.shape[0] != samples:
                return x
            return Lazy(x.source, start, stop) if isinstance(x, Lazy) else x[start:stop]

        return pytree.tree_map(cut, tree)

    spans = list(pairwise(points))
    return Batch(
        [part(inputs, a, b) for a, b in spans],
        [part(targets, a, b) for a, b in spans],
        [b - a for a, b in spans],
    )
