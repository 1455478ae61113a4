"""Every rank a copy of the network with its share of the micro-batches: no pipeline at all.

`apart` sums nothing and sends nothing: what these cores can do at best, whoever schedules them.
`ddp` is torch's DistributedDataParallel, which sums gradients with the last micro-batch; each rank
knows the loss of its own share. In `ddp, loss` all know the batch's, as in all ways of ours.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.pipeline import plain
from benchmarks.pipeline.livebytes import LiveBytes
from benchmarks.pipeline.network import BATCH, batch, loss, network
from benchmarks.pipeline.peer import CHECK_PIXELS, KEYS
from benchmarks.pipeline.ranks import Ranks

COPIES = ("apart", "ddp", "ddp, loss")


def measure(name: str, ranks: Ranks, micro_batches: int, repeats: int) -> dict[str, Any]:
    """As `peer.measure`: a rank's virtual time is its CPU time, for nobody waits for another."""
    steps = list(zip(*ranks.run(timed, name, micro_batches, repeats), strict=True))
    return {
        "wall": [max(wall for wall, _ in step) for step in steps],
        "virtual": [max(cpu for _, cpu in step) for step in steps],
        "cpu": [[cpu for _, cpu in step] for step in steps],
    }


def peak(name: str, ranks: Ranks, micro_batches: int) -> list[int]:
    return ranks.run(peak_bytes, name, micro_batches)


def error(ranks: Ranks, micro_batches: int) -> dict[str, float]:
    answers = ranks.run(errors, micro_batches)
    return {key: max(answer[key] for answer in answers) for key in KEYS}


# What follows runs on the ranks.


def share(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    size, rank = dist.get_world_size(), dist.get_rank()
    return images.chunk(size)[rank], labels.chunk(size)[rank]


def ddp_step(model: nn.Module, images: Tensor, labels: Tensor, micro_batches: int) -> float:
    assert isinstance(model, DistributedDataParallel)
    total = torch.zeros((), dtype=images.dtype)
    parts = list(zip(images.chunk(micro_batches), labels.chunk(micro_batches), strict=True))
    for i, (some_images, some_labels) in enumerate(parts):
        with nullcontext() if i == len(parts) - 1 else model.no_sync():
            part = loss(model(some_images), some_labels) / micro_batches
            part.backward()
        total += part.detach()
    return total.item()


def ddp_step_with_loss(
    model: nn.Module, images: Tensor, labels: Tensor, micro_batches: int
) -> float:
    mine = torch.tensor(ddp_step(model, images, labels, micro_batches), dtype=torch.float64)
    dist.all_reduce(mine)
    return mine.item() / dist.get_world_size()


STEPS: dict[str, Callable[[nn.Module, Tensor, Tensor, int], float]] = {
    "apart": plain.step,
    "ddp": ddp_step,
    "ddp, loss": ddp_step_with_loss,
}


def _copy(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    return network(dtype) if name == "apart" else DistributedDataParallel(network(dtype))


@cache
def _warm(name: str, micro_batches: int) -> nn.Module:
    model = _copy(name)
    STEPS[name](model, *share(*batch()), micro_batches // dist.get_world_size())
    return model


def timed(name: str, micro_batches: int, repeats: int) -> list[tuple[float, float]]:
    model = _warm(name, micro_batches)
    images, labels = share(*batch())
    seconds = []
    for _ in range(repeats):
        model.zero_grad()
        dist.barrier()
        wall, cpu = time.perf_counter(), time.thread_time()
        STEPS[name](model, images, labels, micro_batches // dist.get_world_size())
        seconds.append((time.perf_counter() - wall, time.thread_time() - cpu))
    model.zero_grad()
    return seconds


def peak_bytes(name: str, micro_batches: int) -> int:
    model = _warm(name, micro_batches)
    images, labels = share(*batch())
    model.zero_grad()
    with LiveBytes() as live:
        STEPS[name](model, images, labels, micro_batches // dist.get_world_size())
    model.zero_grad()
    return live.peak


def errors(micro_batches: int) -> dict[str, float]:
    want, gradients = plain.reference(micro_batches, CHECK_PIXELS)
    model = _copy("ddp", torch.float64)
    images, labels = share(*batch(BATCH, CHECK_PIXELS, torch.float64))
    mean = ddp_step_with_loss(model, images, labels, micro_batches // dist.get_world_size())
    off = []
    for name, p in model.named_parameters():
        of = gradients[name.removeprefix("module.")]
        assert p.grad is not None, name
        off.append(((p.grad - of).abs().max() / of.abs().max()).item())
    return {"loss": abs(mean - want) / abs(want), "gradient": max(off)}
