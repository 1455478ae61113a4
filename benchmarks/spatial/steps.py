"""One step of each contestant, as a rank runs it."""

from __future__ import annotations

import time
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.pipeline.livebytes import LiveBytes
from benchmarks.pipeline.ours import Still
from benchmarks.spatial.networks import WORK
from gems.plan import Plan
from gems.torch.trainer import Trainer

PLANS: dict[str, dict[str, Any]] = {
    "gems one rank": {},
    "rows": {"spatial": [(2, 1)]},
    "columns": {"spatial": [(1, 2)]},
    "rows, d2": {"spatial": [(2, 1)], "halo": "d2"},
}


@cache
def _plain(work: str, share: int) -> Any:
    """The model with its images, or with the first rows of them."""
    model = WORK[work].model().train()
    images, targets = WORK[work].batch()
    images = images[:, :, : images.shape[2] // share]
    if targets.dim() > 1:
        targets = targets[:, :, : targets.shape[2] // share]
    return model, images, targets


def plain(work: str, share: int = 1, peak: bool = False) -> tuple[float, float]:
    """Seconds and CPU seconds of a step on all rows, or on a share of them; or live bytes."""
    model, images, targets = _plain(work, share)
    model.zero_grad()
    if peak:
        with LiveBytes() as live:
            WORK[work].loss(model(images), targets).backward()
        return live.peak, 0
    if dist.get_world_size() > 1:
        dist.barrier()
    wall, cpu = time.perf_counter(), time.thread_time()
    WORK[work].loss(model(images), targets).backward()
    return time.perf_counter() - wall, time.thread_time() - cpu


@cache
def _trainer(work: str, plan: str) -> Trainer:
    images, _ = WORK[work].batch()
    return Trainer(
        WORK[work].model(),
        WORK[work].loss,
        lambda p: Still(p, 0.1),
        torch.empty(images.shape),
        Plan(stages=1, schedule="sequential", **PLANS[plan]),
    )


def ours(work: str, plan: str, peak: bool = False) -> tuple[float, float]:
    trainer = _trainer(work, plan)
    images, targets = WORK[work].batch()
    if peak:
        with LiveBytes() as live:
            trainer.step(images, targets)
        return live.peak, 0
    dist.barrier()
    wall, cpu = time.perf_counter(), time.thread_time()
    trainer.step(images, targets)
    return time.perf_counter() - wall, time.thread_time() - cpu


def traffic(work: str, plan: str) -> tuple[int, int]:
    """Messages and bytes that this rank sends inside the stage in one step."""
    trainer = _trainer(work, plan)
    cut = next(iter(trainer.adapter.cuts.values()))
    counters = [bound.team.traffic for bound in cut.bound.values()]
    for counter in counters:
        counter.messages = counter.bytes = 0
    trainer.step(*WORK[work].batch())
    return sum(c.messages for c in counters), sum(c.bytes for c in counters)
