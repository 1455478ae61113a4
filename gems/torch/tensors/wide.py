"""Sums of many parts in half precision, kept in fp32: in half they stop growing once they are some
hundred times as large as a part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

Tensor = torch.Tensor
HALF = (torch.bfloat16, torch.float16)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type to sum numbers of this one in."""
    return torch.float32 if dtype in HALF else dtype


@contextmanager
def accumulated_in_fp32(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """While this lasts, what each backward adds to gradients in half leaves them within a rounding
    of the sum of all. The others are left alone."""
    hooks = [p.register_hook(_correcting(p)) for p in parameters if p.dtype in HALF]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _correcting(parameter: nn.Parameter) -> Callable[[Tensor], Tensor]:
    total: Tensor | None = None  # of what was there before, and of all parts so far

    def add(part: Tensor) -> Tensor:
        nonlocal total
        so_far = parameter.grad
        if total is None:
            total = torch.zeros_like(part, dtype=torch.float32)
            if so_far is not None:
                total += so_far
        total += part
        found = total.to(part.dtype)
        return found if so_far is None else found - so_far

    return add
