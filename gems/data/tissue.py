"""Where on a slide there is tissue: glass is grey, stains are not."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

LEAST = 0.03  # saturation: below it all is glass, whatever the histogram looks like


def tissue(thumbnail: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    """Which pixels of a picture (height x width x 3) are more colourful than Otsu's threshold."""
    colour = _smooth(saturation(thumbnail))
    return colour > max(otsu(colour), LEAST)


def saturation(pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """0 for grey, 1 for pure colours, as in HSV."""
    high = pixels.max(axis=2).astype(np.float32)
    return (high - pixels.min(axis=2)) / np.maximum(high, 1)


def _smooth(values: npt.NDArray[np.float32], reach: int = 2) -> npt.NDArray[np.float32]:
    """The mean of the pixels around each, so that pale fibres between nuclei count as tissue."""
    width = 2 * reach + 1
    for axis in (0, 1):
        padded = np.pad(values, [(reach, reach) if a == axis else (0, 0) for a in (0, 1)], "edge")
        parts = [np.take(padded, range(i, i + values.shape[axis]), axis) for i in range(width)]
        values = np.stack(parts).mean(axis=0)
    return values


def otsu(values: npt.NDArray[Any], bins: int = 256) -> float:
    """The threshold between two classes of values that differ most (Otsu 1979).

    It maximises w0 w1 (m0 - m1)^2, of shares w and means m; the middle where several do.
    """
    count, edges = np.histogram(values, bins)
    middle = (edges[:-1] + edges[1:]) / 2
    below = np.cumsum(count)
    above = below[-1] - below
    total = np.cumsum(count * middle)
    with np.errstate(divide="ignore", invalid="ignore"):
        apart = below * above * (total / below - (total[-1] - total) / above) ** 2
    apart = np.nan_to_num(apart[:-1])
    best = np.flatnonzero(apart >= apart.max() * (1 - 1e-12))
    return float((edges[1 + best[0]] + edges[1 + best[-1]]) / 2)


def shares(
    mask: npt.NDArray[np.bool_],
    corners: npt.NDArray[np.float64],
    size: tuple[float, float],
) -> npt.NDArray[np.float64]:
    """How much of each rectangle is tissue. Corners are (row, column), in pixels of the mask."""
    sums = np.zeros((mask.shape[0] + 1, mask.shape[1] + 1))
    sums[1:, 1:] = mask.cumsum(0).cumsum(1)
    first = np.floor(corners).astype(np.int64)
    last = np.maximum(np.ceil(corners + size).astype(np.int64), first + 1)
    area = np.prod(last - first, axis=1)  # with what lies beyond the slide, where there is none
    (top, left), (bottom, right) = (
        (np.clip(c[:, 0], 0, mask.shape[0]), np.clip(c[:, 1], 0, mask.shape[1]))
        for c in (first, last)
    )
    inside = sums[bottom, right] - sums[top, right] - sums[bottom, left] + sums[top, left]
    return inside / area
