"""One rank that trains a network, with the CPU time of each check of a step."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gems.distributed import consensus
from gems.models.resnet import resnet_v2
from gems.plans.plan import Plan
from gems.torch import fingerprint, trainer
from gems.torch.tracing.guards import Guards, Structure
from gems.torch.trainer import Trainer

# What is timed: who has it, its name, and what to call it. The last one waits for other ranks.
CHECKS: list[tuple[Any, str, str]] = [
    (Structure, "mode", "structure"),
    (Guards, "failed", "guards"),
    (fingerprint, "of_batch", "batch"),
    (trainer, "agree", "all_reduce"),
]


def toy() -> nn.Module:
    """5,001 modules that compute next to nothing."""
    return nn.Sequential(*(layer for _ in range(2500) for layer in (nn.Linear(4, 4), nn.ReLU())))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "ResNet-110-v2, 64 px": (resnet_v2, (3, 64, 64)),
    "5,001 modules": (toy, (4,)),
}


@cache
def made(network: str, ranks: int) -> tuple[Trainer, torch.Tensor, torch.Tensor]:
    make, shape = NETWORKS[network]
    torch.manual_seed(0)
    model = make()
    plan = Plan(stages=1, micro_batches=1, data=ranks)
    images = torch.randn(2 * ranks, *shape)
    classes = torch.zeros(2 * ranks, dtype=torch.long)
    found = Trainer(
        model, nn.functional.cross_entropy, lambda p: torch.optim.SGD(p, 1e-3), images[:2], plan
    )
    return found, images, classes


@contextmanager
def timed(seconds: dict[str, float]) -> Iterator[None]:
    """CPU seconds of this thread by check; of the all_reduce by the wall, too."""
    before = {name: getattr(owner, name) for owner, name, _ in CHECKS}

    def wrapped(work: Callable[..., Any], label: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            cpu, wall = time.thread_time(), time.perf_counter()
            try:
                return work(*args, **kwargs)
            finally:
                seconds[label] += time.thread_time() - cpu
                seconds[f"{label}, wall"] += time.perf_counter() - wall

        return run

    for owner, name, label in CHECKS:
        setattr(owner, name, wrapped(before[name], label))
    try:
        yield
    finally:
        for owner, name, _ in CHECKS:
            setattr(owner, name, before[name])


def step(network: str, ranks: int, repeats: int) -> dict[str, float]:
    """Medians over steps: CPU seconds of each check and of a step."""
    trained, images, classes = made(network, ranks)
    rows: dict[str, list[float]] = defaultdict(list)
    for turn in range(repeats + 3):
        seconds: dict[str, float] = defaultdict(float)
        start = time.thread_time()
        with timed(seconds):
            trained.step(images, classes)
        seconds["step"] = time.thread_time() - start
        for label, value in seconds.items() if turn > 2 else ():  # the first ones are thorough
            rows[label].append(value)
    return {label: median(values) for label, values in rows.items()}


def agreement(repeats: int) -> float:
    """Median wall seconds of one agreement, with both ranks there already."""
    transport = made("5,001 modules", dist.get_world_size())[0].transport
    claim = consensus.Claim("step", {"calls of step": 3}, 1, {"lr": 0.1}, 2, "a batch")
    found = []
    for _ in range(repeats):
        dist.barrier()
        start = time.perf_counter()
        consensus.agree(transport, claim)
        found.append(time.perf_counter() - start)
    return median(found)
