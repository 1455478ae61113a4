"""How do I train on a slide of 100,000 x 100,000 pixels, and map all of it, in bounded memory?

    torchrun --nproc-per-node 2 examples/large_slide.py

The slide is generated once into --folder, as a sparse file: glass takes no space. Each rank reads
its half of one tile at a time, so that memory does not depend on the slide. Prints the most memory
that a rank has held, and where the heat map is. Without --side 100000 the slide is a small one.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import gems
from gems import models
from gems.data.heatmap import heat_map
from gems.data.loader import Loader
from gems.data.slides import Slides
from gems.data.source import split
from gems.data.sparse_slide import sparse_slide


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--side", type=int, default=8_000)
    options.add_argument("--tile", type=int, default=128)
    options.add_argument("--steps", type=int, default=8)
    options.add_argument("--folder", type=Path, default=None, help="default: a temporary one")
    given = options.parse_args()
    torch.manual_seed(0)
    # Each rank its own here. Generate into a shared folder once, before the ranks start.
    folder = given.folder or Path(tempfile.mkdtemp())
    made = sparse_slide(folder, given.side, given.tile)
    slides = Slides(made.slide, given.tile, labels=made.labels)
    trainer = gems.Trainer(
        models.build("resnet_v2", depth=11, width=8, num_classes=slides.classes),
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.Adam(parameters, 0.01),
        sample=torch.empty(2, *slides.shape),
        plan=gems.Plan(spatial=["1x2"], micro_batches=2, schedule="sequential"),
    )
    seen, _ = split(slides, held_out=0.25)
    losses: list[float] = []
    with Loader(seen, 4, workers=1) as batches:
        for images, labels in batches.epoch():
            losses.append(trainer.step(images, labels).loss)
            if len(losses) == given.steps:
                break
    every = Loader(slides, 8, shuffle=False).epoch()
    likely = torch.cat([trainer.predict(images).softmax(1) for images, _ in every])
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
    if trainer.rank == 0:
        corners = [slides.place(i)[1:] for i in range(len(slides))]
        maps = heat_map(folder, made.slide, corners, given.tile, likely, slides.names)
        whole = given.side**2 * 3
        print(f"{len(slides)} tiles of {given.side} x {given.side} pixels ({whole / 1e9:.1f} GB)")
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; a rank held {held / 2**20:.0f} MiB")
        print(f"look at {maps.png}")
    trainer.close()


if __name__ == "__main__":
    main()
