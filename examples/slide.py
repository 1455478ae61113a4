"""How do I train on a whole-slide image, and see what the network makes of it?

    torchrun --nproc-per-node 2 examples/slide.py

Tiles of a slide are read as they are needed, by threads that read ahead; each rank reads only its
half of every tile. Prints accuracy on tiles of another region, and where the heat map is. (The
slide is real tissue out of scikit-image; put any slide that OpenSlide reads in its place.)
"""

from __future__ import annotations

import tempfile

import torch
from torch import nn

import gems
from gems import models
from gems.data.augment import Augment
from gems.data.heatmap import heat_map
from gems.data.loader import Loader
from gems.data.sample import sample_slides
from gems.data.slides import Slides
from gems.data.source import split
from gems.torch.metrics import Scores


def main() -> None:
    torch.manual_seed(0)
    folder = tempfile.mkdtemp()  # each rank its own here; a shared folder does as well
    sample = sample_slides(folder, tile=32)
    slides = Slides(sample.slide, tile=32, labels=sample.labels)
    seen, unseen = split(slides, held_out=0.25)
    trainer = gems.Trainer(
        models.build("resnet_v2", depth=11, num_classes=slides.classes),
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.Adam(parameters, 3e-3),
        sample=torch.empty(8, *slides.shape),
        plan=gems.Plan(spatial=["1x2"], micro_batches=2, schedule="sequential"),
    )
    with Loader(seen, 16, augment=Augment(), workers=2) as batches:
        for epoch in range(2):
            for images, labels in batches.epoch(epoch):
                trainer.step(images, labels)
    scores, likely = Scores("classification", slides.classes), []
    for images, labels in Loader(unseen, 16, shuffle=False).epoch():
        scores.add(trainer.predict(images), torch.from_numpy(labels))
    for images, _ in Loader(slides, 16, shuffle=False).epoch():
        likely.append(trainer.predict(images).softmax(1))
    if trainer.rank == 0:
        metrics = scores.summary()
        print(
            f"{len(unseen)} unseen tiles: {metrics['accuracy']:.0%} right, AUC {metrics['auc']:.2f}"
        )
        corners = [slides.place(i)[1:] for i in range(len(slides))]
        maps = heat_map(folder, sample.slide, corners, 32, torch.cat(likely), slides.names)
        print(f"look at {maps.png}, or open {maps.geojson} in QuPath")
        assert metrics["accuracy"] > 0.6
    trainer.close()


if __name__ == "__main__":
    main()
