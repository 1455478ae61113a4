"""How do I keep my own loop, with optimizers of my own?

    torchrun --nproc-per-node 2 examples/own_loop.py

A session runs forward and backward under the plan, and steps the optimizers that it was given; when
it does so is up to the loop. Here two batches make one step; biases have their own optimizer.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import ExponentialLR

import gems
from gems.data.loader import Loader
from gems.data.pictures import Pictures

CLASSES, SIDE, STEPS = 4, 32, 12


def main() -> None:
    torch.manual_seed(0)  # every rank builds the same model and is given the same batches
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, CLASSES),
    )  # fmt: skip
    plan = gems.Plan(stages=2, schedule="gems", replications=2)
    sample = torch.empty(4, 3, SIDE, SIDE)  # one micro-batch
    with gems.Session(model, cross_entropy, sample, plan) as session:
        matrices = [p for p in model.parameters() if p.dim() > 1]
        vectors = [p for p in model.parameters() if p.dim() == 1]
        adam = torch.optim.AdamW(matrices, 1e-2)
        session.add_optimizer(adam, scheduler=lambda optimizer: ExponentialLR(optimizer, 0.95))
        session.add_optimizer(torch.optim.SGD(vectors, 0.1, momentum=0.9))
        losses = []
        crops = Loader(Pictures(SIDE, CLASSES, samples=2 * 16 * STEPS), 16)
        for number, (images, labels) in enumerate(crops.epoch()):
            last = number % 2 == 1  # of the two batches that make one step
            losses.append(session.forward_backward(images, labels, update=last).loss)
            if last:
                session.optimizer_step()
        if session.rank == 0:
            print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {STEPS} steps of two batches")
            assert losses[-1] < losses[0]


if __name__ == "__main__":
    main()
