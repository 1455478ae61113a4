"""One rank of a way of `equal_memory`, measured, and what the planner chooses for this computer."""

from __future__ import annotations

from functools import cache
from math import inf
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from benchmarks.papers.equal_memory import LAYER, MASTER, ways
from gems.planner.request import Request
from gems.plans.plan import Plan
from gems.predict.simulate import virtual
from gems.torch.measure_machine import measured
from gems.torch.planning import Study
from gems.torch.trainer import Trainer
from tests.networks import build

CLASSES = 10
NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "ResNet-110-v2": ("resnet110_v2", {"num_classes": CLASSES}),
    "AmoebaNet-D(6, 32)": (
        "amoebanet_d",
        {"num_layers": 6, "num_filters": 32, "num_classes": CLASSES},
    ),
}


@cache
def studied(network: str, side: int) -> Study:
    """A network on this computer, as measured: on small images calls cost more than arithmetic."""
    name, options = NETWORKS[network]
    torch.set_num_threads(1)
    sample = torch.empty(1, 3, side, side)
    return Study(build(name, **options), sample, measured(), "measure")


def auto(network: str, p: int, k: int, side: int) -> tuple[Plan, float]:
    """The planner's choice within the bytes that layer parallelism and MASTER take, and those."""
    study = studied(network, side)
    known = ways(p, k)
    limit = max(
        study.compiled(known[way][0], Request(p, inf, known[way][0].total)).prediction.bytes
        for way in (LAYER, MASTER)
        if way in known
    )
    return study.plan(Request(p, limit, k)), limit


@cache
def _trainer(network: str, plan: Plan, side: int, memory: float | None) -> Trainer:
    torch.manual_seed(0)
    name, options = NETWORKS[network]
    sample = torch.empty(1, 3, side, side)
    adam = lambda p: torch.optim.Adam(p, 0.0)  # noqa: E731
    return Trainer(build(name, **options), cross_entropy, adam, sample, plan, memory=memory)


def step(
    network: str, plan: Plan, times: int, memory: float | None, side: int
) -> tuple[float, float, int]:
    """Seconds of so many steps by the wall and in virtual time, and the peak bytes of this rank."""
    trainer = _trainer(network, plan, side, memory)
    draw = torch.Generator().manual_seed(1)
    images = torch.randn((plan.total, 3, side, side), generator=draw)
    labels = torch.randint(CLASSES, (plan.total,), generator=draw)
    dist.barrier()
    trainer.step(images, labels)
    timeline = trainer.timeline()
    paper = virtual(timeline, trainer.schedule, trainer.plan)
    peak = timeline.peaks[dist.get_rank()].total
    return times * timeline.seconds, times * paper.seconds, peak
