"""Generated OCT scans of a retina: bright and dark layers under each other, with their masks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gems.data.source import Box, Image, Target, Task, shape_of, spans
from gems.data.synthetic import Synthetic

# Above the retina, its seven layers, fluid below the last, and what is under it, as ReLayNet has.
NAMES = ("above", "nfl", "gcl-ipl", "inl", "opl", "onl-ism", "ise", "os-rpe", "fluid", "below")
BRIGHT = (-1.6, 1.0, 0.2, -0.6, 0.4, -0.9, 1.4, 0.8, -1.3, 0.0)
SPECKLE = 0.5
TOP, BOTTOM = 0.2, 0.85  # heights between which the retina lies


@dataclass(frozen=True)
class Oct:
    """Scans whose layers are bent by a few waves, in speckle. `classes` counts the layers, with
    what is above and below. Any box can be made without the rest."""

    image_size: int | tuple[int, ...] = 128
    classes: int = len(NAMES)
    channels: int = 1
    samples: int = 1024
    seed: int = 0

    def __post_init__(self) -> None:
        if min(*self.shape, self.samples) < 1 or not 2 <= self.classes <= len(NAMES):
            raise ValueError(
                f"image_size {self.image_size}, channels {self.channels} and samples "
                f"{self.samples} must all be 1 or more, and classes, {self.classes}, 2 to "
                f"{len(NAMES)}"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        return shape_of(self.channels, self.image_size)

    @property
    def names(self) -> tuple[str, ...]:
        return (*NAMES[: self.classes - 1], NAMES[-1])

    @property
    def task(self) -> Task:
        return "segment"

    def __len__(self) -> int:
        return self.samples

    def read(self, index: int, box: Box) -> Image:
        mask = self._mask(index, box)
        bright = np.array((*BRIGHT[: self.classes - 1], BRIGHT[-1]), np.float32)[mask]
        noise = Synthetic(self.shape[1:], 2, self.channels, self.samples, seed=self.seed)
        return bright + np.float32(SPECKLE) * noise.read(index, box)

    def target(self, index: int, box: Box) -> Target:
        return self._mask(index, box)

    def _mask(self, index: int, box: Box) -> npt.NDArray[np.int64]:
        (top, bottom), (left, right) = spans(box, self.shape[1:])
        rows = np.arange(top, bottom, dtype=np.float64)[:, None]
        mask = np.zeros((bottom - top, right - left), np.int64)
        for boundary in self._boundaries(index):
            mask += rows >= boundary[left:right]
        return mask

    def _boundaries(self, index: int) -> npt.NDArray[np.float64]:
        """The row at which each layer but the first begins, column by column."""
        height, width = self.shape[1:]
        draw = np.random.default_rng((self.seed, index))
        thick = draw.uniform(0.5, 1.5, max(self.classes - 2, 1))
        starts = TOP + (BOTTOM - TOP) * np.concatenate(([0.0], np.cumsum(thick) / thick.sum()))
        x = np.arange(width) / width
        bend = np.zeros(width)
        for waves in (1, 2, 3):
            phase, size = draw.uniform(0, 2 * math.pi), draw.uniform(0, 0.04) / waves
            bend += size * np.sin(2 * math.pi * waves * x + phase)
        return height * (starts[: self.classes - 1, None] + bend)
