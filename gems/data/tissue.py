"""Where on a slide there is tissue: glass is grey, stains are not."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gems.data.extras import extra

LEAST = 0.03  # saturation: below it all is glass, whatever the histogram looks like
WINDOW = 5  # pixels over which saturation is averaged: pale fibres between nuclei count as tissue


def tissue(thumbnail: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    """Which pixels of a picture (height x width x 3) are more colourful than Otsu's threshold."""
    saturation = extra("skimage.color").rgb2hsv(thumbnail)[..., 1]
    smooth = extra("scipy.ndimage").uniform_filter(saturation, WINDOW, mode="nearest")
    return smooth > max(extra("skimage.filters").threshold_otsu(smooth), LEAST)


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
