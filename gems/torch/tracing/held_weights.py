"""Weights that modules hold besides as registered: in lists, dicts and plain attributes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from gems.torch.tracing.frozen import PLAIN

# Weights that were given to GEMS -> those in their place: on the device, or without memory.
_REPLACED = WeakIdKeyDictionary()
REGISTERED = ("_parameters", "_buffers", "_modules")


def replaced(tensor: torch.Tensor) -> torch.Tensor:
    """The weight that is in the place of this one now."""
    for _ in range(8):
        if (new := _REPLACED.get(tensor)) is None:
            return tensor
        tensor = new
    return tensor


def replace_held(model: nn.Module, new: Mapping[int, torch.Tensor]) -> None:
    """Where modules hold a weight in a list, a dict or an attribute of their own, too, have the new
    one there: forward must find what is trained, and the old one's memory must go."""
    for module in model.modules():
        entries = vars(module)
        for key in [k for k in entries if k not in REGISTERED]:
            value = entries[key]
            if not isinstance(value, PLAIN) and (found := _with(value, new, 4)) is not value:
                entries[key] = found


def remember_replaced(old: torch.Tensor, new: torch.Tensor) -> None:
    """For what cannot be changed, such as a variable of a function."""
    _REPLACED[old] = new


def _with(value: Any, new: Mapping[int, torch.Tensor], depth: int) -> Any:
    """The value with new weights in it: the same lists and dicts, a new tuple."""
    if isinstance(value, torch.Tensor):
        return new.get(id(value), value)
    if not depth:
        return value
    if isinstance(value, (list, dict)):
        for key, x in list(value.items() if isinstance(value, dict) else enumerate(value)):
            if not isinstance(x, PLAIN) and (found := _with(x, new, depth - 1)) is not x:
                value[key] = found
    elif type(value) is tuple:
        inside = [_with(x, new, depth - 1) for x in value]
        if any(a is not b for a, b in zip(inside, value, strict=True)):
            return tuple(inside)
    return value
