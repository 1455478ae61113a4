"""Strides as they were recorded: what is sent, gathered or tiled must look as on one device.

Random numbers are drawn in the order of memory, `reshape` copies or does not, `view` accepts a
tensor or does not: all of it depends on strides. A tensor from another rank gets the recorded ones;
of a tile, the order of dims in memory is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from gems.model.graph import Value

Tensor = torch.Tensor


def alike(shape: Sequence[int], a: Sequence[int], b: Sequence[int]) -> bool:
    """Whether strides mean the same for a tensor of this shape."""
    return all(x == y for n, x, y in zip(shape, a, b, strict=True) if n != 1) or 0 in shape


def restrided(x: Tensor, value: Value) -> Tensor:
    """The same numbers, with the recorded strides of a whole value."""
    if alike(value.shape, x.stride(), value.strides) or tuple(x.shape) != tuple(value.shape):
        return x
    return strided(value.shape, value.strides, x).copy_(x)


def strided(shape: Sequence[int], strides: Sequence[int], like: Tensor) -> Tensor:
    """An empty tensor with these strides; where cells would share memory, with the next best."""
    strides = fitting(tuple(shape), tuple(strides))
    return torch.empty_strided(shape, strides, dtype=like.dtype, device=like.device)


@cache
def fitting(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of memory without gaps or overlaps, with dims in the same order, as torch has it."""
    probe = torch.empty_strided(shape, strides, device="meta")
    return tuple(torch.empty_like(probe).stride())


def laid_out(flat: Tensor, shape: Sequence[int], strides: Sequence[int]) -> Tensor:
    """Flat memory as a tensor of this shape, with dims in the order of these strides."""
    return flat.as_strided(shape, fitting(tuple(shape), tuple(strides)))


def dense_like(shape: Sequence[int], x: Tensor) -> Tensor:
    """An empty tensor of another shape, with dims in the order of those of `x` in memory."""
    order = sorted(range(x.dim()), key=lambda d: (-x.stride(d), d))
    # No view of another tensor: autograd functions return it, and a view may not change in place.
    return torch.empty_strided(shape, dense(shape, order), dtype=x.dtype, device=x.device)


def as_bytes(x: Tensor) -> Tensor:
    """The memory of a tensor without gaps. One that has a single number may have any strides."""
    return x.detach().as_strided((x.numel(),), (1,)).view(torch.uint8)


def packed(x: Tensor) -> Tensor:
    """The same tensor if its memory has no gaps, or a copy with dims in the same order."""
    whole = alike(x.shape, x.stride(), fitting(tuple(x.shape), x.stride()))
    return x if whole else x.clone()


def flattened(x: Tensor, strides: Sequence[int]) -> Tensor:
    """The elements of a tensor in the order in which `laid_out` has them; a view if it can be."""
    fit = fitting(tuple(x.shape), tuple(strides))
    return x.permute(sorted(range(x.dim()), key=lambda d: -fit[d])).reshape(-1)


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    return dense(shape, range(len(shape)))


def dense(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Strides of memory without gaps, with dims in this order, the slowest first."""
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def tile_strides(value: Value, shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a tile of a value: dense, with dims in the order of the value's."""
    whole = fitting(tuple(value.shape), tuple(value.strides))
    order = sorted(range(len(shape)), key=lambda d: (-whole[d], -value.shape[d], d))
    return dense(shape, order)


def as_recorded(x: Tensor, value: Value) -> Tensor:
    """A received value, without a gradient yet, with exactly the strides that were recorded: cells
    that share memory share it again, and gaps are gaps."""
    if alike(value.shape, x.stride(), value.strides):
        return x
    real = [slice(0, 1) if s == 0 else slice(None) for s in value.strides]
    lengths = [1 if s == 0 else n for n, s in zip(value.shape, value.strides, strict=True)]
    if _overlaps(lengths, value.strides):
        return restrided(x, value)
    made = torch.empty_strided(lengths, value.strides, dtype=x.dtype, device=x.device)
    made.copy_(x[tuple(real)])
    return made.as_strided(value.shape, value.strides)


def _overlaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two cells may lie at one place, as in windows by `unfold`."""
    reach = 0
    for stride, length in sorted(zip(strides, shape, strict=True)):
        if length > 1:
            if stride <= reach:
                return True
            reach += stride * (length - 1)
    return False
