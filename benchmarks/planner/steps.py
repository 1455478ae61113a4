"""One rank of any plan, timed."""

from __future__ import annotations

from functools import cache

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from benchmarks.prediction.pairs import NETWORKS
from gems.files import from_json
from gems.machine import machine
from gems.planner.search import Wish, search
from gems.plans import Plan
from gems.torch.halos import with_halos
from gems.torch.profile import measure
from gems.torch.trace import trace
from gems.torch.trainer import Trainer

M = 4


def found(network: str, ranks: int) -> list[tuple[str, float]]:
    """Every candidate that the planner has for so many ranks, as JSON, with the seconds it says.

    All are simulated: `inf` memory and no pruning, so that the sweep holds slow ones as well.
    """
    from gems.files import to_json
    from gems.planner import search as module

    net, on = NETWORKS[network], machine("local")
    torch.manual_seed(0)
    model = net.make()
    traced = trace(model, torch.empty(net.samples // M, 3, net.side, net.side))
    graph = with_halos(traced, model)
    costs = measure(traced, model, torch.device("cpu"))
    wish = Wish(ranks, on.device.memory, M, state=1.0)
    chosen = search(graph, costs, on, wish).best.plan
    refused: dict[str, str] = {}
    every = [predict() for _, predict in module._bounded(graph, costs, on, wish, refused)]
    every.sort(key=lambda c: c.plan != chosen)  # the choice first
    return [(to_json(c.plan), c.seconds) for c in every]


@cache
def _trainer(network: str, plan: str) -> Trainer:
    net = NETWORKS[network]
    torch.manual_seed(0)
    return Trainer(
        net.make(),
        cross_entropy,
        lambda p: torch.optim.SGD(p, 0.0, momentum=0.9),
        torch.empty(net.samples // M, 3, net.side, net.side),
        from_json(Plan, plan),
        machine=machine("local"),
    )


def step(network: str, plan: str) -> float:
    trainer, net = _trainer(network, plan), NETWORKS[network]
    draw = torch.Generator().manual_seed(1)
    images = torch.randn((net.samples, 3, net.side, net.side), generator=draw)
    labels = torch.randint(net.classes, (net.samples,), generator=draw)
    dist.barrier()
    trainer.step(images, labels)
    return trainer.timeline().seconds
