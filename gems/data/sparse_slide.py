"""A generated slide as large as those of scanners, whose glass takes no space on disk."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gems.data.extras import extra
from gems.data.rasters.core import WHITE, Pixels
from gems.files import in_one_move, write

NAMES = ("normal", "tumour")
GLASS, NORMAL, TUMOUR = 0, 1, 2
MPP = 0.25  # microns per pixel: 40x
ISLANDS = 4
RADIUS = 0.04  # of an island, of the side of the slide
CELL = 8  # pixels of a nucleus
BLOCK = 512  # pixels of a tile of the file
COLOURS = np.array([[WHITE] * 3, [232, 180, 205], [196, 136, 190]], np.uint8)  # between nuclei
NUCLEUS = np.array([96, 62, 144], np.uint8)
NUCLEI = np.array([0.0, 0.12, 0.5])  # share of cells
MIX = np.uint64(0x9E3779B97F4A7C15)  # an odd number without a pattern

Points = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SparseSlide:
    """Where the slide and the labels of its tiles lie."""

    slide: Path
    labels: Path
    tile: int
    names: tuple[str, ...] = NAMES


@dataclass(frozen=True)
class Island:
    """Tissue around a place, its rim bent by waves; a part of it is tumour."""

    y: float
    x: float
    radius: float
    phase: float

    @property
    def reach(self) -> float:
        """No tissue is farther away."""
        return 1.2 * self.radius

    def classes(self, rows: Points, columns: Points) -> npt.NDArray[np.int8]:
        """At each crossing of rows and columns."""
        y, x = (rows - self.y)[:, None], columns - self.x
        rim = 1 + 0.2 * np.sin(3 * np.arctan2(y, x) + self.phase)
        inside = np.hypot(y, x) < self.radius * rim
        away = np.hypot(y - 0.4 * self.radius * math.sin(self.phase),
                        x - 0.4 * self.radius * math.cos(self.phase))  # fmt: skip
        return np.where(inside, np.where(away < 0.55 * self.radius, TUMOUR, NORMAL), GLASS).astype(
            np.int8
        )


def sparse_slide(
    folder: str | Path, side: int = 100_000, tile: int = 512, seed: int = 0
) -> SparseSlide:
    """Write a pyramidal TIFF of `side` x `side` pixels, and the labels of those of its tiles that
    are tissue in the middle. What is there already is left as it is, and nothing is ever held
    whole.

    Tiles of the file that are glass have no bytes, as GDAL's sparse files. Coarser levels take one
    pixel of each 4 x 4.
    """
    if side < 4 * BLOCK or tile < 1:
        raise ValueError(f"side is {side} and tile {tile}; take a side of {4 * BLOCK} or more")
    folder, islands = Path(folder), _islands(side, seed)
    name = f"sparse-{side}-{seed}"
    found = SparseSlide(folder / f"{name}.tif", folder / f"{name}-{tile}.csv", tile)
    if not found.slide.exists():
        with in_one_move(found.slide) as path:
            _write(path, side, islands)
    if not found.labels.exists():
        write(found.labels, "\n".join(("slide,x,y,label", *_labels(name, side, tile, islands), "")))
    return found


def _islands(side: int, seed: int) -> list[Island]:
    """One in each quarter, so that none overlap."""
    draw, found = np.random.default_rng(seed), []
    for quarter in range(ISLANDS):
        y, x = ((q + draw.uniform(0.3, 0.7)) * side / 2 for q in divmod(quarter, 2))
        radius = side * RADIUS * draw.uniform(0.8, 1.2)
        found.append(Island(y, x, radius, draw.uniform(0, 2 * math.pi)))
    return found


def _near(islands: list[Island], y: int, x: int, size: int) -> list[Island]:
    """Those that may reach into a square."""
    return [
        i
        for i in islands
        if y - i.reach < i.y < y + size + i.reach and x - i.reach < i.x < x + size + i.reach
    ]


def _classes(islands: list[Island], rows: Points, columns: Points) -> npt.NDArray[np.int8]:
    found = np.zeros((len(rows), len(columns)), np.int8)
    for island in islands:
        found = np.maximum(found, island.classes(rows, columns))
    return found


def _pixels(islands: list[Island], rows: Points, columns: Points) -> Pixels | None:
    """Colours, or None if all is glass. All pixels of a cell are alike."""
    (y, row), (x, column) = (np.unique(at // CELL, return_inverse=True) for at in (rows, columns))
    kinds = _classes(islands, CELL * y + CELL // 2, CELL * x + CELL // 2)
    if not kinds.any():
        return None
    # A number of each cell, from 0 to 1, wherever it is asked for.
    bits = (y.astype(np.uint64)[:, None] << np.uint64(32)) + x.astype(np.uint64)
    for shift in (31, 29):
        bits = (bits ^ (bits >> np.uint64(shift))) * MIX
    chance = (bits >> np.uint64(40)).astype(np.float64) / 2.0**24
    colours = COLOURS[kinds]
    colours[chance < NUCLEI[kinds]] = NUCLEUS
    return colours[row[:, None], column]


def _tiles(side: int, step: int, islands: list[Island]) -> Iterator[Pixels | None]:
    """Of one level, row by row; None where there is glass alone, but for the first, by which
    tifffile knows what they are."""
    starts = range(0, -(-side // step), BLOCK)
    for top, left in itertools.product(starts, starts):
        near = _near(islands, top * step, left * step, BLOCK * step)
        rows, columns = (step * np.arange(at, at + BLOCK) + step // 2 for at in (top, left))
        found = _pixels(near, rows, columns) if near else None
        if found is None and top == left == 0:
            found = np.full((BLOCK, BLOCK, 3), WHITE, np.uint8)
        yield found


def _write(path: Path, side: int, islands: list[Island]) -> None:
    with extra("tifffile").TiffWriter(path, bigtiff=True) as file:
        step = 1
        while step == 1 or side // step >= 2 * BLOCK:
            length = -(-side // step)
            file.write(
                _tiles(side, step, islands),
                shape=(length, length, 3),
                dtype=np.uint8,
                tile=(BLOCK, BLOCK),
                photometric="rgb",
                compression="zlib",
                compressionargs={"level": 1},
                resolution=(1e4 / (MPP * step),) * 2,
                resolutionunit="CENTIMETER",
                subfiletype=0 if step == 1 else 1,
                metadata=None,
            )
            step *= 4


def _labels(name: str, side: int, tile: int, islands: list[Island]) -> Iterator[str]:
    """A tile is what its middle is."""
    places = np.arange(0, side - tile + 1, tile)
    for y in places.tolist():
        rows = np.array([y + tile // 2])
        kinds = _classes(_near(islands, y, 0, side), rows, places + tile // 2)[0]
        for x, kind in zip(places.tolist(), kinds.tolist(), strict=True):
            if kind != GLASS:
                yield f"{name},{x},{y},{NAMES[kind - 1]}"
