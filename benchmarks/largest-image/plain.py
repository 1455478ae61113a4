"""One step on one rank by PyTorch itself, and what was live at most."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.pipeline.livebytes import LiveBytes

from .networks import NETWORKS, cells

Tensor = torch.Tensor


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.01)


def resident(model: nn.Module, *others: Tensor) -> int:
    """What is there before the step: weights, buffers and the target. Shapes alone are not."""
    tensors = (*model.parameters(), *model.buffers(), *others)
    return sum(x.numel() * x.element_size() for x in tensors if not x.is_meta)


def trained(name: str, images: int, side: int, again: bool) -> int:
    """Image after image, gradients added up; `again` computes every cell a second time."""
    network = NETWORKS[name]
    model, target = network.make(), network.target(images, side)
    chain, optimizer = cells(model), sgd(list(model.parameters()))
    with LiveBytes() as live:
        for wanted in target.split(1):
            state: tuple[Tensor, ...] = (torch.ones(1, 3, side, side),)
            if again:
                for cell in chain:
                    state = checkpoint(cell, *state, use_reentrant=False)
            else:
                state = (model(*state),)
            (network.loss(*state, wanted) / images).backward()
            del state
        optimizer.step()
    return live.peak + resident(model, target)
