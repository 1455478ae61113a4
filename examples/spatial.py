"""How do I train on an image that is too large for one rank?

    torchrun --nproc-per-node 3 examples/spatial.py

A small U-Net, its first stage on two tiles (the upper half on rank 0, the lower on rank 1), the
rest on rank 2. The image is in a file; each rank reads only the rows that it needs. Prints what was
read.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn

import gems


class Net(nn.Module):
    """Half the resolution and back, with a skip. Nothing in it knows about tiles."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.deep = nn.Sequential(
            nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU()
        )
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.head = nn.Conv2d(16, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fine = self.down(x)
        return self.head(torch.cat([fine, self.up(self.deep(fine))], 1))


class File:
    """An image in a file: anything with a shape, a dtype and slices will do (zarr, h5py, ...)."""

    def __init__(self, path: Path, shape: tuple[int, ...]) -> None:
        self.pixels = np.memmap(path, dtype=np.float32, mode="r", shape=shape)
        self.shape, self.dtype = shape, self.pixels.dtype
        self.rows: set[tuple[int, int]] = set()

    def __getitem__(self, box: tuple[slice, ...]) -> np.ndarray:
        self.rows.add((box[2].start, box[2].stop))
        return np.array(self.pixels[box])


def main() -> None:
    torch.manual_seed(0)
    side = 96
    trainer = gems.Trainer(
        Net(),
        loss=nn.functional.cross_entropy,  # the mean over all pixels
        optimizer=lambda parameters: torch.optim.AdamW(parameters, 1e-2),
        sample=torch.empty(1, 3, side, side),
        plan=gems.Plan(stages=[["down", "deep"], ["up", "head"]], spatial=["2x1"], micro_batches=2),
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"image-{trainer.rank}.raw"
        pixels = np.random.default_rng(0).random((2, 3, side, side), dtype=np.float32)
        pixels.tofile(path)
        image = File(path, pixels.shape)
        labels = torch.from_numpy(pixels.mean(1) > 0.5).long()
        losses = [trainer.step(image, labels).loss for _ in range(10)]
    print(f"rank {trainer.rank} read rows {sorted(image.rows) or 'none'} of {side}")
    assert losses[-1] < losses[0]
    if trainer.rank == 0:
        print(" ".join(f"{loss:.3f}" for loss in losses))
    trainer.close()


if __name__ == "__main__":
    main()
