"""Scores of a slide's tiles as maps: a picture, outlines for QuPath, and a raster of numbers."""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gems.data.extras import extra
from gems.data.rasters.core import Raster
from gems.data.rasters.opening import open_raster
from gems.data.thumbnail import thumbnail
from gems.errors import GemsError
from gems.files import in_one_move, write

Colour = tuple[int, int, int]
# Okabe and Ito 2008: distinguished by people with any kind of colour vision.
COLOURS: tuple[Colour, ...] = (
    *((0, 114, 178), (213, 94, 0), (0, 158, 115), (204, 121, 167)),
    *((240, 228, 66), (86, 180, 233), (230, 159, 0), (0, 0, 0)),
)
# From 0 to 1: the map is read between these (blue, pale, red, as weather maps are).
RAMP = np.array([[49, 54, 149], [116, 173, 209], [255, 255, 191], [244, 109, 67], [165, 0, 38]])
OPACITY = 0.5
SIDE = 2048  # longer side of the picture


@dataclass(frozen=True)
class Maps:
    """The files that were written."""

    png: Path
    geojson: Path
    ome: Path


def heat_map(
    folder: str | Path,
    slide: str | Path,
    coords: npt.ArrayLike,
    tile: int,
    scores: npt.ArrayLike,
    names: Sequence[str],
    shown: int | None = None,
) -> Maps:
    """Write the maps of one slide: `SLIDE.png`, `SLIDE.geojson` and `SLIDE.ome.tif`.

    coords    (tiles, 2): x and y of each corner, in pixels of the largest level
    tile      side of a tile in the same pixels
    scores    (tiles, classes): 0 to 1, one per name
    shown     the class whose score is painted; default: the last

    The picture lays the score over the slide. Outlines carry the best class of each tile and all
    its scores. The raster has one plane per class, one pixel per tile and NaN where there is none.
    """
    coords, scores = np.asarray(coords, np.int64), np.asarray(scores, np.float32)
    shown = len(names) - 1 if shown is None else shown
    _check(coords, scores, tile, names, shown)
    folder, slide = Path(folder), Path(slide)
    maps = Maps(*(folder / f"{slide.stem}.{end}" for end in ("png", "geojson", "ome.tif")))
    if slide.resolve() in {p.resolve() for p in (maps.png, maps.geojson, maps.ome)}:
        raise GemsError(f"a map in {folder} would replace the slide {slide}; take another folder")
    raster = open_raster(slide)
    picture = overlay(raster, coords, tile, scores[:, shown])
    planes, step = planes_of(coords, tile, scores, raster.levels[0].shape)
    outlines = json.dumps(features(slide.stem, coords, tile, scores, names))
    with in_one_move(maps.png) as path:
        extra("PIL.Image").fromarray(picture).save(path, format="png")
    write(maps.geojson, outlines)
    with in_one_move(maps.ome) as path:
        _ome(path, planes, step, raster.mpp, names)
    return maps


def overlay(
    raster: Raster, coords: npt.NDArray[np.int64], tile: int, score: npt.NDArray[np.float32]
) -> npt.NDArray[np.uint8]:
    """The slide, small, with each tile tinted by its score; where tiles overlap, by their mean."""
    picture = thumbnail(raster, SIDE)
    ratio = np.array(picture.shape[:2]) / raster.levels[0].shape
    total, count = np.zeros(picture.shape[:2]), np.zeros(picture.shape[:2])
    for (x, y), value in zip(coords.tolist(), score.tolist(), strict=True):
        place = tuple(
            slice(math.floor(at * r), max(math.ceil((at + tile) * r), math.floor(at * r) + 1))
            for at, r in zip((y, x), ratio, strict=True)
        )
        total[place] += value
        count[place] += 1
    tinted = count > 0
    tint = ramp(total[tinted] / count[tinted])
    out = picture.copy()
    out[tinted] = np.rint((1 - OPACITY) * picture[tinted] + OPACITY * tint)
    return out


def ramp(score: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Red, green and blue of scores from 0 to 1."""
    at = np.clip(score, 0, 1) * (len(RAMP) - 1)
    return np.stack([np.interp(at, np.arange(len(RAMP)), RAMP[:, c]) for c in range(3)], axis=-1)


def features(
    name: str,
    coords: npt.NDArray[np.int64],
    tile: int,
    scores: npt.NDArray[np.float32],
    names: Sequence[str],
) -> dict[str, Any]:
    """GeoJSON as QuPath reads it: one tile object per tile, in pixels of the largest level."""

    def feature(x: int, y: int, row: list[float]) -> dict[str, Any]:
        best = int(np.argmax(row))
        ring = [[x, y], [x + tile, y], [x + tile, y + tile], [x, y + tile], [x, y]]
        return {
            "type": "Feature",
            "id": str(uuid.uuid5(uuid.NAMESPACE_URL, f"{name}/{x}/{y}")),
            "geometry": {"type": "Polygon", "coordinates": [ring]},
            "properties": {
                "objectType": "tile",
                "classification": {"name": names[best], "color": COLOURS[best % len(COLOURS)]},
                "measurements": dict(zip(names, (round(v, 6) for v in row), strict=True)),
                "isLocked": False,
            },
        }

    rows = zip(coords.tolist(), scores.tolist(), strict=True)
    return {"type": "FeatureCollection", "features": [feature(x, y, row) for (x, y), row in rows]}


def planes_of(
    coords: npt.NDArray[np.int64],
    tile: int,
    scores: npt.NDArray[np.float32],
    extent: tuple[int, int],
) -> tuple[npt.NDArray[np.float32], float]:
    """Scores as (classes, rows, columns) over the whole slide, and a pixel's side on the slide.

    The pixel is as large as the steps between tiles: smaller than a tile where they overlap.
    """
    gaps = [np.diff(np.unique(coords[:, axis])) for axis in (0, 1)]
    step = min([tile, *(int(gap.min()) for gap in gaps if len(gap))])
    rows, columns = (max(1, math.ceil(n / step)) for n in extent)
    out = np.full((scores.shape[1], rows, columns), np.nan, np.float32)
    x, y = coords.T // step
    out[:, np.minimum(y, rows - 1), np.minimum(x, columns - 1)] = scores.T
    return out, step


def _ome(
    path: Path,
    planes: npt.NDArray[np.float32],
    step: float,
    mpp: float | None,
    names: Sequence[str],
) -> None:
    metadata: dict[str, Any] = {"axes": "CYX", "Channel": {"Name": list(names)}}
    if mpp is not None:
        metadata |= {"PhysicalSizeX": step * mpp, "PhysicalSizeXUnit": "µm"}
        metadata |= {"PhysicalSizeY": step * mpp, "PhysicalSizeYUnit": "µm"}
    extra("tifffile").imwrite(path, planes, ome=True, photometric="minisblack", metadata=metadata)


def _check(
    coords: npt.NDArray[np.int64],
    scores: npt.NDArray[np.float32],
    tile: int,
    names: Sequence[str],
    shown: int,
) -> None:
    if coords.ndim != 2 or coords.shape[1:] != (2,) or not len(coords) or (coords < 0).any():
        raise GemsError(f"coords are {coords.shape}; give x and y of one tile or more, 0 or above")
    if scores.shape != (len(coords), len(names)) or not len(names):
        raise GemsError(
            f"scores are {scores.shape}; {len(coords)} tiles of the {len(names)} classes "
            f"{', '.join(names)} take ({len(coords)}, {len(names)})"
        )
    if tile < 1 or not 0 <= shown < len(names):
        raise GemsError(f"tile is {tile} and shown {shown}; there are {len(names)} classes")
