"""Modules whose weight is computed from others: weight norm, spectral norm, any parametrization."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from gems.torch.autograd.split_backward import watched

# Hooks that compute a weight before forward, and look at nothing else.
COMPUTES_WEIGHT = (WeightNorm, SpectralNorm)


def plain_type(module: nn.Module) -> type[nn.Module]:
    """The module's class as the user wrote it; a parametrized module has a class of its own."""
    kind = type(module)
    return kind.__bases__[0] if parametrize.is_parametrized(module) else kind


def shown(module: nn.Module, name: str) -> Any:
    """A setting of a module; of a weight that is computed, only a tensor of its shape.

    Computing it here would count: spectral norm takes a step of its power iteration.
    """
    if not parametrize.is_parametrized(module, name):
        return getattr(module, name)
    originals = list(module.parametrizations[name].parameters(recurse=False))  # type: ignore
    largest = max(originals, key=lambda x: (x.dim(), x.numel()))
    return torch.empty(largest.shape, device="meta")


def prepare(module: nn.Module) -> None:
    """Compute the weights that hooks compute before forward; the call of the module would."""
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, COMPUTES_WEIGHT):
            hook(module, ())


def prepared(module: nn.Module) -> bool:
    """Whether a module has hooks that compute a weight."""
    return any(isinstance(hook, COMPUTES_WEIGHT) for hook in module._forward_pre_hooks.values())


def observed(module: nn.Module) -> bool:
    """Whether a module carries hooks that see its input, output or gradients."""
    kinds = ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(module, kind, None) for kind in kinds):
        return True
    before = module._forward_pre_hooks.values()
    return not all(isinstance(hook, COMPUTES_WEIGHT) for hook in before)


def watched_names(model: nn.Module) -> set[str]:
    """The parameters whose gradient a hook waits for."""
    return {name for name, p in model.named_parameters() if watched(p)}
