"""How do I save a run, and go on with it under another plan?

    torchrun --nproc-per-node 2 examples/resume.py

Trains three steps over two pipeline stages, saves, and goes on over two tiles of the image. The
losses are those of a run that was never stopped: prints both, and the largest difference.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import nn

import gems

PIPELINE = gems.Plan(stages=2, micro_batches=2, schedule="1f1b")
TILES = gems.Plan(spatial=["2x1"], micro_batches=2, schedule="sequential")


def trainer(plan: gems.Plan) -> gems.Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.1),
        nn.Conv2d(16, 16, 3, stride=2, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    )  # fmt: skip
    return gems.Trainer(
        model.double(),
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, 1e-2),
        sample=torch.empty(2, 3, 32, 32, dtype=torch.float64),
        plan=plan,
    )


def losses(of: gems.Trainer, first: int, last: int) -> list[float]:
    found = []
    for step in range(first, last):
        draw = torch.Generator().manual_seed(step)
        images = torch.randn(4, 3, 32, 32, dtype=torch.float64, generator=draw)
        labels = torch.randint(10, (4,), generator=draw)
        found.append(of.step(images, labels).loss)
    return found


def main() -> None:
    whole = losses(trainer(PIPELINE), 0, 6)
    first = trainer(PIPELINE)
    folder = first.transport.all_gather_object(tempfile.mkdtemp())[0]  # one that all ranks see
    stopped = losses(first, 0, 3)
    first.save(Path(folder) / "step-3", extra={"next": 3})
    second = trainer(TILES)
    position = second.load(gems.latest(folder) or folder)
    stopped += losses(second, position["next"], 6)
    far = max(abs(a - b) for a, b in zip(whole, stopped, strict=True))
    if second.rank == 0:
        print("never stopped    ", " ".join(f"{loss:.6f}" for loss in whole))
        print("saved and resumed", " ".join(f"{loss:.6f}" for loss in stopped))
        print(f"largest difference {far:.1e}")
    assert far < 1e-12
    second.close()


if __name__ == "__main__":
    main()
