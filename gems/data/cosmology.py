"""Generated cubes of matter with the four numbers of the universe they came from, to regress."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from gems.data.source import Box, Image, Target, Task, shape_of, spans

NAMES = ("omega_m", "sigma_8", "n_s", "h")
WAVES = 16  # of a cube
LONGEST, SHORTEST = 1.0, 8.0  # waves along a side


@dataclass(frozen=True)
class Cosmology:
    """A mean density and cosine waves in three dims. The numbers, within -1 and 1, set what can
    be measured again: the mean, the height of all waves, how much lower short ones are, and how
    waves grow from channel to channel (CosmoFlow's channels are times).

    Any box can be made without the rest.
    """

    image_size: int | tuple[int, ...] = 128
    channels: int = 4
    samples: int = 1024
    seed: int = 0

    def __post_init__(self) -> None:
        if min(*self.shape, self.samples) < 1 or len(self.shape) != 4:
            raise ValueError(
                f"image_size {self.image_size}, channels {self.channels} and samples "
                f"{self.samples} must all be 1 or more, and a cube has three sides"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        return shape_of(self.channels, self.image_size, dims=3)

    @property
    def classes(self) -> int:
        """How many numbers there are."""
        return len(NAMES)

    @property
    def names(self) -> tuple[str, ...]:
        return NAMES

    @property
    def task(self) -> Task:
        return "regress"

    def __len__(self) -> int:
        return self.samples

    def read(self, index: int, box: Box) -> Image:
        found = spans(box, self.shape[1:])
        mean, height, tilt, growth = (float(x) for x in self.target(index, box))
        waves = np.zeros([b - a for a, b in found], np.float32)
        for length, sides in zip(*self._waves(index), strict=True):
            depth, rows, columns = (x[a:b] for x, (a, b) in zip(sides, found, strict=True))
            size = np.float32(math.exp(0.5 * height) * length ** (tilt - 1))
            # The same order in every box: whatever box is asked for, cells have the same bits.
            waves += (depth[:, None, None] * size) * (rows[:, None] * columns)
        late = np.arange(self.channels, dtype=np.float32) / np.float32(max(self.channels - 1, 1))
        scale = (1 + np.float32(0.5 * growth) * late).astype(np.float32)
        return waves * scale[:, None, None, None] + np.float32(0.5 * mean)

    def target(self, index: int, box: Box) -> Target:
        return self._draw(index).uniform(-1, 1, len(NAMES)).astype(np.float32)

    def _draw(self, index: int) -> np.random.Generator:
        return np.random.default_rng((self.seed, index))

    def _waves(self, index: int) -> tuple[list[float], list[list[npt.NDArray[np.float32]]]]:
        return _cosine_waves(self.seed, index, self.shape[1:])


@lru_cache(8)
def _cosine_waves(
    seed: int, index: int, sides: tuple[int, ...]
) -> tuple[list[float], list[list[npt.NDArray[np.float32]]]]:
    """Waves per side of each wave, as one number, and its factor along each side."""
    draw = np.random.default_rng((seed, index, WAVES))
    lengths, factors = [], []
    for _ in range(WAVES):
        counts = draw.uniform(LONGEST, SHORTEST, len(sides))
        phases = draw.uniform(0, 2 * math.pi, len(sides))
        lengths.append(float(np.sqrt(np.mean(counts**2))))
        factors.append(
            [
                np.cos(2 * math.pi * count * np.arange(n) / n + phase).astype(np.float32)
                for n, count, phase in zip(sides, counts, phases, strict=True)
            ]
        )
    return lengths, factors
