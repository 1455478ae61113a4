"""One rank of any plan, timed."""

from __future__ import annotations

from functools import cache

import torch
import torch.distributed as dist

from benchmarks.prediction.pairs import NETWORKS, M
from gems.files import from_json, to_json
from gems.hardware import machine
from gems.planner.request import Request
from gems.plans.plan import Plan
from gems.torch.planning import Study
from gems.torch.trainer import Trainer


def found(network: str, ranks: int) -> list[tuple[str, float]]:
    """Every candidate for so many ranks, as JSON, with the seconds it should take. Choice first.

    None is pruned, so that the sweep holds slow ones as well.
    """
    net, on = NETWORKS[network], machine("local")
    torch.manual_seed(0)
    study = Study(net.make(), net.sample(M), on, costs="measure")
    every = study.search(Request(ranks, on.device.memory, M, state=1.0), prune=False)
    ordered = sorted(every.fitting, key=lambda c: c is not every.best)
    return [(to_json(c.plan), c.seconds) for c in ordered]


@cache
def _trainer(network: str, plan: str) -> Trainer:
    return NETWORKS[network].trainer(from_json(Plan, plan))


def step(network: str, plan: str) -> float:
    trainer = _trainer(network, plan)
    images, labels = NETWORKS[network].batch()
    dist.barrier()
    trainer.step(images, labels)
    return trainer.timeline().seconds
