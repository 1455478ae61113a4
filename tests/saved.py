"""A small network that has all that must be saved, on ranks as threads. Not a test itself."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

from gems.plans.plan import Plan
from gems.torch.trainer import Trainer
from gems.transport.threads import run
from tests.exact import Recordings, batches, drawing

Tensor = torch.Tensor
ONE = Plan(stages=1, micro_batches=4, schedule="sequential")
TWO = Plan(stages=2, micro_batches=4)
FOUR = Plan(stages=4, micro_batches=4)
GEMS = Plan(stages=3, replications=2, schedule="gems")
COPIES = Plan(stages=2, micro_batches=2, data=2)
HALVES = Plan(stages=2, micro_batches=4, spatial=[(1, 2)])
TILES = Plan(stages=2, micro_batches=4, spatial=[(2, 2)])


class Net(nn.Module):
    """Statistics, dropout, and a buffer that no state dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.drop = nn.Dropout(0.3)
        self.body = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.head = nn.Linear(6, 5)
        self.register_buffer("scale", torch.rand(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.drop(self.stem(x))).mean((2, 3)) * self.scale)


def network(seed: int = 0, kind: type[nn.Module] = Net, dtype: Any = torch.float64) -> nn.Module:
    with drawing(seed):
        return kind().to(dtype)


def data(steps: int = 5, dtype: Any = torch.float64) -> list[Any]:
    return batches((8, 3, 8, 8), 5, steps, dtype)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.05, momentum=0.9, nesterov=True, weight_decay=1e-3)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 0.01, amsgrad=True)


def on_ranks(
    plan: Plan, work: Callable[[Trainer], Any], weights: int = 0, model: Any = Net, **options: Any
) -> list[Any]:
    """`work(trainer)` on every rank of a plan; each gets the network of this number."""
    dtype = options.pop("dtype", torch.float64)
    options = {"loss": F.cross_entropy, "optimizer": momentum} | options

    def body(transport: Any) -> Any:
        sample = torch.empty(2, 3, 8, 8, dtype=dtype)
        mine = network(weights, model, dtype)
        return work(Trainer(mine, sample=sample, plan=plan, transport=transport, **options))

    with mock.patch("gems.torch.tracing.trace.record", Recordings()):
        return run(plan.world, body)


def trained(trainer: Trainer, start: int, stop: int) -> list[float]:
    """The losses of some steps of the same five."""
    dtype = next(trainer.model.parameters()).dtype
    return [trainer.step(x, y).loss for x, y in data(5, dtype)[start:stop]]


def saved(path: Path, plan: Plan = TWO, steps: int = 2, **options: Any) -> None:
    """A checkpoint after some steps."""

    def work(trainer: Trainer) -> None:
        trained(trainer, 0, steps)
        trainer.save(path, extra={"at": steps})

    on_ranks(plan, work, **options)


def fingerprint(path: Path) -> dict[str, str]:
    """Every file below a folder with a digest of it."""
    files = sorted(p for p in path.rglob("*") if p.is_file())
    return {str(p.relative_to(path)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}
