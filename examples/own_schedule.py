"""How do I run a schedule of my own?

    torchrun --nproc-per-node 2 examples/own_schedule.py

A schedule is text: the actions of each rank, in order. GEMS validates it before it runs.
"""

from __future__ import annotations

import torch
from torch import nn

import gems
from gems.schedule.action import parse

# Two stages, three micro-batches: rank 1 defers its weight gradients to the end.
ORDER = """
0: 0F0 0F1 0F2 0B0 0B1 0B2
1: 1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2
"""


def main() -> None:
    torch.manual_seed(0)
    plan = gems.Plan(stages=2, micro_batches=3)
    trainer = gems.Trainer(
        nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)),
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
        sample=torch.empty(4, 8),
        plan=plan,
        schedule=parse(ORDER),
    )
    inputs, targets = torch.randn(12, 8), torch.randn(12, 4)
    losses = [trainer.step(inputs, targets).loss for _ in range(20)]
    if trainer.rank == 0:
        print(trainer.schedule, end="")  # with its messages
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    assert losses[-1] < losses[0]
    trainer.close()


if __name__ == "__main__":
    main()
