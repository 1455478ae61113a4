"""Colours as numbers that networks like."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gems.data.source import Image


@dataclass(frozen=True)
class Normal:
    """Mean and deviation of each channel, as shares of full brightness.

    The default is ImageNet's, which pretrained networks and the tools of pathology take.
    """

    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    deviation: tuple[float, ...] = (0.229, 0.224, 0.225)

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.deviation) or min(self.deviation, default=0) <= 0:
            raise ValueError(
                f"mean {self.mean} and deviation {self.deviation}: give one of each per channel, "
                "deviations above 0"
            )

    def image(self, pixels: npt.NDArray[Any]) -> Image:
        """Height x width x channels, 0 to 255, as channels x height x width."""
        factor = 1 / (255 * np.asarray(self.deviation))
        shift = -np.asarray(self.mean) / np.asarray(self.deviation)
        out = np.empty((len(self.mean), *pixels.shape[:2]), np.float32)
        for channel in range(len(out)):
            np.multiply(pixels[..., channel], np.float32(factor[channel]), out=out[channel])
            out[channel] += np.float32(shift[channel])
        return out
