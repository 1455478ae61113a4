"""Random images of any size, for timing and for tests. Nothing can be learned from them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Synthetic:
    """Normal noise with random labels.

    `image_size` is one number for a square picture, or the height and width (depth first for a
    volume).
    """

    image_size: int | tuple[int, ...] = 32
    classes: int = 10
    channels: int = 3

    def __post_init__(self) -> None:
        if min(*self.shape, self.classes) < 1:
            raise ValueError(
                f"image_size {self.image_size}, classes {self.classes} and channels "
                f"{self.channels} must all be 1 or more"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one sample: channels, then the image."""
        size = self.image_size
        return (self.channels, *((size, size) if isinstance(size, int) else size))

    def batches(
        self, batch_size: int, steps: int, seed: int = 0
    ) -> Iterator[tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]]:
        """`steps` pairs of images (float32) and labels (int64); the same seed, the same batches."""
        for step in range(steps):
            rng = np.random.default_rng((seed, step))
            images = rng.standard_normal((batch_size, *self.shape), dtype=np.float32)
            yield images, rng.integers(self.classes, size=batch_size)
