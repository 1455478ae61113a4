"""A large slide of real tissue: pyramidal, tiled, JPEG, made without ever being in memory.

The tissue of scikit-image's wheel (512 x 512) and its mirror images lie side by side, every copy a
little brighter or darker, so that no two tiles of the file are the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gems.data.pictures import read_picture
from gems.data.sample import MPP, halved

TILE = 256
Pixels = npt.NDArray[np.uint8]


def slide(path: Path, side: int) -> Path:
    """A slide of `side` squared pixels at `path`; an existing one is taken as it is."""
    import imagecodecs
    import tifffile

    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    made = path.with_name(f".{path.name}")
    pattern, scale = _pattern(), 1
    with tifffile.TiffWriter(made, bigtiff=True) as file:
        while True:
            extent = side // scale
            file.write(
                (imagecodecs.jpeg_encode(t, level=85) for t in _tiles(pattern, extent)),
                shape=(extent, extent, 3),
                dtype=np.uint8,
                tile=(TILE, TILE),
                photometric="ycbcr",
                subsampling=(2, 2),
                compression="jpeg",
                resolution=(1e4 / (MPP * scale),) * 2,
                resolutionunit="CENTIMETER",
                subfiletype=int(scale > 1),
                metadata=None,
            )
            if extent < 4 * TILE:
                break
            pattern, scale = halved(pattern), 2 * scale
    return made.rename(path)


def _pattern() -> Pixels:
    """1024 x 1024 pixels that go on seamlessly in both directions."""
    picture = read_picture("ihc.png")
    wide = np.concatenate([picture, picture[:, ::-1]], axis=1)
    return np.concatenate([wide, wide[::-1]])


def _tiles(pattern: Pixels, extent: int) -> Iterator[Pixels]:
    """The tiles of a level, row by row."""
    across, size = -(-extent // TILE), len(pattern)
    for number in range(across * across):
        row, column = divmod(number, across)
        rows, columns = (np.arange(i * TILE, (i + 1) * TILE) % size for i in (row, column))
        shade = number % 17 - 8
        yield np.clip(pattern[np.ix_(rows, columns)].astype(np.int16) + shade, 0, 255).astype(
            np.uint8
        )
