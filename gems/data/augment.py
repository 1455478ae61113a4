"""Random changes of samples that come out the same whichever box of one is read.

A change is one of the symmetries of the image (swap rows with columns, then flip some axes) and
one factor and shift per channel. To read a box of a changed sample, the box is mapped back, read,
and changed: pixels that nobody asked for are never needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gems.data.source import Box, Image, spans

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Change:
    """What happens to one sample. The image dims are the last ones of an array."""

    swap: bool
    flips: tuple[bool, ...]
    factors: tuple[float, ...]
    shift: float

    def source(self, box: Box, sides: Sequence[int]) -> Box:
        """The box of the sample as it is that becomes `box` of the changed one."""
        back = [
            slice(side - stop, side - start) if flip else slice(start, stop)
            for (start, stop), flip, side in zip(spans(box, sides), self.flips, sides, strict=True)
        ]
        if self.swap:
            back[-2:] = back[:-3:-1]
        return tuple(back)

    def turn(self, array: Array) -> Array:
        """Image or mask, turned."""
        if self.swap:
            array = array.swapaxes(-1, -2)
        first = array.ndim - len(self.flips)
        return np.flip(array, tuple(first + i for i, flip in enumerate(self.flips) if flip))

    def colour(self, image: Image) -> Image:
        """Each channel times its factor, about 0 (the mean of normalised images), and shifted."""
        factors = np.asarray(self.factors, np.float32).reshape(-1, *(1,) * (image.ndim - 1))
        return image * factors + np.float32(self.shift)


@dataclass(frozen=True)
class Augment:
    """What may happen to samples.

    `flips`: along any axis. `turns`: by quarters, where a sample is a square (together with flips,
    the eight symmetries). `colour`: contrast, and the strength of each channel as stains vary, by
    up to this share; brightness by up to this many deviations. 0 leaves colours alone.
    """

    flips: bool = True
    turns: bool = True
    colour: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.colour < 1:
            raise ValueError(f"colour is {self.colour}; take a share from 0 to below 1")

    def draw(self, shape: Sequence[int], seed: int, epoch: int, index: int) -> Change:
        """The change of one sample of `shape` in one epoch: it depends on these numbers alone."""
        rng = np.random.default_rng((seed, epoch, index))
        coins = rng.random(len(shape)) < 0.5  # one per axis, and the swap: always as many
        contrast, *channels = 1 + self.colour * rng.uniform(-1, 1, 1 + shape[0])
        shift = self.colour * rng.uniform(-1, 1)
        square = len(shape) == 3 and shape[1] == shape[2]
        swap = bool(coins[0]) and self.turns and square
        flips = tuple(bool(c) and self.flips for c in coins[1:])
        if self.turns and square and not self.flips:
            # Turns only: a half turn flips both axes, a quarter turn swaps and flips one of them.
            flips = (bool(coins[1]), bool(coins[1]) != swap)
        factors = tuple(float(contrast * c) for c in channels)
        return Change(swap, flips, factors, float(shift))
