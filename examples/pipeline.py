"""How do I train my own model over two ranks?

    torchrun --nproc-per-node 2 examples/pipeline.py

Prints the loss of ten steps, the same on every rank, and the last step as both ranks measured it.
"""

from __future__ import annotations

import torch
from torch import nn

import gems
from gems.draw.text import text


class Net(nn.Module):
    """Any module: this one has a skip from its first layer to its last."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.body = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
                for _ in range(6)
            )
        )
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        return self.head((self.body(x) + x).mean((2, 3)))


def main() -> None:
    torch.manual_seed(0)  # every rank builds the same model and is given the same batches
    trainer = gems.Trainer(
        Net(),
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, 1e-2),
        sample=torch.empty(2, 3, 32, 32),
        plan=gems.Plan(stages=2, schedule="gems", replications=2),
    )
    images, labels = torch.randn(8, 3, 32, 32), torch.randint(10, (8,))
    losses = [trainer.step(images, labels).loss for _ in range(10)]
    timeline = trainer.timeline()
    if trainer.rank == 0:
        print(" ".join(f"{loss:.3f}" for loss in losses))
        print(text(timeline))
    assert losses[-1] < losses[0]
    trainer.close()


if __name__ == "__main__":
    main()
