"""Step some of an optimizer's parameters: those of a stage, or as many as fit a buffer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim import Optimizer


def treats_each_alone(optimizer: Optimizer) -> bool:
    """Whether a step of some parameters is the same, whatever others are stepped with them. Torch's
    optimizers do so, except LBFGS; others declare it."""
    kind = type(optimizer)
    own = getattr(torch.optim, kind.__name__, None) is kind and kind is not torch.optim.LBFGS
    declared = getattr(optimizer, "by_parameter", False) or getattr(optimizer, "elementwise", False)
    return own or bool(declared)


@contextmanager
def only(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Let an optimizer have no other parameters inside."""
    wanted = {id(p) for p in parameters}
    before = [group["params"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if id(p) in wanted]
    try:
        yield
    finally:
        for group, params in zip(optimizer.param_groups, before, strict=True):
            group["params"] = params
