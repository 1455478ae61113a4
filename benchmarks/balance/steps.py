"""One rank of a pipeline whose blocks were given out in one way or another."""

from __future__ import annotations

from functools import cache

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from benchmarks.prediction.pairs import NETWORKS
from gems.machine import machine
from gems.plans import Plan
from gems.simulation import virtual
from gems.timeline import Memory
from gems.torch.trace import trace
from gems.torch.trainer import Trainer

M = 8
SPLITS = ("equal layers", "time, estimated", "time, measured", "memory")


def _plan(network: str, split: str, stages: int) -> Plan:
    balance: str | tuple[int, ...] = "memory" if split == "memory" else "time"
    if split == "equal layers":
        net = NETWORKS[network]
        with torch.device("meta"):
            graph = trace(net.make(), torch.empty(1, 3, net.side, net.side, device="meta")).graph
        count, more = divmod(len(graph.layers), stages)
        balance = tuple(count + (s < more) for s in range(stages))
    return Plan(stages=stages, micro_batches=M, schedule="1f1b", balance=balance)


@cache
def _trainer(network: str, split: str) -> Trainer:
    net = NETWORKS[network]
    torch.manual_seed(0)
    return Trainer(
        net.make(),
        cross_entropy,
        lambda p: torch.optim.SGD(p, 0.0, momentum=0.9),
        torch.empty(net.samples // M, 3, net.side, net.side),
        _plan(network, split, dist.get_world_size()),
        costs="measure" if split == "time, measured" else "estimate",
        machine=machine("local"),
    )


def step(network: str, split: str) -> tuple[float, float, Memory]:
    """Seconds of a step by the wall and in virtual time, and this rank's peak."""
    trainer, net = _trainer(network, split), NETWORKS[network]
    draw = torch.Generator().manual_seed(1)
    images = torch.randn((net.samples, 3, net.side, net.side), generator=draw)
    labels = torch.randint(net.classes, (net.samples,), generator=draw)
    dist.barrier()
    trainer.step(images, labels)
    timeline = trainer.timeline()
    paper = virtual(timeline, trainer.schedule, trainer.plan)
    return timeline.seconds, paper.seconds, timeline.peaks[dist.get_rank()]
