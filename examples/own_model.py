"""How do I train my own model, see how good it is, and take its weights away?

    torchrun --nproc-per-node 2 examples/own_model.py

An ordinary module, four kinds of real pictures, two ranks that work in both directions. Prints the
loss and the accuracy, and how far a plain model on one device is off with the same weights.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import gems
from gems.data.loader import Loader
from gems.data.pictures import Pictures
from gems.distributed.learning_rate import cosine, warmed_up
from gems.torch.metrics import Scores
from gems.torch.optimizers import optimizer

CLASSES, SIDE, STEPS = 4, 32, 24


class Net(nn.Module):
    """Yours. It knows nothing of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16))
            for _ in range(4)
        )
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))


def main() -> None:
    torch.manual_seed(0)  # every rank builds the same model and is given the same batches
    trainer = gems.Trainer(
        Net(),
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: optimizer("adamw", parameters, 1e-2, weight_decay=1e-3),
        sample=torch.empty(4, 3, SIDE, SIDE),  # one micro-batch
        plan=gems.Plan(stages=2, schedule="gems", replications=2),  # four of them per step
    )
    assert trainer.optimizer is not None
    schedule = LambdaLR(trainer.optimizer, warmed_up(cosine(STEPS - 4), 4))

    losses = []
    crops = Loader(Pictures(SIDE, CLASSES, samples=16 * STEPS), 16)  # which picture is it from?
    for images, labels in crops.epoch():
        losses.append(trainer.step(images, labels).loss)
        schedule.step()

    images, labels = next(Loader(Pictures(SIDE, CLASSES, samples=64, seed=1), 64).epoch())
    scores = Scores("classification", CLASSES)
    output = trainer.predict(images)
    scores.add(output, torch.from_numpy(labels[:]))
    metrics = scores.summary()

    weights = trainer.state_dict()  # of the whole model, under its own names, on every rank
    if trainer.rank == 0:
        with tempfile.TemporaryDirectory() as folder:
            torch.save(weights, Path(folder) / "net.pt")
            plain = Net().eval()
            plain.load_state_dict(torch.load(Path(folder) / "net.pt", weights_only=True))
        with torch.no_grad():
            off = (plain(torch.from_numpy(images[:])) - output).abs().max().item()
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {STEPS} steps")
        print(f"accuracy {metrics['accuracy']:.0%} (chance is 25%), AUC {metrics['auc']:.3f}")
        print(f"a plain model with these weights is off by {off:.0e}")
        assert off < 1e-4 and metrics["accuracy"] > 0.5
    trainer.close()


if __name__ == "__main__":
    main()
