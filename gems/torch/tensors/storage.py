"""The memory of a tensor, as something to compare."""

from __future__ import annotations

import torch


def storage_of(tensor: torch.Tensor) -> int:
    """A number that two tensors share if, and while, they share memory."""
    return tensor.untyped_storage()._cdata
