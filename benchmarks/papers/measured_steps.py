"""One rank of a way of `equal_memory`, measured."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from benchmarks.papers.equal_memory import ways
from gems.plans.plan import Plan
from gems.predict.simulate import virtual
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
def _trainer(network: str, plan: Plan, side: int) -> Trainer:
    torch.manual_seed(0)
    name, options = NETWORKS[network]
    sample = torch.empty(1, 3, side, side)
    sgd = lambda p: torch.optim.SGD(p, 0.0, momentum=0.9)  # noqa: E731
    return Trainer(build(name, **options), cross_entropy, sgd, sample, plan)


def step(network: str, way: str, k: int, side: int) -> tuple[float, float, int]:
    """Seconds of k samples by the wall and in virtual time, and the peak bytes of this rank."""
    plan, times = ways(dist.get_world_size(), k)[way]
    trainer = _trainer(network, plan, side)
    draw = torch.Generator().manual_seed(1)
    images = torch.randn((plan.total, 3, side, side), generator=draw)
    labels = torch.randint(CLASSES, (plan.total,), generator=draw)
    dist.barrier()
    trainer.step(images, labels)
    timeline = trainer.timeline()
    paper = virtual(timeline, trainer.schedule, trainer.plan)
    peak = timeline.peaks[dist.get_rank()].total
    return times * timeline.seconds, times * paper.seconds, peak
