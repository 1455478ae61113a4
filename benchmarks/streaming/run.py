"""CPU seconds of one training step, plain and streamed, in turn in one process.

OMP_NUM_THREADS=1 python -m benchmarks.streaming.run --network unet --side 1024 --stream 4x4
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
from collections.abc import Callable
from statistics import median
from time import process_time

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.where import where
from gems.models import build
from gems.plans.plan import Plan
from gems.plans.streaming import STREAM_HALOS
from gems.torch.trainer import Trainer

Tensor = torch.Tensor
Step = Callable[[], object]


def network(name: str, width: int) -> nn.Module:
    torch.manual_seed(0)
    if name == "unet":
        return build("unet", norm="none", num_classes=2, width=width)
    return build(name, num_classes=2)


def target(name: str, side: int) -> Tensor:
    return torch.zeros((1, side, side) if name == "unet" else (1,), dtype=torch.int64)


def sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 1e-3)  # type: ignore[arg-type]


def plainly(model: nn.Module, image: Tensor, wanted: Tensor) -> Step:
    model.train()
    optimizer = sgd(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(image), wanted).backward()
        optimizer.step()

    return step


def streamed(model: nn.Module, image: Tensor, wanted: Tensor, plan: Plan) -> Step:
    sample = torch.empty(image.shape, device="meta")
    trainer = Trainer(model, F.cross_entropy, sgd, sample, plan, costs="estimate")
    return lambda: trainer.step(image, wanted)


def seconds(step: Step) -> float:
    begun = process_time()
    step()
    return process_time() - begun


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--network", default="unet", help="unet (without norm), or a ResNet")
    ask.add_argument("--width", type=int, default=16, help="of the U-Net")
    ask.add_argument("--side", type=int, default=256)
    ask.add_argument("--stream", default="4x4", help="one grid, or one per stage by comma")
    ask.add_argument("--halo", default="recompute", choices=STREAM_HALOS, help="of patches")
    ask.add_argument("--stages", default="1", help="a number, or layers that begin stages")
    ask.add_argument("--steps", type=int, default=3)
    ask.add_argument("--profile", action="store_true")
    given = ask.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    image, wanted = torch.randn(1, 3, given.side, given.side), target(given.network, given.side)
    plan = Plan(
        stages=int(given.stages), ranks=1, stream=given.stream.split(","), schedule="sequential",
        stream_halo=given.halo,
    )  # fmt: skip
    ways = {
        "plain": plainly(network(given.network, given.width), image, wanted),
        "streamed": streamed(network(given.network, given.width), image, wanted, plan),
    }
    for step in ways.values():
        step()
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(given.steps):
        for name, step in ways.items():
            taken[name].append(seconds(step))
    ratios = [b / a for a, b in zip(taken["plain"], taken["streamed"], strict=True)]
    print(where())
    print(
        f"{given.network}, {given.side}², {given.stream} patches, {given.halo}, {given.stages} "
        "stage(s): plain "
        f"{median(taken['plain']):.2f} CPU s, streamed {median(taken['streamed']):.2f}, ratio "
        f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    )
    if given.profile:
        with cProfile.Profile() as profile:
            ways["streamed"]()
        pstats.Stats(profile).sort_stats("tottime").print_stats(45)


if __name__ == "__main__":
    main()
