"""Ways to train one step on one image. Each says what was live at most, counted alike for all.

A way is a function of a network, a side and a cap. It really takes a step, and gives the bytes that
were live at most: weights, gradients, activations, the target, and of the image what it holds. It
gives None if it knows beforehand that it cannot. A peer is one more function and one more entry.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.pipeline.livebytes import LiveBytes
from gems.draw.units import size
from gems.errors import PlanError
from gems.machine import machine
from gems.planner.explain import describe
from gems.planner.search import Wish
from gems.torch.planning import Study
from gems.torch.trainer import Trainer
from gems.transport.core import Transport
from gems.transport.local import run

from .networks import Network

log = logging.getLogger(__name__)
Tensor = torch.Tensor
Way = Callable[[Network, int, float], int | None]


class Image:
    """Pixels that are made when they are asked for, as a file's are read."""

    dtype = "float32"

    def __init__(self, side: int) -> None:
        self.shape = (1, 3, side, side)

    def __getitem__(self, box: tuple[slice, ...]) -> Tensor:
        return torch.ones([len(range(n)[s]) for n, s in zip(self.shape, box, strict=True)])


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.01)


def standing(model: nn.Module, target: Tensor) -> int:
    """What is there before the step: weights, buffers and the target."""
    tensors = (*model.parameters(), *model.buffers(), target)
    return sum(x.numel() * x.element_size() for x in tensors)


def plain(network: Network, side: int, cap: float) -> int | None:
    """PyTorch itself."""
    model, target = network.make(), network.target(side)
    optimizer = sgd(list(model.parameters()))
    with LiveBytes() as live:
        image = torch.ones(1, 3, side, side)
        network.loss(model(image), target).backward()
        optimizer.step()
    return live.peak + standing(model, target)


def checkpointed(network: Network, side: int, cap: float) -> int | None:
    """PyTorch itself with torch.utils.checkpoint around every child of a Sequential."""
    model, target = network.make(), network.target(side)
    if not isinstance(model, nn.Sequential):
        return None
    optimizer, again = sgd(list(model.parameters())), torch.utils.checkpoint.checkpoint_sequential
    with LiveBytes() as live:
        image = torch.ones(1, 3, side, side)
        output = again(model, round(len(model) ** 0.5), image, use_reentrant=False)
        network.loss(output, target).backward()
        optimizer.step()
    return live.peak + standing(model, target)


LESS = (1.0, 0.85, 0.7, 0.5)  # of the cap: what is live inside a layer is not in the plan's account


def ours(network: Network, side: int, cap: float) -> int | None:
    """The plan that the planner chooses for one rank and this side; given less than the cap until
    it really fits."""
    found = None
    for part in LESS:
        found = planned(network, side, part * cap)
        if found is None or found <= cap:
            break
    return found


def planned(network: Network, side: int, memory: float) -> int | None:
    model, target = network.make(), network.target(side)
    sample = torch.empty(1, 3, side, side, device="meta")
    study = Study(model, sample, machine("cpu"), costs="estimate")
    try:
        plan = study.plan(Wish(1, memory - target.numel() * target.element_size(), 1, state=0.0))
    except PlanError:
        return None

    def step(transport: Transport) -> int:
        trainer = Trainer(
            model, network.loss, sgd, sample, plan, transport=transport, costs="estimate"
        )
        with LiveBytes() as live:
            trainer.step(Image(side), target)
        return live.peak + standing(model, target)

    found = run(1, step)[0]
    log.info("%s: %s, %s", side, describe(plan), size(found))
    return found


WAYS: dict[str, Way] = {"PyTorch": plain, "PyTorch, checkpointed": checkpointed, "GEMS": ours}
