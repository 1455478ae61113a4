"""Normalisation layers that are never handed a gradient that torch gets wrong.

For a batch of one sample, torch's CPU kernel of batch norm's backward takes input and gradient for
laid out alike where their strides differ in dims of length 1 or in the order of channels, and gives
wrong sums (torch 2.13; instance norm runs the same kernel). With the strides of the input it is
right, so the gradient gets those before it enters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

from gems.torch.tensors.strides import fitting, row_major
from gems.torch.tracing.calls import Call

Tensor = torch.Tensor
FUNCTIONS = (nn.functional.batch_norm, nn.functional.instance_norm, torch.batch_norm)


def normalises(call: Call, model: nn.Module) -> bool:
    """Whether a call is a batch norm or an instance norm."""
    if call.module is not None:
        return isinstance(model.get_submodule(call.module), _NormBase)
    return any(call.function is f for f in FUNCTIONS)


def sound(run: Callable[..., Any]) -> Callable[..., Any]:
    """The same, with gradients of the input's strides where the batch is one sample. (Instance norm
    makes its input contiguous.)"""
    instance = isinstance(run, _InstanceNorm) or run is nn.functional.instance_norm

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        found = run(*args, **kwargs)
        x = args[0] if args else kwargs["input"]
        if isinstance(found, Tensor) and found.requires_grad and x.dim() > 2 and x.shape[0] == 1:
            strides = row_major(x.shape)
            if not instance and not x.is_contiguous():
                strides = fitting(tuple(x.shape), tuple(x.stride()))
            found.register_hook(lambda g: _laid_out(g, strides))
        return found

    return wrapped


def _laid_out(gradient: Tensor, strides: tuple[int, ...]) -> Tensor:
    if gradient.stride() == strides:
        return gradient
    made = torch.empty_strided(
        gradient.shape, strides, dtype=gradient.dtype, device=gradient.device
    )
    return made.copy_(gradient)
