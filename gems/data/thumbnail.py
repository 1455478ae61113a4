"""A slide made small enough to look at as a whole, never held in its full size."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt

from gems.data.rasters.core import Raster
from gems.data.resample import resample, taps

SIDE = 1024
PIECE = 2048  # pixels of the slide along each axis that are in memory at a time


def thumbnail(raster: Raster, side: int = SIDE) -> npt.NDArray[np.uint8]:
    """Height x width x 3 with the longer side at most `side`, each pixel the mean of its area."""
    enough = [i for i, level in enumerate(raster.levels) if max(level.shape) >= side]
    number = enough[-1] if enough else 0
    height, width = raster.levels[number].shape
    step = max(1.0, max(height, width) / side)
    tall, wide = max(1, int(height / step)), max(1, int(width / step))
    out = np.empty((tall, wide, 3), np.uint8)
    block = max(1, int(PIECE / step))
    for top, left in itertools.product(range(0, tall, block), range(0, wide, block)):
        rows, columns = (top, min(top + block, tall)), (left, min(left + block, wide))
        part = resample(
            lambda r, c: raster.read(number, r, c), taps(0, step, rows), taps(0, step, columns)
        )
        out[slice(*rows), slice(*columns)] = np.rint(part)
    return out
