"""One step's samples, split into micro-batches along their first dimension."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.utils import _pytree as pytree

from gems.errors import ShapeError
from gems.geometry.box import Box, split_points

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


def split(inputs: Any, targets: Any, micro_batches: int, batch_dim: Any = None) -> Batch:
    """Near-equal micro-batches; fewer samples than micro-batches leave the last ones empty.

    Targets are tensors with the samples along their first dim, lists or tuples with one entry per
    sample, or dicts, lists and tuples of these; numbers and texts go to all micro-batches. Where
    that is not so, `batch_dim` tells how they are split: a dim, "list", or "whole" for what all
    micro-batches get as it is; or a dict, list or tuple of these, shaped like the targets.
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
    spans = list(pairwise(split_points(samples, micro_batches)))
    one = batch_dim is None and sum(a < b for a, b in spans) == 1  # nothing needs to be split
    if targets is None or one:
        parts = [targets if a < b else None for a, b in spans]
    else:
        cut = _cutter(targets, samples, batch_dim, "targets")
        parts = [cut(a, b) for a, b in spans]

    def part(start: int, stop: int) -> Any:
        return pytree.tree_map(lambda x: _along(x, 0, start, stop) if _is_array(x) else x, inputs)

    return Batch([part(a, b) for a, b in spans], parts, [b - a for a, b in spans])


Cutter = Callable[[int, int], Any]  # from samples `start` to `stop` of something


def _cutter(x: Any, samples: int, told: Any, at: str) -> Cutter:
    """How to take some samples of targets, or of what is called `at` in them."""
    if told == "whole":
        return lambda a, b: x
    if told == "list":
        return _entries(x, samples, at)
    if isinstance(told, (dict, list, tuple)):
        if _keys(told) != _keys(x):
            raise ShapeError(
                f"batch_dim has {_keys(told)} where {at} has {_keys(x)}; shape it like the targets"
            )
        return _each(x, samples, lambda key: told[key], at)
    if _is_sequence(x) and _per_sample(x, samples, told, at):
        return _entries(x, samples, at)
    if isinstance(x, dict) or _is_sequence(x):
        return _each(x, samples, lambda key: told, at)
    if _is_array(x) and (x.dim() or told is not None):
        return _cells(x, samples, told, at)
    return lambda a, b: x


def _cells(x: Any, samples: int, told: Any, at: str) -> Cutter:
    dim = 0 if told is None else told
    if not isinstance(dim, int) or not -x.dim() <= dim < x.dim() or x.shape[dim] != samples:
        raise ShapeError(
            f"{at} is {describe(x)}, which cannot be split into {samples} samples along dim {dim}. "
            "Give Trainer(batch_dim=...) the dim of the samples, or 'whole' if every micro-batch "
            "is to get all of it; or stack targets by sample in a collate function of your own"
        )
    if isinstance(x, Lazy) and dim % x.dim():
        raise ShapeError(f"{at} is an array that is read by boxes; its samples must be along dim 0")
    return lambda a, b: _along(x, dim, a, b)


def _along(x: Any, dim: int, start: int, stop: int) -> Any:
    if isinstance(x, Lazy):
        return Lazy(x.source, x.start + start, x.start + stop)
    return x.narrow(dim, start, stop - start)


def _entries(x: Any, samples: int, at: str) -> Cutter:
    if not isinstance(x, (list, tuple)) or len(x) != samples:
        size = f"has {len(x)} entries" if isinstance(x, (list, tuple)) else "is no list"
        raise ShapeError(f"batch_dim is 'list' for {at}, which {size} for {samples} samples")
    return lambda a, b: type(x)(x[a:b])


def _each(x: Any, samples: int, told: Callable[[Any], Any], at: str) -> Cutter:
    split_points = {key: _cutter(x[key], samples, told(key), f"{at}[{key!r}]") for key in _keys(x)}

    def cut(start: int, stop: int) -> Any:
        found = {key: one(start, stop) for key, one in split_points.items()}
        if isinstance(x, dict):
            return type(x)(found) if type(x) is not dict else found
        if hasattr(x, "_fields"):  # a named tuple
            return type(x)(*found.values())
        return type(x)(found.values())

    return cut


def _per_sample(x: Any, samples: int, told: Any, at: str) -> bool:
    """Whether a list has one entry per sample; otherwise its entries are to be cut."""
    found = tensors(x)
    batched = bool(found) and all(t.dim() and t.shape[0] == samples for t in found)
    if told is not None or hasattr(x, "_fields"):
        return False
    if len(x) != samples:
        if found or not x:
            return False
        raise ShapeError(
            f"{at} is a {type(x).__name__} of {len(x)} entries for {samples} samples. Give one "
            "entry per sample, or Trainer(batch_dim='whole') if all micro-batches are to get all"
        )
    if batched:
        raise ShapeError(
            f"{at} is a {type(x).__name__} of {len(x)} entries, which may be one for each of the "
            f"{samples} samples, or tensors of {samples} samples each. Say which: "
            "Trainer(batch_dim='list') or Trainer(batch_dim=0)"
        )
    return True


def _is_array(x: Any) -> bool:
    return isinstance(x, (Tensor, Lazy))


def _keys(x: Any) -> list[Any]:
    return list(x) if isinstance(x, dict) else list(range(len(x))) if _is_sequence(x) else []


def _is_sequence(x: Any) -> bool:
    return isinstance(x, (list, tuple))
