"""Pictures that are decoded whole: PNG, JPEG, TIFF without tiles."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gems.data.extras import extra
from gems.data.rasters.core import WHITE, Pixels, Span, blank, paste, pyramid
from gems.errors import GemsError, short


class Picture:
    """A picture in memory."""

    mpp: float | None = None
    power: float | None = None

    def __init__(self, path: Path) -> None:
        self._pixels = decoded(path, "RGB")
        self.levels = pyramid([(self._pixels.shape[0], self._pixels.shape[1])])

    def read(self, level: int, rows: Span, columns: Span) -> Pixels:
        out = blank(rows, columns, self._pixels.shape[2], self._pixels.dtype, WHITE)
        (height, width) = self._pixels.shape[:2]
        top, left = min(max(rows[0], 0), height), min(max(columns[0], 0), width)
        part = self._pixels[top : max(rows[1], 0), left : max(columns[1], 0)]
        paste(out, (top - rows[0], left - columns[0]), part)
        return out


def decoded(path: Path, mode: str | None) -> Pixels:
    """Height x width x channels of a picture, converted to a mode of Pillow or as it is."""
    Image = extra("PIL.Image")
    try:
        with Image.open(path) as picture:
            pixels = np.asarray(picture if mode is None else picture.convert(mode))
    except Image.DecompressionBombError as error:
        raise GemsError(
            f"{path} is too large to decode whole ({error}); save it as a tiled TIFF"
        ) from error
    except MemoryError as error:
        raise GemsError(f"{path} is too large to decode whole; save it as a tiled TIFF") from error
    except Exception as error:  # of a decoder, one of many: damaged files raise anything
        why = f"{type(error).__name__}: {short(error, 200)}"
        raise GemsError(f"{path} cannot be read as a picture: {why}") from error
    if pixels.ndim not in (2, 3) or not pixels.size:
        raise GemsError(f"{path} is no picture: it has the shape {pixels.shape}")
    return pixels[:, :, None] if pixels.ndim == 2 else pixels
