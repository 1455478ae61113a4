"""One step by torch.distributed.pipelining, every cell of a stage checkpointed."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.utils.checkpoint import checkpoint

from benchmarks.pipeline.livebytes import LiveBytes

from .networks import NETWORKS, cells
from .plain import resident, sgd

Tensor = torch.Tensor
Shapes = list[tuple[torch.Size, ...]]


class Part(nn.Module):
    """Some cells of the chain, one stage. Only their inputs are kept for backward."""

    def __init__(self, chain: list[nn.Module]) -> None:
        super().__init__()
        self.chain = nn.ModuleList(chain)

    def forward(self, *state: Tensor) -> Any:
        for cell in self.chain:
            state = checkpoint(cell, *state, use_reentrant=False)
        return state if len(state) > 1 else state[0]


def schedule(ranks: int, images: int) -> type:
    """1F1B keeps less; torch refuses it for fewer micro-batches than stages."""
    return Schedule1F1B if images >= ranks else ScheduleGPipe


def trained(name: str, images: int, side: int) -> int:
    """On this rank: its stage of the cut that leaves the fullest rank least."""
    rank, ranks, network = dist.get_rank(), dist.get_world_size(), NETWORKS[name]
    shapes, work, weights = sizes(name, side)
    under_way = [min(images, ranks - s) for s in range(ranks)]
    if schedule(ranks, images) is ScheduleGPipe:
        under_way = [images] * ranks
    at = cut(shapes, work, weights, under_way)
    part = Part(cells(network.make())[at[rank] : at[rank + 1]])
    target, last = network.target(images, side), rank == ranks - 1
    optimizer = sgd(list(part.parameters()))
    with LiveBytes() as live:
        stage = PipelineStage(
            part, rank, ranks, torch.device("cpu"),
            # Otherwise its first step would try the stage on memory that holds anything.
            input_args=_meta(shapes[at[rank]]), output_args=_meta(shapes[at[rank + 1]]),
        )  # fmt: skip
        order = schedule(ranks, images)(stage, images, loss_fn=network.loss)
        given = [torch.ones(images, 3, side, side)] if rank == 0 else []
        order.step(*given, **({"target": target} if last else {}), return_outputs=False)
        optimizer.step()
    return live.peak + resident(part, *([target] if last else []))


def _meta(shapes: tuple[torch.Size, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.empty(shape, device="meta", requires_grad=True) for shape in shapes)


def sizes(name: str, side: int) -> tuple[Shapes, list[int], list[int]]:
    """The shapes before each cell and after the last; per cell the bytes that its modules put out,
    and those of its weights. Nothing is computed."""
    with torch.device("meta"):
        chain = cells(NETWORKS[name].make())
        state: tuple[Tensor, ...] = (torch.empty(1, 3, side, side),)
    shapes, work = [(state[0].shape,)], []
    for cell in chain:
        put_out: list[int] = []
        hooks = [
            m.register_forward_hook(lambda m, _, y, seen=put_out: seen.append(4 * y.numel()))
            for m in cell.modules()
            if not list(m.children())
        ]
        state = cell(*state)
        for hook in hooks:
            hook.remove()
        shapes.append(tuple(x.shape for x in state))
        work.append(sum(put_out))
    return shapes, work, [standing_bytes(cell) for cell in chain]


def standing_bytes(cell: nn.Module) -> int:
    return sum(4 * x.numel() for x in (*cell.parameters(), *cell.buffers()))


def cut(shapes: Shapes, work: list[int], weights: list[int], under_way: list[int]) -> list[int]:
    """Where each stage begins, and the end: of all cuts the one that leaves the fullest rank least:
    weights and gradients, the first tensor before each cell for every micro-batch under way, and
    one cell at work."""
    n, p = len(work), len(under_way)
    kept = [4 * shape[0].numel() for shape in shapes]
    total = [0]
    for k in kept:
        total.append(total[-1] + k)
    held = [0]
    for w in weights:
        held.append(held[-1] + 2 * w)

    def full(start: int, stop: int, times: int) -> int:
        most = max(work[start:stop])
        return held[stop] - held[start] + times * (total[stop] - total[start]) + most

    def fullest(inner: tuple[int, ...]) -> int:
        at = (0, *inner, n)
        return max(full(at[s], at[s + 1], under_way[s]) for s in range(p))

    return [0, *min(combinations(range(1, n), p - 1), key=fullest), n]
