"""A user's script: train a small network, alone or under torchrun, mpirun or srun.

    torchrun --nproc-per-node 2 train.py '{"stages": 2, "micro_batches": 4}'

The argument is the plan. Every rank prints one line of JSON: its rank, the losses, and a digest of
the model's whole state.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import gems


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.body = nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU())
        self.head = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.stem(x)).mean((2, 3)))


def loader(steps: int = 2) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The same global batches on every rank."""
    draw = torch.Generator().manual_seed(1)
    for _ in range(steps):
        images = torch.randn(8, 3, 8, 8, generator=draw, dtype=torch.float64)
        yield images, torch.randint(5, (8,), generator=draw)


def trainer(plan: gems.Plan, **options: Any) -> gems.Trainer:
    torch.manual_seed(0)
    chosen: dict[str, Any] = {
        "model": Net().double(),
        "loss": nn.functional.cross_entropy,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
        "sample": torch.empty(2, 3, 8, 8, dtype=torch.float64),
        "plan": plan,
    }
    return gems.Trainer(**chosen | options)


def digest(state: dict[str, torch.Tensor]) -> str:
    whole = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        whole.update(name.encode() + tensor.numpy().tobytes())
    return whole.hexdigest()


def main() -> None:
    mine = trainer(gems.Plan(**json.loads(sys.argv[1])))
    losses = [mine.step(images, labels).loss for images, labels in loader()]
    line = {"rank": mine.rank, "losses": losses, "digest": digest(mine.state_dict())}
    sys.stdout.write(json.dumps(line) + "\n")  # whole lines, though ranks share the stream


if __name__ == "__main__":
    main()
