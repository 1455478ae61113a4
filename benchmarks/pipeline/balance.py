"""Where to cut the network: children per stage, from what each child takes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

import torch
import torch.distributed as dist

from benchmarks.pipeline.network import batch, network
from benchmarks.pipeline.ranks import Ranks

MICRO_BATCH = 2  # samples given to a child when it is timed: those of 4 micro-batches


def child_seconds(ranks: Ranks, repeats: int = 5) -> tuple[float, ...]:
    """CPU seconds of each child, forward and backward, measured while the other ranks rest."""
    return ranks.run(timed_children, repeats)[0]


def timed_children(repeats: int) -> tuple[float, ...]:
    if dist.get_rank() != 0:
        return ()
    model = network()
    best = [float("inf")] * len(model)
    for _ in range(repeats):
        x, _ = batch(MICRO_BATCH)
        for i, child in enumerate(model):
            x = x.detach().requires_grad_(i > 0)
            start = time.thread_time()
            x = child(x)
            middle = time.thread_time()
            gradient = torch.ones_like(x)
            again = time.thread_time()
            x.backward(gradient)
            best[i] = min(best[i], middle - start + time.thread_time() - again)
    return tuple(best)


def cut(seconds: Sequence[float], owners: Sequence[int], micro_batches: int) -> tuple[int, ...]:
    """Children per stage for the shortest pipeline, stage `s` being on rank `owners[s]`.

    With R the work of the busiest rank per micro-batch and S that of the slowest stage, a step
    of m micro-batches on p ranks takes about m R + (p - 1) S. All cuts are tried.
    """
    ranks = len(set(owners))
    upto = [0.0]
    for each in seconds:
        upto.append(upto[-1] + each)

    def step(bounds: tuple[int, ...]) -> float:
        stages = [upto[b] - upto[a] for a, b in pairwise(bounds)]
        work = [0.0] * ranks
        for rank, stage in zip(owners, stages, strict=True):
            work[rank] += stage
        return micro_batches * max(work) + (ranks - 1) * max(stages)

    best = min(_cuts(len(seconds), len(owners)), key=step)
    return tuple(b - a for a, b in pairwise(best))


def _cuts(children: int, stages: int) -> Iterator[tuple[int, ...]]:
    for inner in combinations(range(1, children), stages - 1):
        yield (0, *inner, children)
