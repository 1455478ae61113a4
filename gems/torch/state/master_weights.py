"""Weights and gradients in half precision, with fp32 master copies that the optimizer steps.

    bytes per parameter   weight  gradient  optimizer
    fp32, Adam            4       4         4 + 4          moments
    half, Adam            2       2         4 + 4 + 4      master and moments

A master is one more tensor of the parameter's optimizer state, `state[p]["master_param"]`: it is
sharded, offloaded and counted with the rest. During a step the parameter shows its master and an
fp32 copy of its gradient; then the weight is the master, rounded. It always is, so a checkpoint has
masters only.

fp32 gradients exist for a few parameters at a time: ZeRO-R's buffer of constant size.

Normalisation layers stay as they are. Their kernels take half activations with fp32 parameters and
running statistics, and no other mix.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from gems.torch.state.by_parameter import only, treats_each_alone

Tensor = torch.Tensor
MASTER = "master_param"
HALVES = (torch.bfloat16, torch.float16)
NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
BUFFER = 64 << 20  # bytes of fp32 gradients at a time, unless one parameter has more


def halvable(model: nn.Module) -> list[nn.Parameter]:
    """The fp32 parameters that are stored in half: all but those of normalisation layers."""
    norms = {id(p) for m in model.modules() if isinstance(m, NORMS) for p in m.parameters(False)}
    return [p for p in model.parameters() if p.dtype == torch.float32 and id(p) not in norms]


def store_in_half(model: nn.Module, dtype: torch.dtype) -> None:
    """Round parameters to half precision. They stay the same Python objects."""
    for p in halvable(model):
        p.data = p.data.to(dtype)
        p.grad = None


@contextmanager
def stored_in_half(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """The same, for as long as a model is recorded."""
    before = [(p, p.data, p.grad) for p in halvable(model)]
    store_in_half(model, dtype)
    try:
        yield
    finally:
        for p, data, gradient in before:
            p.data = data
            p.grad = gradient


def add_masters(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Give trained half parameters that have no master one, and other state of their type fp32."""
    for p in parameters:
        if p.dtype not in HALVES or not p.requires_grad:
            continue
        state: dict[str, Any] = optimizer.state[p]
        if MASTER not in state:
            for key, x in state.items():  # some have state before the first step
                if isinstance(x, Tensor) and x.dtype == p.dtype:
                    state[key] = x.float()
            state[MASTER] = p.detach().float()


def step_some(optimizer: Optimizer, parameters: Sequence[nn.Parameter], factor: float) -> None:
    """Step parameters that have a gradient, with it times `factor`: those in half by their masters,
    a few at a time."""
    mastered = [p for p in parameters if MASTER in optimizer.state.get(p, ())]
    several = {id(p) for p in mastered}
    others = [p for p in parameters if id(p) not in several]
    for p in others if factor != 1.0 else ():
        assert p.grad is not None
        p.grad.mul_(factor)
    runs = list(_runs(mastered)) if treats_each_alone(optimizer) else [mastered]
    for run in runs or [[]]:  # a scheduler expects a step, if of nothing
        with _masters_of(optimizer, run, factor), only(optimizer, [*run, *others]):
            optimizer.step()
        others = []


def _runs(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Parameters whose fp32 gradients fit the buffer together, or a single one."""
    found: list[nn.Parameter] = []
    size = 0
    for p in parameters:
        bytes = p.numel() * torch.float32.itemsize
        if found and size + bytes > BUFFER:
            yield found
            found, size = [], 0
        found.append(p)
        size += bytes
    if found:
        yield found


@contextmanager
def _masters_of(
    optimizer: Optimizer, parameters: Sequence[nn.Parameter], factor: float
) -> Iterator[None]:
    """Parameters are their masters inside, with fp32 gradients; after it their weights are rounded
    ones. Their gradients are gone."""
    weights: list[Tensor] = []
    masters: list[Tensor] = []
    for p in parameters:
        gradient = p.grad
        assert gradient is not None
        # An optimizer sets up state that is empty.
        masters.append(optimizer.state[p].pop(MASTER))
        weights.append(p.data)
        p.grad = None
        p.data = masters[-1]
        p.grad = gradient.to(torch.float32, copy=True).mul_(factor)
    try:
        yield
    finally:
        for p, weight, master in zip(parameters, weights, masters, strict=True):
            if p.data_ptr() != master.data_ptr():  # some optimizers replace it
                master.copy_(p.data)
            p.grad = None
            p.data = weight
            weight.copy_(master)
            optimizer.state[p][MASTER] = master
