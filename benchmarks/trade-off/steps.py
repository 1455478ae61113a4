"""A point on its ranks: what a step should take, steps that are taken, and what was live."""

from __future__ import annotations

from functools import cache
from importlib import import_module

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks.pipeline.livebytes import LiveBytes
from gems.hardware import machine
from gems.model.costs import Costs, mean
from gems.models import build
from gems.predict.simulate import simulate, virtual
from gems.torch.planning import Study
from gems.torch.trainer import Trainer

from .points import CHARTS

frozen = import_module("benchmarks.largest-image.networks").frozen
Seen = tuple[
    float, float, int
]  # seconds by the wall and in virtual time, bytes of the fullest rank


def _adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, 0.0)  # every step does the same


def _model() -> nn.Module:
    torch.manual_seed(0)
    return frozen(build("resnet110_v2", num_classes=2))


@cache
def _costs(side: int) -> Costs:
    """Of the blocks, on all ranks at once, as the points run them."""
    sample = torch.empty(1, 3, side, side)
    mine = Study(_model(), sample, machine("local"), costs="measure").graph[1]
    found: list[Costs] = [mine] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return mean(found)


@cache
def _trainer(chart: str, name: str, side: int, memory: float | None) -> Trainer:
    return Trainer(
        _model(), cross_entropy, _adam, torch.empty(1, 3, side, side), CHARTS[chart].plans[name],
        costs=_costs(side), machine=machine("local"), memory=memory,
    )  # fmt: skip


def _batch(chart: str, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    images, draw = CHARTS[chart].images, torch.Generator().manual_seed(1)
    return (
        torch.randn((images, 3, side, side), generator=draw),
        torch.randint(2, (images,), generator=draw),
    )


def predicted(chart: str, name: str, side: int, memory: float | None) -> tuple[float, int]:
    """Seconds, and bytes of the fullest rank, by the measured costs of the blocks."""
    t = _trainer(chart, name, side, memory)
    said = simulate(t.schedule, t.plan, t.costs, t.machine, state=2.0)
    return said.seconds, max(peak.total for peak in said.peaks)


def measured(chart: str, name: str, side: int, memory: float | None) -> Seen:
    """One step; bytes as the engine counts them."""
    trainer = _trainer(chart, name, side, memory)
    dist.barrier()
    trainer.step(*_batch(chart, side))
    seen = trainer.timeline()
    alone = virtual(seen, trainer.schedule, trainer.plan)
    return seen.seconds, alone.seconds, max(peak.total for peak in seen.peaks)


def live(chart: str, name: str, side: int, memory: float | None) -> int:
    """What the dispatcher saw alive at most on this rank, beside what stood there before."""
    trainer = _trainer(chart, name, side, memory)
    batch = _batch(chart, side)
    with LiveBytes() as count:
        trainer.step(*batch)
    resident = trainer.session.adapter.resident_memory()
    return count.peak + resident.weights + resident.optimizer
