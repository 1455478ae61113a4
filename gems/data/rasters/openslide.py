"""Slides of all vendors, by OpenSlide."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np

from gems.data.extras import extra
from gems.data.rasters.blocks import Blocks, assemble
from gems.data.rasters.core import WHITE, Level, Pixels, Span
from gems.errors import GemsError

BLOCK = 256
CACHE = 64 << 20  # bytes, shared by all slides: OpenSlide would give each its own


@functools.cache
def _cache() -> Any:
    return extra("openslide").OpenSlideCache(CACHE)


class Slide:
    """A slide of any format that OpenSlide knows."""

    def __init__(self, path: Path) -> None:
        openslide = extra("openslide")
        self.path = path
        try:
            self._slide = openslide.OpenSlide(path)
        except (openslide.OpenSlideError, OSError) as error:
            raise GemsError(f"OpenSlide cannot read {path}: {error or 'unknown format'}") from error
        self._slide.set_cache(_cache())
        sizes = zip(self._slide.level_dimensions, self._slide.level_downsamples, strict=True)
        self.levels = tuple(Level((h, w), float(d)) for (w, h), d in sizes)
        properties = self._slide.properties
        self.mpp = _number(properties.get(openslide.PROPERTY_NAME_MPP_X))
        self.power = _number(properties.get(openslide.PROPERTY_NAME_OBJECTIVE_POWER))
        colour = properties.get(openslide.PROPERTY_NAME_BACKGROUND_COLOR, "FFFFFF")
        try:
            self._background = np.frombuffer(bytes.fromhex(colour), np.uint8).reshape(3)
        except ValueError:
            self._background = np.full(3, WHITE, np.uint8)
        if not self.levels or any(min(x.shape) < 1 for x in self.levels):
            raise GemsError(f"{path} has no pixels")
        self._blocks = Blocks()

    def read(self, level: int, rows: Span, columns: Span) -> Pixels:
        # A place is given in pixels of the largest level. Where those are no whole multiple, it
        # falls between two pixels and OpenSlide blends them: then only blocks at fixed places are
        # read, or a region would depend on where it begins.
        shape, downsample = self.levels[level].shape, self.levels[level].downsample
        if downsample == round(downsample):
            return self._region(level, (rows[0], columns[0]), (rows[1], columns[1]))

        def block(row: int, column: int) -> Pixels:
            corner = row * BLOCK, column * BLOCK
            end = corner[0] + BLOCK, corner[1] + BLOCK
            return self._blocks.get((level, *corner), lambda: self._region(level, corner, end))

        return assemble(block, (BLOCK, BLOCK), shape, rows, columns, 3, np.uint8, WHITE)

    def _region(self, level: int, corner: tuple[int, int], end: tuple[int, int]) -> Pixels:
        downsample = self.levels[level].downsample
        place = tuple(round(x * downsample) for x in reversed(corner))
        size = (end[1] - corner[1], end[0] - corner[0])
        try:
            pixels = np.asarray(self._slide.read_region(place, level, size))
        except extra("openslide").OpenSlideError as error:
            raise GemsError(
                f"{self.path} is damaged: level {level} at {place} cannot be read: {error}"
            ) from error
        if pixels[..., 3].min(initial=255) == 255:
            return pixels[..., :3]
        # Where the scanner saw nothing there is no colour: white, or the file's background colour.
        alpha = pixels[..., 3:].astype(np.uint16)
        mixed = pixels[..., :3] * alpha + self._background * (255 - alpha)
        return (mixed // 255).astype(np.uint8)


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return None
