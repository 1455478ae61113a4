"""How one stage is tiled over its ranks: the tiles of an image, or slices of a micro-batch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isqrt, prod

from gems.errors import PlanError, short

HALOS = ("d1", "d2")
MOST = 2**20  # ranks, stages, tiles or micro-batches: a plan with more is a slip of the pen

# What a user may write for one spatial stage, and for all of them.
Written = int | str | tuple[int, ...]
Spatial = int | str | tuple[Written, ...] | list[Written]


@dataclass(frozen=True)
class Grid:
    """`batch` slices of the micro-batch, or `tiles`: columns, (rows, columns) or with depth first.

    Cells are counted in row-major order: the last axis runs fastest.
    """

    batch: int = 1
    tiles: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.tiles and self.batch != 1:
            raise PlanError(
                f"a grid has {self.batch} slices of the batch or tiles {self.tiles}, not both"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """The grid as one tuple."""
        return self.tiles or (self.batch,)

    @property
    def size(self) -> int:
        """How many ranks it takes."""
        return prod(self.shape)

    def __str__(self) -> str:
        if self.tiles:
            return "x".join(map(str, self.tiles))
        return "whole" if self.batch == 1 else f"{self.batch} slices"


def square(cells: int) -> tuple[int, ...]:
    """The most square grid of so many cells, not higher than wide: 4 is 2x2, 8 is 2x4."""
    if cells < 1:
        return (cells, cells)  # for the plan to complain about
    rows = next(n for n in range(isqrt(cells), 0, -1) if cells % n == 0)
    return (rows, cells // rows)


LAYOUTS = {
    "square": square,
    "vertical": lambda columns: (1, columns),
    "horizontal": lambda rows: (rows, 1),
}


def tiles_of(spatial: Spatial) -> tuple[tuple[int, ...], ...]:
    """The tiles of each spatial stage: one grid if there is no list around it.

    `(2, 2)` and `"2x2"` are one stage, `[(2, 2), "1x2"]` are two; what came out goes in again.
    """
    one = isinstance(spatial, tuple) and spatial and all(isinstance(n, int) for n in spatial)
    if one or isinstance(spatial, (int, str)):
        return (_tiles(spatial),)
    return tuple(_tiles(written) for written in spatial)


def _tiles(written: object) -> tuple[int, ...]:
    tiles = _shape_of(written)
    if prod(map(abs, tiles)) > MOST:
        raise _too_many(written)
    return tiles


def _too_many(written: object) -> PlanError:
    return PlanError(f"{short(repr(written), 100)} are more than {MOST} tiles; give fewer")


def _shape_of(written: object) -> tuple[int, ...]:
    if isinstance(written, int):
        if written > MOST:
            raise _too_many(written)
        return square(written)
    if isinstance(written, str):
        return _parsed(written.strip())
    if isinstance(written, (tuple, list)) and all(isinstance(n, int) for n in written):
        return tuple(written)
    raise _unreadable(written)


def _parsed(text: str) -> tuple[int, ...]:
    """`2x2`, `2x2x2`, `4` or a named layout: `vertical:4`."""
    name, colon, cells = text.rpartition(":")
    layout = LAYOUTS.get(name if colon else "square")
    if any(len(digits) > 9 for digits in re.findall(r"\d+", text)):
        raise _too_many(text)
    if layout and cells.isdecimal():
        if int(cells) > MOST:
            raise _too_many(text)
        return layout(int(cells))
    sides = text.split("x")
    if len(sides) > 1 and all(side.isdecimal() for side in sides):
        return tuple(map(int, sides))
    raise _unreadable(text)


def _unreadable(written: object) -> PlanError:
    return PlanError(
        f"{short(repr(written), 100)} is not a grid; "
        "write rows and columns like 2x2 or (2, 2), depth before them "
        "like 2x2x2, or square:4, vertical:4, horizontal:4"
    )


# --- what cannot be carried out -----------------------------------------------------------------


def tile_problems(tiles: Sequence[tuple[int, ...]], stages: int, slices: int) -> Iterable[str]:
    """Of the tiles of the first of so many stages, and of the slices of the others."""
    if len(tiles) > stages:
        yield (
            f"spatial has {len(tiles)} grids for {stages} stages; give at most one per stage, or "
            "use more stages"
        )
    for stage, grid in enumerate(tiles):
        if not 1 <= len(grid) <= 3:
            yield (
                f"the grid of stage {stage} has {len(grid)} axes; give columns, rows and columns, "
                "or depth, rows and columns"
            )
        elif min(grid) < 1:
            shown = Grid(tiles=grid)
            yield f"the grid of stage {stage} is {shown}; every axis must have at least 1 tile"
    if slices < 1:
        yield f"local_dp is {slices}; it must be at least 1"
    if slices > 1 and len(tiles) >= stages:
        yield (
            f"local_dp={slices} slices the stages after the spatial ones, but all {stages} are "
            "spatial; leave one of the two out, or use more stages"
        )


def halo_problems(halo: str, fused_layers: int, *, spatial: bool) -> Iterable[str]:
    """Of how tiles get their edges; without spatial stages there are none to get."""
    if halo not in HALOS:
        yield f"halo {halo!r} is unknown; choose one of {', '.join(HALOS)}"
    elif halo != "d1" and not spatial:
        yield f"halo={halo!r} belongs to spatial stages that do not stream; leave it out"
    if fused_layers < 0:
        yield f"fused_layers is {fused_layers}; give 1 or more, or leave it out"
    if fused_layers > 0 and halo == "d1":
        yield f"fused_layers={fused_layers} is for halo='d2', not 'd1'; leave one of them out"


def placement_problems(groups: Sequence[tuple[int, ...]], grids: Sequence[Grid]) -> Iterable[str]:
    """Of the ranks written out for each stage."""
    for stage, (ranks, grid) in enumerate(zip(groups, grids, strict=False)):
        if len(ranks) != grid.size:
            yield (
                f"stage {stage} is cut into {grid.size} parts ({grid}) but placed on {len(ranks)} "
                f"ranks {ranks}; give one rank per part"
            )
        if len(set(ranks)) != len(ranks):
            yield f"stage {stage} is placed on ranks {ranks}; give every part a rank of its own"
