"""Random images of any size, for timing and for tests. Nothing can be learned from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gems.data.source import Box, Image, Target, Task, shape_of, spans

# A cell's number is a hash of the seed, the sample and its place, so that any box can be made
# without the rest. SplitMix64: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number
# generators", with the mixing constants of variant 13.
STEP, MIX, REMIX = (
    np.uint64(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
IMAGE, MASK, LABEL = 1, 2, 3  # what is drawn


@dataclass(frozen=True)
class Synthetic:
    """Noise of mean 0 and deviation 1, nearly normal, with random labels or masks.

    `image_size` is one number for a square picture, or the height and width (depth first for a
    volume).
    """

    image_size: int | tuple[int, ...] = 32
    classes: int = 10
    channels: int = 3
    samples: int = 1024
    task: Task = "classify"
    seed: int = 0

    def __post_init__(self) -> None:
        if min(*self.shape, self.classes, self.samples) < 1:
            raise ValueError(
                f"image_size {self.image_size}, classes {self.classes}, channels "
                f"{self.channels} and samples {self.samples} must all be 1 or more"
            )
        if self.task not in ("classify", "segment"):
            raise ValueError(f"task is {self.task!r}; take 'classify' or 'segment'")

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one sample: channels, then the image."""
        return shape_of(self.channels, self.image_size)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(str(i) for i in range(self.classes))

    def __len__(self) -> int:
        return self.samples

    def read(self, index: int, box: Box) -> Image:
        sides, found = self.shape[1:], spans(box, self.shape[1:])
        out = np.empty((self.channels, *(b - a for a, b in found)), np.float32)
        for channel, plane in enumerate(out):
            bits = _hash(_places(found, sides, channel * math.prod(sides)), self._key(index, IMAGE))
            plane[...] = _normal(bits)
        return out

    def target(self, index: int, box: Box) -> Target:
        if self.task == "classify":
            label = _hash(np.zeros(1, np.uint64), self._key(index, LABEL))[0]
            return np.array(label % np.uint64(self.classes), np.int64)
        sides = self.shape[1:]
        bits = _hash(_places(spans(box, sides), sides, 0), self._key(index, MASK))
        return (bits % np.uint64(self.classes)).astype(np.int64)

    def _key(self, index: int, what: int) -> np.uint64:
        words = np.random.SeedSequence((self.seed, index, what)).generate_state(1, np.uint64)
        return words[0]


def _places(
    found: Sequence[tuple[int, int]], sides: Sequence[int], first: int
) -> npt.NDArray[np.uint64]:
    """The number of each cell of a box, counted through the whole image from `first`."""
    place = np.full((1,) * len(sides), first, np.uint64)
    for dim, (start, stop) in enumerate(found):
        stride = math.prod(sides[dim + 1 :])
        shape = [-1 if d == dim else 1 for d in range(len(sides))]
        place = place + (np.arange(start, stop, dtype=np.uint64) * np.uint64(stride)).reshape(shape)
    return place


def _hash(place: npt.NDArray[np.uint64], key: np.uint64) -> npt.NDArray[np.uint64]:
    bits = place * STEP + key
    bits ^= bits >> np.uint64(30)
    bits *= MIX
    bits ^= bits >> np.uint64(27)
    bits *= REMIX
    bits ^= bits >> np.uint64(31)
    return bits


def _normal(bits: npt.NDArray[np.uint64]) -> Image:
    """The sum of four uniform numbers of 16 bits: whole numbers, so exact wherever it is."""
    total = np.zeros(bits.shape, np.float32)
    for part in range(4):
        total += ((bits >> np.uint64(16 * part)) & np.uint64(0xFFFF)).astype(np.float32)
    mean, deviation = 2 * 65535, math.sqrt(4 * (65536**2 - 1) / 12)
    return (total - np.float32(mean)) * np.float32(1 / deviation)
