"""The plans that run on the simulated GPU, and mistakes that the simulation must find."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import nn

import gems
from gems.plans.plan import Plan
from gems.torch.async_pipeline import AsyncPipeline
from gems.torch.offload import stores
from gems.transport import communicators, torch_distributed

Tensor = torch.Tensor
SIZE = 64  # of an image


@dataclass(frozen=True)
class Family:
    """One rank of a plan. `on_gpu`: batches come on the device; `mistake` breaks something."""

    plan: Plan
    rank: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy
    on_gpu: bool = False
    steps: int = 2
    mistake: Callable[[], AbstractContextManager[Any]] = nullcontext


def network() -> nn.Module:
    """Four times convolution, BatchNorm and ReLU, then a classifier."""
    torch.manual_seed(0)
    blocks = [(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU()) for _ in range(4)]
    layers = [layer for block in blocks for layer in block]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 10))


FAMILIES = {
    "one rank": Family(Plan(stages=1)),
    "bf16": Family(Plan(stages=1), options={"precision": "bf16"}),
    "fp16": Family(Plan(stages=1), options={"precision": "fp16"}),
    "offloaded activations": Family(
        Plan(stages=3, ranks=1, micro_batches=4, schedule="gpipe", offload=("activations",))
    ),
    "offloaded weights (l2l)": Family(
        Plan(stages=3, ranks=1, micro_batches=2, schedule="l2l", offload=("weights",))
    ),
    "offloaded weights, eager steps": Family(
        Plan(
            stages=3,
            ranks=1,
            micro_batches=2,
            schedule="l2l",
            offload=("weights",),
            optimizer_step="eager",
        )
    ),
    "offloaded optimizer": Family(
        Plan(stages=2, ranks=1, schedule="gpipe", offload=("optimizer",))
    ),
    "data=2, clip": Family(Plan(stages=1, data=2), options={"clip": 1.0}),
    # In the first two steps ranks compare whole batches.
    "data=2, batches on the GPU": Family(Plan(stages=1, data=2), on_gpu=True, steps=3),
    "zero=3": Family(Plan(stages=2, ranks=1, schedule="sequential", data=2, zero=3)),
    "gems": Family(Plan(stages=2, micro_batches=2, schedule="gems")),
    "1f1b": Family(Plan(stages=4, micro_batches=8, schedule="1f1b"), rank=1),
    "1f1b, last stage": Family(Plan(stages=4, micro_batches=8, schedule="1f1b"), rank=3),
    "zero-bubble": Family(Plan(stages=4, micro_batches=8, schedule="zero-bubble"), rank=1),
    "2bw": Family(Plan(stages=3, micro_batches=3, schedule="2bw"), rank=1, steps=3),
    # It sends no digest of the batch, hence is sent none.
    "2bw, last stage": Family(
        Plan(stages=3, micro_batches=3, schedule="2bw"),
        rank=2,
        steps=3,
        mistake=lambda: mock.patch.object(AsyncPipeline, "_same_before", lambda _: True),
    ),
    "tiles 2x2": Family(Plan(stages=1, spatial=["2x2"])),
    "tiles 4x4": Family(Plan(stages=1, spatial=["4x4"]), rank=5),
    "tiles 4x4, halo d2": Family(Plan(stages=1, spatial=["4x4"], halo="d2"), rank=5),
}


# --- mistakes -----------------------------------------------------------------------------------


def _no_wait(owner: Any) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: mock.patch.object(owner, "wait", lambda self: None)


def _reading_loss(output: Tensor, target: Tensor) -> Tensor:
    loss = nn.functional.cross_entropy(output, target)
    loss.item()
    return loss


def _longer_loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target) + 0.0


def _astray_loss(output: Tensor, target: Tensor) -> Tensor:
    torch.zeros(3, device="cuda:0")  # which is not the rank's
    return nn.functional.cross_entropy(output, target)


def _exchanged_on_host() -> AbstractContextManager[Any]:
    batch = communicators.batch

    def batched(sends: Any, receives: Any, group: Any) -> Any:
        return batch([(x.cpu(), target) for x, target in sends], receives, group)

    return mock.patch.object(communicators, "batch", batched)


_line = FAMILIES["1f1b"]
_store = Plan(stages=2, ranks=1, micro_batches=2, schedule="gpipe", offload=("activations",))
MISTAKES = {
    "no wait for messages": Family(_line.plan, 1, mistake=_no_wait(torch_distributed._Work)),
    "no wait for copies": Family(_store, mistake=_no_wait(stores._CopyWork)),
    "item in the loss": Family(Plan(stages=1), loss=_reading_loss),
    "one more launch": Family(Plan(stages=1), loss=_longer_loss),
    "another device": Family(Plan(stages=1), loss=_astray_loss),
    "host tensor over NCCL": Family(FAMILIES["tiles 2x2"].plan, mistake=_exchanged_on_host),
}


def batches(family: Family) -> Iterator[tuple[Tensor, Tensor]]:
    samples = family.plan.total
    for _ in range(family.steps):
        images, labels = torch.randn(samples, 3, SIZE, SIZE), torch.randint(10, (samples,))
        yield (images.to("cuda:1"), labels.to("cuda:1")) if family.on_gpu else (images, labels)


def trainer(family: Family, transport: Any) -> gems.Trainer:
    return gems.Trainer(
        network(),
        family.loss,
        lambda parameters: torch.optim.AdamW(parameters, 1e-2),
        torch.empty(1, 3, SIZE, SIZE),
        family.plan,
        device="cuda:1",
        costs="estimate",
        transport=transport,
        **family.options,
    )
