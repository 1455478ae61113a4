"""One step of each contestant, as a rank runs it."""

from __future__ import annotations

import time
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.pipeline.livebytes import LiveBytes
from benchmarks.pipeline.ours import Still
from benchmarks.spatial import exact
from benchmarks.spatial.networks import WORK
from gems.plans.plan import Plan
from gems.torch.trainer import Trainer

PLANS: dict[str, dict[str, Any]] = {
    "gems one rank": {"spatial": [(1, 1)]},
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


def _built(work: str, plan: str, model: torch.nn.Module, images: torch.Tensor) -> Trainer:
    return Trainer(
        model,
        WORK[work].loss,
        lambda p: Still(p, 0.1),
        torch.empty_like(images),
        Plan(stages=1, schedule="sequential", **PLANS[plan]),
    )


@cache
def _trainer(work: str, plan: str) -> Trainer:
    images, _ = WORK[work].batch()
    return _built(work, plan, WORK[work].model(), images)


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
    cut = next(iter(trainer.session.runner.programs.recordings.values()))
    counters = [bound.group.traffic for bound in cut.bound.values()]
    for counter in counters:
        counter.messages = counter.bytes = 0
    trainer.step(*WORK[work].batch())
    return sum(c.messages for c in counters), sum(c.bytes for c in counters)


def errors(work: str, plan: str) -> float:
    """How far loss and gradients are from the plain model's in float64."""
    images, targets = exact.batch(work)
    trainer = _built(work, plan, exact.model(work), images)
    found: dict[str, torch.Tensor] = {}
    forget = trainer.optimizer.zero_grad

    def zero_grad(*args: Any, **kwargs: Any) -> None:
        found.update(
            {n: p.grad.clone() for n, p in trainer.session.weights.named_parameters().items()}
        )
        forget(*args, **kwargs)

    trainer.optimizer.zero_grad = zero_grad
    step = trainer.step(images, targets)
    return exact.error(work, step.loss, found)
