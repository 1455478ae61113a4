"""What every reader of pixels offers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from gems.errors import GemsError

Pixels: TypeAlias = npt.NDArray[Any]  # height x width x channels
Span: TypeAlias = tuple[int, int]
WHITE = 255


@dataclass(frozen=True)
class Level:
    """One size of a picture: height and width, and how many pixels of the largest one pixel is."""

    shape: tuple[int, int]
    downsample: float


class Damaged(GemsError):
    """A file that another reader would not read any better."""


class Raster(Protocol):
    """An open file of pixels. Threads may read one at the same time."""

    levels: tuple[Level, ...]  # the largest first
    mpp: float | None  # microns per pixel of the largest
    power: float | None  # of the objective

    def read(self, level: int, rows: Span, columns: Span) -> Pixels:
        """A region of a level, uint8; white beyond its edges."""
        ...


def pyramid(shapes: list[tuple[int, int]]) -> tuple[Level, ...]:
    """Levels of these heights and widths, by OpenSlide's rule: the mean of both ratios."""
    height, width = shapes[0]
    return tuple(Level((h, w), (height / h + width / w) / 2) for h, w in shapes)


def paste(out: Pixels, at: tuple[int, int], part: Pixels) -> None:
    """Put `part`, whose corner lies at row and column `at` of `out`, where the two overlap."""
    (top, left), (height, width) = at, part.shape[:2]
    rows = slice(max(top, 0), min(top + height, out.shape[0]))
    columns = slice(max(left, 0), min(left + width, out.shape[1]))
    if rows.start < rows.stop and columns.start < columns.stop:
        out[rows, columns] = part[
            rows.start - top : rows.stop - top, columns.start - left : columns.stop - left
        ]


def blank(rows: Span, columns: Span, channels: int, dtype: Any, fill: int) -> Pixels:
    return np.full((rows[1] - rows[0], columns[1] - columns[0], channels), fill, dtype)
