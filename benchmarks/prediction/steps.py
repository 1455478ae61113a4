"""One pair on one rank: what a step should take, and steps that were taken."""

from __future__ import annotations

from functools import cache

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from benchmarks.prediction.pairs import NETWORKS, plan
from gems.machine import machine
from gems.simulation import simulate
from gems.timeline import Timeline
from gems.torch.trainer import Trainer


@cache
def _trainer(network: str, planned: str) -> Trainer:
    net, chosen = NETWORKS[network], plan(planned)
    torch.manual_seed(0)
    shape = (net.samples // chosen.total, 3, net.side, net.side)
    return Trainer(
        net.make(),
        cross_entropy,
        lambda p: torch.optim.SGD(p, 0.0, momentum=0.9),
        torch.empty(shape),
        chosen,
        costs="measure",
        machine=machine("local"),
    )


def predicted(network: str, planned: str) -> Timeline:
    trainer = _trainer(network, planned)
    return simulate(trainer.schedule, trainer.plan, trainer.costs, trainer.machine, state=1.0)


def measured(network: str, planned: str) -> Timeline:
    """One step; all ranks have the whole timeline."""
    trainer, net = _trainer(network, planned), NETWORKS[network]
    draw = torch.Generator().manual_seed(1)
    images = torch.randn((net.samples, 3, net.side, net.side), generator=draw)
    labels = torch.randint(net.classes, (net.samples,), generator=draw)
    if dist.get_world_size() > 1:
        dist.barrier()
    trainer.step(images, labels)
    return trainer.timeline()
