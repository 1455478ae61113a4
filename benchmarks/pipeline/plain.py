"""Plain PyTorch: one process, one thread, the micro-batches one after the other."""

from __future__ import annotations

import time
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.pipeline.livebytes import LiveBytes
from benchmarks.pipeline.network import BATCH, PIXELS, batch, loss, network
from benchmarks.pipeline.ranks import Ranks


def step(model: nn.Module, images: Tensor, labels: Tensor, micro_batches: int) -> float:
    """Leaves the gradients of the batch's mean loss in the parameters and returns that loss."""
    total = torch.zeros((), dtype=images.dtype)
    parts = zip(images.chunk(micro_batches), labels.chunk(micro_batches), strict=True)
    for some_images, some_labels in parts:
        part = loss(model(some_images), some_labels) / micro_batches
        part.backward()
        total += part.detach()
    return total.item()


def measure(ranks: Ranks, micro_batches: int, repeats: int) -> dict[str, Any]:
    """Seconds per step, by the clock on the wall and by the CPU time of the thread."""
    (steps,) = ranks.run(timed, micro_batches, repeats)
    return {"wall": [wall for wall, _ in steps], "virtual": [cpu for _, cpu in steps]}


def peak(ranks: Ranks, micro_batches: int) -> list[int]:
    """The most bytes alive in a step, gradients included, weights and images not."""
    return ranks.run(peak_bytes, micro_batches)


# What follows runs on the rank.


@cache
def _model() -> nn.Sequential:
    return network()


@cache
def _warm(micro_batches: int) -> None:
    step(_model(), *batch(), micro_batches)


def timed(micro_batches: int, repeats: int) -> list[tuple[float, float]]:
    _warm(micro_batches)
    images, labels = batch()
    seconds = []
    for _ in range(repeats):
        _model().zero_grad()
        wall, cpu = time.perf_counter(), time.thread_time()
        step(_model(), images, labels, micro_batches)
        seconds.append((time.perf_counter() - wall, time.thread_time() - cpu))
    return seconds


def peak_bytes(micro_batches: int) -> int:
    images, labels = batch()
    _model().zero_grad()
    with LiveBytes() as live:
        step(_model(), images, labels, micro_batches)
    _model().zero_grad()
    return live.peak


@cache
def reference(micro_batches: int, pixels: int = PIXELS) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients in float64, by parameter name, for others to compare with."""
    model = network(torch.float64)
    value = step(model, *batch(BATCH, pixels, torch.float64), micro_batches)
    return value, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
