"""The memory of a tensor, as something to compare."""

from __future__ import annotations

import torch


def storage_of(tensor: torch.Tensor) -> int:
    """A number that two tensors share if, and while, they share memory."""
    return tensor.untyped_storage()._cdata


def references(tensor: torch.Tensor) -> int:
    """How many there are to its memory: to be compared with their number at another time."""
    return torch._C._storage_Use_Count(storage_of(tensor))
