"""Masks of slides: pictures of class numbers, as large as the slide or smaller."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from gems.data.rasters.core import Pixels, Span
from gems.data.rasters.opening import PICTURES, TIFFS
from gems.data.rasters.plain import decoded
from gems.data.rasters.tiff import Tiff
from gems.data.source import Target
from gems.errors import GemsError

Places: TypeAlias = npt.NDArray[np.float64]


class Mask:
    """One class number per pixel. A tiled TIFF is read region by region, all else whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tiff = self._pixels = None
        try:
            if path.suffix.lower() not in TIFFS:
                raise GemsError(f"{path} is no TIFF")
            self._tiff = Tiff(path, fill=0, colours=(1,))
        except GemsError:
            self._pixels = decoded(path, None)
            if self._pixels.shape[2] != 1:
                raise GemsError(
                    f"{path} has {self._pixels.shape[2]} channels; a mask has one, of class numbers"
                ) from None

    @property
    def shape(self) -> tuple[int, int]:
        if self._tiff is not None:
            return self._tiff.levels[0].shape
        assert self._pixels is not None
        return self._pixels.shape[0], self._pixels.shape[1]

    def at(self, rows: Places, columns: Places, extent: tuple[int, int], classes: int) -> Target:
        """The class at points of the slide, whose height and width are `extent`; 0 beyond it.

        Points are pixels of the slide's largest level, ascending, as are the results.
        """
        height, width = self.shape
        if self._pixels is not None and self._pixels.dtype.kind not in "bui":
            raise GemsError(f"{self.path} has {self._pixels.dtype}; a mask has whole numbers")
        out = np.zeros((len(rows), len(columns)), np.int64)
        inside = [
            (points >= 0) & (points < n) for points, n in zip((rows, columns), extent, strict=True)
        ]
        y = np.floor(rows[inside[0]] * (height / extent[0])).astype(np.int64).clip(0, height - 1)
        x = np.floor(columns[inside[1]] * (width / extent[1])).astype(np.int64).clip(0, width - 1)
        if len(y) and len(x):
            part = self._read((int(y[0]), int(y[-1]) + 1), (int(x[0]), int(x[-1]) + 1))
            out[np.ix_(*inside)] = part[np.ix_(y - y[0], x - x[0])][..., 0]
        if out.size and not 0 <= out.min() <= out.max() < classes:
            raise GemsError(
                f"{self.path} has the class {out.max() if out.max() >= classes else out.min()}, "
                f"but there are {classes}: 0 to {classes - 1}"
            )
        return out

    def _read(self, rows: Span, columns: Span) -> Pixels:
        if self._tiff is not None:
            return self._tiff.read(0, rows, columns)
        assert self._pixels is not None
        return self._pixels[slice(*rows), slice(*columns)]


def mask_of(folder: Path, slide: Path) -> Path:
    """The file in `folder` that is named like the slide."""
    for ending in (*sorted(TIFFS), *sorted(PICTURES)):
        if (path := folder / f"{slide.stem}{ending}").is_file():
            return path
    raise GemsError(f"there is no mask {slide.stem}.tif or .png in {folder}")
