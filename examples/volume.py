"""How do I train on volumes in a file, each rank reading only its own slices?

    torchrun --nproc-per-node 2 examples/volume.py

Balls in noise, in an HDF5 file: a 3-D U-Net learns to tell their cells. Volumes are tiled in depth:
rank 0 has the front half of every layer, and rank 1 the back. Prints what each of them read.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import h5py
import numpy as np
import torch
from torch import nn

import gems
from gems import models
from gems.data.loader import Loader
from gems.data.source import Box, Image
from gems.data.volumes import Volumes
from gems.torch.metrics import Scores
from gems.torch.optimizers import optimizer

SIDE, RADIUS, SAMPLES = 20, 8, 16


class Watched(Volumes):
    """Notes which slices were asked for."""

    def read(self, index: int, box: Box) -> Image:
        self.__dict__.setdefault("slices", set()).add((box[0].start, box[0].stop))
        return super().read(index, box)


def write(path: Path) -> None:
    """Volumes and masks, one after the other along the first dim."""
    draw = np.random.default_rng(0)
    cells = np.stack(np.meshgrid(*[np.arange(SIDE)] * 3, indexing="ij"))
    centres = draw.uniform(RADIUS, SIDE - RADIUS, (SAMPLES, 3))[..., None, None, None]
    masks = np.sqrt(((cells - centres) ** 2).sum(1)) < RADIUS
    with h5py.File(path, "w") as file:
        file["images"] = (masks + draw.normal(0, 0.5, masks.shape)).astype(np.float32)
        file["masks"] = masks.astype(np.uint8)


def main() -> None:
    torch.manual_seed(0)
    trainer = gems.Trainer(
        models.build("unet", dims=3, in_channels=1, num_classes=2, width=4, levels=2, norm="none"),
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: optimizer("adam", parameters, 2e-2),
        sample=torch.empty(2, 1, SIDE, SIDE, SIDE),
        plan=gems.Plan(stages=1, spatial=["2x1x1"], micro_batches=2, schedule="sequential"),
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "balls.h5"
        write(path)
        volumes = Watched(path, masks="masks", names=("noise", "ball"))
        losses = []
        for epoch in range(4):
            for images, masks in Loader(volumes, 4, seed=0).epoch(epoch):
                losses.append(trainer.step(images, masks).loss)
        print(f"rank {trainer.rank} read slices {sorted(volumes.slices)} of {SIDE}")
        images, masks = next(Loader(volumes, 4, shuffle=False).epoch())
        scores = Scores("segmentation", 2)
        scores.add(trainer.predict(images), torch.from_numpy(masks[()]))
    if trainer.rank == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, Dice of balls "
              f"{scores.summary()['dice_1']:.2f}")  # fmt: skip
        assert scores.summary()["dice_1"] > 0.6
    trainer.close()


if __name__ == "__main__":
    main()
