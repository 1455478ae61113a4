"""Tiled TIFF, decoded tile by tile: three times as fast as OpenSlide, with the same pixels."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np

from gems.data.extras import extra
from gems.data.rasters.blocks import Blocks, assemble
from gems.data.rasters.core import WHITE, Damaged, Pixels, Span, pyramid
from gems.errors import GemsError

PLAIN = {1, 5, 7, 8, 32946}  # none, LZW, JPEG, deflate twice: what has one meaning everywhere
LARGEST = 256 << 20  # bytes of a tile; scanners write some kilobytes
MOST_PAGES = 1000
MICRONS = {2: 25_400.0, 3: 10_000.0}  # per unit of resolution: inch, centimetre


class Tiff:
    """The tiled pages of a TIFF that are the same picture in several sizes.

    Raises `GemsError` if tifffile cannot give what OpenSlide would: other compressions, several
    planes. A tile without bytes is all `fill`, as GDAL's sparse files have them. A mask may have
    one channel and any type of whole numbers.
    """

    def __init__(self, path: Path, fill: int = WHITE, colours: tuple[int, ...] = (3,)) -> None:
        tifffile = extra("tifffile")
        self.path, self._fill = path, fill
        try:
            self._file = tifffile.TiffFile(path)
            self._pages = _levels(self._file, colours)
            self.levels = pyramid([(p.imagelength, p.imagewidth) for p in self._pages])
            self.mpp, self.power = _scale(self._file)
        except GemsError:
            raise
        except (
            Exception
        ) as error:  # tifffile takes tags as they come: a damaged one raises anything
            raise GemsError(f"{path} is no TIFF: {type(error).__name__}: {error}") from error
        self._blocks = Blocks()

    def read(self, level: int, rows: Span, columns: Span) -> Pixels:
        page = self._pages[level]
        across = -(-page.imagewidth // page.tilewidth)

        def block(row: int, column: int) -> Pixels:
            number = row * across + column
            return self._blocks.get((level, number), lambda: self._decode(page, number))

        size, extent = (page.tilelength, page.tilewidth), self.levels[level].shape
        kind = page.samplesperpixel, page.dtype, self._fill
        return assemble(block, size, extent, rows, columns, *kind)

    def _decode(self, page: Any, number: int) -> Pixels:
        # pread keeps no position, so threads do not disturb each other.
        offset, count = page.dataoffsets[number], page.databytecounts[number]
        if count == 0:
            shape = page.tilelength, page.tilewidth, page.samplesperpixel
            return np.broadcast_to(np.array(self._fill, page.dtype), shape)
        encoded = os.pread(self._file.filehandle.fileno(), count, offset)
        if len(encoded) < count:
            raise GemsError(
                f"{self.path} ends at tile {number} of the level {page.imagewidth} x "
                f"{page.imagelength}: the file is truncated; copy it again"
            )
        try:
            tables = {"jpegtables": page.jpegtables, "jpegheader": page.jpegheader}
            pixels = page.decode(encoded, number, **(tables if page.compression == 7 else {}))[0]
        except Exception as error:  # of a decoder, one of many
            raise GemsError(f"{self.path}: tile {number} cannot be decoded: {error}") from error
        if pixels is None:
            raise GemsError(f"{self.path}: tile {number} is empty")
        if pixels.ndim != 4 or pixels.shape[3] != page.samplesperpixel:
            raise GemsError(f"{self.path}: tile {number} is {pixels.shape}; the file is damaged")
        return pixels[0]


def _levels(file: Any, colours: tuple[int, ...]) -> list[Any]:
    """Tiled pages with the proportions of the first: inside of it (OME) or after it."""
    first = file.pages[0]
    if len(file.pages) > MOST_PAGES:
        raise GemsError(f"{file.filename} has {len(file.pages)} pages; slides have a few")
    vendor = next(
        (n for n in ("ndpi", "philips", "scn", "bif", "qpi") if getattr(file, f"is_{n}")), None
    )
    if vendor is not None:
        raise GemsError(f"{file.filename} is a TIFF of {vendor}, which OpenSlide knows better")
    if min(first.imagewidth, first.imagelength) < 1:
        raise GemsError(f"{file.filename} has {first.imagewidth} x {first.imagelength} pixels")
    ratio, found = first.imagewidth / first.imagelength, [first]
    for page in (*(first.pages or ()), *file.pages[1:]):
        if min(page.imagewidth, page.imagelength) < 1:
            continue
        alike = page.is_tiled and abs(page.imagewidth / page.imagelength / ratio - 1) < 0.01
        if alike and page.imagewidth < found[-1].imagewidth:
            found.append(page)
    if wrong := [problem for page in found for problem in _problems(page, colours)]:
        raise GemsError(f"{file.filename}: {wrong[0]}")
    _check_length(file, found)
    return found


def _check_length(file: Any, pages: list[Any]) -> None:
    wanted = max(int(np.add(p.dataoffsets, p.databytecounts).max()) for p in pages)
    if file.filehandle.size < wanted:
        raise Damaged(
            f"{file.filehandle.path} has {file.filehandle.size} bytes and should have {wanted}: it "
            "is truncated; copy it again"
        )


def _problems(page: Any, colours: tuple[int, ...]) -> list[str]:
    name = f"the page of {page.imagewidth} x {page.imagelength}"
    if not page.is_tiled or page.imagedepth != 1 or page.dtype is None:
        return [f"{name} is not tiled"]
    if not _is_count(page.tilewidth) or not _is_count(page.tilelength):
        return [f"{name} has tiles of {page.tilewidth} x {page.tilelength} pixels"]
    found = []
    across, down = -(-page.imagewidth // page.tilewidth), -(-page.imagelength // page.tilelength)
    places = len(page.dataoffsets), len(page.databytecounts)
    if places != (across * down,) * 2:
        found.append(f"{name} has {across * down} tiles, and places of {places[0]}")
    held = page.tilewidth * page.tilelength * page.samplesperpixel * page.dtype.itemsize
    if held > LARGEST:  # a few bytes can be the code of as many zeros as one likes
        found.append(f"{name} has tiles of {held} bytes, more than {LARGEST}")
    if page.samplesperpixel not in colours or (page.samplesperpixel > 1 and page.planarconfig != 1):
        found.append(f"{name} has {page.samplesperpixel} channels, or planes of them")
    if page.dtype.kind != "u" or (max(colours) > 1 and page.dtype.itemsize != 1):
        found.append(f"{name} is {page.dtype}, not whole numbers of 8 bits")
    if page.compression not in PLAIN:
        found.append(f"{name} is compressed by {page.compression!r}")
    elif page.compression != 1 and not _decodes(page.compression):
        found.append(f"{name} is compressed by {page.compression!r}: `pip install imagecodecs`")
    if max(page.databytecounts, default=0) == 0:
        found.append(f"{name} lacks all tiles")
    return found


def _is_count(x: object) -> bool:
    return isinstance(x, int) and 1 <= x < 2**31


def _decodes(compression: int) -> bool:
    try:
        extra("tifffile").TIFF.DECOMPRESSORS[compression]
    except KeyError:
        return False
    return True


def _scale(file: Any) -> tuple[float | None, float | None]:
    """Microns per pixel and power of the objective, where the file tells."""
    page = file.pages[0]
    if file.is_svs:
        found = dict(re.findall(r"\|\s*(MPP|AppMag)\s*=\s*([\d.]+)", page.description))
        return tuple(float(found[k]) if k in found else None for k in ("MPP", "AppMag"))  # type: ignore[return-value]
    tags = page.tags
    if "XResolution" not in tags or "ResolutionUnit" not in tags:
        return None, None
    (above, below), unit = tags["XResolution"].value, int(tags["ResolutionUnit"].value)
    if unit not in MICRONS or not above or not below:
        return None, None
    return MICRONS[unit] * below / above, None
