"""Measure what `equal_memory` simulates: images per second and bytes of all ways, on this computer.

    python -m benchmarks.papers.measure --ranks 2 4 --batches 2 8 32 --repeats 5

Small images, one per micro-batch, real gloo processes. Ranks up to the number of cores go by the
wall, more in virtual time, as if each had a core of its own (from CPU times). All ways take turns;
medians. Wants a quiet machine.
"""

from __future__ import annotations

import argparse
import os
from functools import cache
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from benchmarks.papers.equal_memory import LAYER, ways
from benchmarks.papers.tables import table
from benchmarks.pipeline.ranks import Ranks
from benchmarks.where import where
from gems.plans.plan import Plan
from gems.predict.simulate import virtual
from gems.torch.trainer import Trainer
from tests.networks import build

WARM, CLASSES = 1, 10
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


def rows(network: str, size: int, k: int, side: int, repeats: int) -> list[list[str]]:
    names = list(ways(size, k))
    seen: dict[str, list[list[tuple[float, float, int]]]] = {name: [] for name in names}
    with Ranks(size) as ranks:
        for turn in range(WARM + repeats):
            for name in names:
                answers = ranks.run(step, network, name, k, side)
                if turn >= WARM:
                    seen[name].append(answers)
    late = size > (os.cpu_count() or 1)
    taken = {n: median(max(a[late] for a in answers) for answers in seen[n]) for n in names}
    return [
        [
            *(network, f"{size} ({'virtual' if late else 'wall'})", str(k), name),
            *(f"{k / taken[name]:.2f}", f"{taken[LAYER] / taken[name]:.2f}"),
            f"{max(peak for _, _, peak in seen[name][-1]) / 2**20:.1f}",
        ]
        for name in names
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--batches", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--side", type=int, default=64, help="of the images")
    parser.add_argument("--repeats", type=int, default=5, help="turns that each way takes")
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    given = parser.parse_args()
    print(where())
    found = [
        row
        for network in given.networks
        for size in given.ranks
        for k in given.batches
        for row in rows(network, size, k, given.side, given.repeats)
    ]
    head = ("network", "ranks", "k", "way", "images/s", "x", "MiB of the fullest rank")
    print(table(head, found))


if __name__ == "__main__":
    main()
