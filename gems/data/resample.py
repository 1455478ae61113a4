"""Pictures in another size, computed pixel by pixel: a box of the result needs no other pixel.

A pixel of the result covers `step` pixels of the picture along each axis. If that is one or more,
it is their mean (each weighted by how much of it is covered); if less, the line between the two
nearest. Every result is the same sum in the same order, so boxes agree to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gems.data.source import Image

Read = Callable[[tuple[int, int], tuple[int, int]], npt.NDArray[Any]]  # rows, columns: (h, w, c)


@dataclass(frozen=True, eq=False)
class Taps:
    """What some results along one axis are made of: `weights[i, t]` of pixel `first[i] + t`."""

    first: npt.NDArray[np.int64]
    weights: npt.NDArray[np.float32]

    @property
    def span(self) -> tuple[int, int]:
        """All pixels that are needed."""
        return int(self.first[0]), int(self.first[-1]) + self.weights.shape[1]

    @property
    def plain(self) -> bool:
        """Whether results are pixels as they are."""
        return self.weights.shape[1] == 1


def taps(start: float, step: float, results: tuple[int, int]) -> Taps:
    """For the results numbered `results`, where number 0 begins at `start` of the picture."""
    number = np.arange(*results)
    if step == 1 and start == round(start):
        return Taps(number + round(start), np.ones((len(number), 1), np.float32))
    if step >= 1:
        return _mean(start + number * step, start + (number + 1) * step, step)
    middle = start + (number + 0.5) * step - 0.5
    first = np.floor(middle)
    second = middle - first
    weights = np.stack([1 - second, second], axis=1).astype(np.float32)
    return Taps(first.astype(np.int64), weights)


def _mean(low: npt.NDArray[Any], high: npt.NDArray[Any], step: float) -> Taps:
    first = np.floor(low)
    count = int(np.ceil(step)) + 1
    edges = first[:, None] + np.arange(count)
    covered = np.minimum(edges + 1, high[:, None]) - np.maximum(edges, low[:, None])
    return Taps(first.astype(np.int64), (np.maximum(covered, 0) / step).astype(np.float32))


def resample(read: Read, rows: Taps, columns: Taps) -> npt.NDArray[Any]:
    """Height x width x channels, of what `read` gives: as it is, or as float32."""
    pixels = read(rows.span, columns.span)
    if rows.plain and columns.plain:
        return pixels
    tall = _sum(pixels.astype(np.float32), rows)
    return _sum(tall.swapaxes(0, 1), columns).swapaxes(0, 1)


def _sum(pixels: Image, taps: Taps) -> Image:
    first = taps.first - taps.first[0]
    total = np.zeros((len(first), *pixels.shape[1:]), np.float32)
    for tap in range(taps.weights.shape[1]):
        total += pixels[first + tap] * taps.weights[:, tap, None, None]
    return total


def inside(pixels: npt.NDArray[Any]) -> Read:
    """Reads a picture in memory; beyond its edges, the edge goes on."""

    def read(rows: tuple[int, int], columns: tuple[int, int]) -> npt.NDArray[Any]:
        sides = zip((rows, columns), pixels.shape[:2], strict=True)
        near = (np.clip(np.arange(*span), 0, side - 1) for span, side in sides)
        return pixels[np.ix_(*near)]

    return read
