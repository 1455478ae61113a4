"""How do I segment real tissue with a U-Net whose images are tiled over two ranks?

    torchrun --nproc-per-node 2 examples/unet.py

Stained tissue comes with scikit-image; the mask is where its brown stain (DAB) is strong, found by
separating the colours. The U-Net sees the colours only. Each rank has the upper or the lower half
of every layer, with the numbers of one device. Prints Dice and IoU of a part that it did not see.
"""

from __future__ import annotations

import numpy as np
import torch
from skimage import data
from skimage.color import rgb2hed
from torch import nn

import gems
from gems import models
from gems.torch.metrics import Scores
from gems.torch.optimizers import optimizer

SIDE, STEPS = 64, 16


def tissue() -> tuple[np.ndarray, np.ndarray]:
    """Pixels (3, 512, 512) around 0, and a class for each: 1 where the brown stain is strong."""
    picture = data.immunohistochemistry()
    brown = rgb2hed(picture)[..., 2]
    pixels = (picture.astype(np.float32) / 255 - 0.6) / 0.25
    return pixels.transpose(2, 0, 1).copy(), (brown > np.quantile(brown, 0.8)).astype(np.int64)


def main() -> None:
    torch.manual_seed(0)
    pixels, mask = tissue()
    trainer = gems.Trainer(
        models.build("unet", num_classes=2, width=8, levels=3),
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: optimizer("adam", parameters, 1e-2),
        sample=torch.empty(2, 3, SIDE, SIDE),
        plan=gems.Plan(stages=1, spatial=["2x1"], micro_batches=2, schedule="sequential"),
    )
    draw = np.random.default_rng(0)
    losses = []
    for _ in range(STEPS):  # crops of the left three quarters; the right one is for the end
        corners = draw.integers((512 - SIDE, 384 - SIDE), size=(4, 2))
        boxes = [np.s_[..., y : y + SIDE, x : x + SIDE] for y, x in corners]
        images, targets = (np.stack([whole[box] for box in boxes]) for whole in (pixels, mask))
        losses.append(trainer.step(torch.from_numpy(images), torch.from_numpy(targets)).loss)

    scores = Scores("segmentation", 2)
    boxes = [np.s_[..., y : y + SIDE, 384 : 384 + SIDE] for y in range(0, 512, 2 * SIDE)]
    images, targets = (np.stack([whole[box] for box in boxes]) for whole in (pixels, mask))
    scores.add(trainer.predict(torch.from_numpy(images)), torch.from_numpy(targets))
    metrics = scores.summary()
    if trainer.rank == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {STEPS} steps")
        print(f"unseen tissue: Dice of the stain {metrics['dice_1']:.2f}, "
              f"IoU {metrics['iou_1']:.2f}, pixels right {metrics['accuracy']:.0%}")  # fmt: skip
        assert metrics["dice_1"] > 0.5
    trainer.close()


if __name__ == "__main__":
    main()
