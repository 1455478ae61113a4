"""Train a deep network for some steps, in this process alone, and say each loss and its seconds.

python -m benchmarks.l2l.train --way l2l --layers 8 --width 256
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from time import perf_counter

import torch
from torch import nn

import gems

SAMPLES, RATE = 8, 1e-4
Tensor = torch.Tensor


class Layer(nn.Module):
    """A residual layer, whose weights depend on its number alone."""

    def __init__(self, number: int, width: int) -> None:
        super().__init__()
        self.number, self.width = number, width
        self.weight = nn.Parameter(torch.empty(width, width))
        self.bias = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        draw = torch.Generator().manual_seed(self.number)
        if not self.weight.is_meta:
            nn.init.normal_(self.weight, std=self.width**-0.5, generator=draw)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * nn.functional.linear(x, self.weight, self.bias).relu()


def network(layers: int, width: int) -> nn.Module:
    return nn.Sequential(*(Layer(number, width) for number in range(layers)))


def adam(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, RATE)  # type: ignore[arg-type]


def data(width: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(SAMPLES, width, generator=draw), torch.randn(SAMPLES, width, generator=draw)


def plain(layers: int, width: int, steps: int) -> Iterator[float]:
    """The plain loop: all of it in memory."""
    model, (x, y) = network(layers, width), data(width)
    optimizer = adam(model.parameters())
    for _ in range(steps):
        total = 0.0
        for part, target in zip(x.chunk(2), y.chunk(2), strict=True):
            loss = nn.functional.mse_loss(model(part), target) / 2
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        yield total


def planned(plan: gems.Plan, layers: int, width: int, steps: int, folder: str) -> Iterator[float]:
    """The same under a plan. The model has no memory of its own: it is on the meta device."""
    with torch.device("meta"):
        model = network(layers, width)
    x, y = data(width)
    sample = torch.empty(SAMPLES // 2, width)
    lose = nn.functional.mse_loss
    trainer = gems.Trainer(model, lose, adam, sample, plan, offload_folder=folder or None)
    for _ in range(steps):
        yield trainer.step(x, y).loss
    trainer.close()


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--way", choices=("plain", "l2l", "l2l-p"), required=True)
    ask.add_argument("--layers", type=int, required=True)
    ask.add_argument("--width", type=int, required=True)
    ask.add_argument("--steps", type=int, default=3)
    ask.add_argument("--folder", default="")
    given = ask.parse_args()
    torch.set_num_threads(1)
    if given.way == "plain":
        losses = plain(given.layers, given.width, given.steps)
    else:
        plan = gems.Plan(
            stages=given.layers,
            ranks=1,
            micro_batches=2,
            schedule="l2l",
            offload="weights:disk",
            optimizer_step="eager" if given.way == "l2l-p" else "end",
        )
        losses = planned(plan, given.layers, given.width, given.steps, given.folder)
    start = perf_counter()
    for loss in losses:
        print(json.dumps({"loss": loss, "seconds": perf_counter() - start}), flush=True)
        start = perf_counter()


if __name__ == "__main__":
    main()
