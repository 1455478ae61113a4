"""Whole-slide images, in tiles: none is ever loaded, and a box of a tile is read alone."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np

from gems.data.labels import Table, numbered, read_table
from gems.data.masks import Mask, mask_of
from gems.data.pixels import Normal
from gems.data.rasters.core import Raster
from gems.data.rasters.handles import Handles
from gems.data.rasters.opening import Reader, is_slide, open_raster
from gems.data.regions import divide
from gems.data.resample import resample, taps
from gems.data.source import Box, Image, Indices, Target, Task, share, spans
from gems.data.tiles import Tiles, grid, read_coords, view
from gems.errors import GemsError, note, problems

log = logging.getLogger(__name__)
FOLDERS = "folders"
MASKS = 4  # that stay open: pictures of them are decoded whole
SlideLabel: TypeAlias = "str | dict[tuple[int, int], str]"  # the label of a slide, or of its tiles


class Slides:
    """Tiles of one slide or of a folder of them, of all formats that OpenSlide reads, and pictures.

    path            a slide, a folder (searched with its folders), or a list of slides
    tile, stride    side of a tile and steps between tiles, in pixels as they are read
    mpp, magnification, level
                    at most one: microns per pixel, the power of an objective, or a level of the
                    file (default 0, the largest); the nearest finer level is read and averaged
    labels          a CSV file (`slide,label`, or `slide,x,y,label`, which then also lists
                    the tiles), or "folders": the class is the name of the slide's folder
    masks           to segment: a folder of pictures or TIFFs of class numbers, named like slides
    names           of the classes in order; needed with masks, else sorted from the labels
    tissue          the share of a tile that must be tissue; 0 takes all tiles
    coords          a folder of HDF5 files with `coords` named like the slides, instead of looking
                    for tissue: those of `save`, of CLAM or of TRIDENT
    bad             "skip" slides that cannot be read and list them in `unreadable`, or "stop"
    reader          "auto", or one of tifffile, openslide, picture for all files

    Without labels and masks there is nothing to train on, but to predict: targets are -1.
    """

    def __init__(
        self,
        path: str | Path | Sequence[str | Path],
        tile: int = 1024,
        *,
        mpp: float | None = None,
        magnification: float | None = None,
        level: int | None = None,
        stride: int | None = None,
        labels: str | Path | None = None,
        masks: str | Path | None = None,
        names: Sequence[str] | None = None,
        tissue: float = 0.5,
        coords: str | Path | None = None,
        bad: Literal["skip", "stop"] = "skip",
        reader: Reader = "auto",
        normal: Normal | None = None,
    ) -> None:
        stride = tile if stride is None else stride
        _check(tile, stride, mpp, magnification, level, tissue, bad)
        if masks is not None and (labels is not None or names is None):
            raise ValueError("with masks, give the names of the classes, and no labels")
        self.tile, self.stride = tile, stride
        self.shape = (3, tile, tile)
        self.task: Task = "classify" if masks is None else "segment"
        self.normal = normal or Normal()
        self.unreadable: dict[Path, str] = {}
        self._scale = {"mpp": mpp, "magnification": magnification, "level": level}
        self._tissue, self._coords = tissue, None if coords is None else Path(coords)
        self._rasters: Handles[Raster] = Handles(partial(open_raster, reader=reader))
        self._masks: Handles[Mask] | None = None if masks is None else Handles(Mask, MASKS)
        self._folder = None if masks is None else Path(masks).absolute()
        files = [f for f in _files(path) if self._folder not in f.parents]
        known, table = _labels(files, labels)
        found = self._found([f for f in files if labels is None or f in known], known)
        self.unreadable |= _lost(files, table)
        self._report(bad)
        if not found:
            heading = f"{path} has no tiles of {tile} pixels with {tissue:.0%} tissue or more"
            raise GemsError(problems(heading, _reasons(self.unreadable)))
        tags = [tag for _, part in found for tag in part]
        values = table.values if table is not None else set(tags)
        self.names = numbered(values, None if names is None else tuple(names))
        self.classes = len(self.names)
        self.tiles = tuple(tiles for tiles, _ in found)
        self._slide = np.repeat(np.arange(len(found)), [len(t.coords) for t in self.tiles])
        self._corner = np.concatenate([t.coords for t in self.tiles])
        number = {name: i for i, name in enumerate(self.names)}
        self._label = np.array([number[t] for t in tags] or [-1] * len(self._slide), np.int64)
        log.info("%d tiles of %d slides", len(self), len(found))

    def __len__(self) -> int:
        return len(self._slide)

    @property
    def paths(self) -> tuple[Path, ...]:
        """The slides that tiles are of."""
        return tuple(t.path for t in self.tiles)

    def place(self, index: int) -> tuple[Path, int, int]:
        """The slide of a tile, and its x and y in pixels of the largest level."""
        x, y = self._corner[index].tolist()
        return self.tiles[self._slide[index]].path, x, y

    def samples(self, number: int) -> range:
        """The samples that are tiles of slide `number` of `tiles`, in the order of its `coords`."""
        first, last = np.searchsorted(self._slide, (number, number + 1))
        return range(int(first), int(last))

    def read(self, index: int, box: Box) -> Image:
        rows, columns = spans(box, self.shape[1:])
        if rows[0] == rows[1] or columns[0] == columns[1]:
            return np.empty((3, rows[1] - rows[0], columns[1] - columns[0]), np.float32)
        path, x, y = self.place(index)
        how = self.tiles[self._slide[index]].view
        try:
            raster = self._rasters.get(path)
            pixels = resample(
                lambda r, c: raster.read(how.level, r, c),
                taps(how.start(y), how.step, rows),
                taps(how.start(x), how.step, columns),
            )
        except GemsError as error:
            note(error, f"at the tile x={x}, y={y} of {path}")
            raise
        return self.normal.image(pixels)

    def target(self, index: int, box: Box) -> Target:
        if self._masks is None or self._folder is None:
            return np.array(self._label[index])
        path, x, y = self.place(index)
        scale = self.tiles[self._slide[index]].view.scale
        rows, columns = (
            corner + (np.arange(*span) + 0.5) * scale
            for corner, span in zip((y, x), spans(box, self.shape[1:]), strict=True)
        )
        extent = self._rasters.get(path).levels[0].shape
        mask = self._masks.get(mask_of(self._folder, path))
        return mask.at(rows, columns, extent, self.classes)

    def divide(self, held_out: float, seed: int) -> tuple[Indices, Indices]:
        """By slides; a single one by regions that share no pixel."""
        rng = np.random.default_rng((seed, len(self)))
        if len(self.tiles) > 1:
            order = rng.permutation(len(self.tiles))
            out = np.isin(self._slide, order[: share(held_out, len(order))])
            return np.flatnonzero(~out), np.flatnonzero(out)
        return divide(self._corner, max(t.covered for t in self.tiles), held_out, rng)

    def save(self, folder: str | Path) -> list[Path]:
        """The coordinates of each slide's tiles as HDF5, as CLAM writes them."""
        return [t.save(Path(folder) / f"{t.path.stem}.h5") for t in self.tiles]

    def _found(
        self, files: list[Path], known: dict[Path, SlideLabel]
    ) -> list[tuple[Tiles, list[str]]]:
        """The tiles of each slide that has any, and their labels; what cannot be read is noted."""
        found = []
        for file in files:
            try:
                tiles, tags = self._look(file, known.get(file))
            except GemsError as error:
                self.unreadable[file] = str(error)
                continue
            if len(tiles.coords):
                found.append((tiles, tags))
            else:
                log.info("%s has no tiles with tissue enough", file)
        return found

    def _look(self, file: Path, label: SlideLabel | None) -> tuple[Tiles, list[str]]:
        raster = self._rasters.get(file)
        how = view(raster, **self._scale)
        if self._folder is not None:
            mask_of(self._folder, file)
        tiles = Tiles(file, np.empty((0, 2), np.int64), self.tile, how)
        if isinstance(label, dict):
            coords = np.array(list(label), np.int64).reshape(-1, 2)
        elif self._coords is not None:
            coords = read_coords(self._coords / f"{file.stem}.h5", tiles.covered)
        else:
            coords = grid(raster, how, self.tile, self.stride, self._tissue)
        if ((coords < 0) | (coords >= raster.levels[0].shape[::-1])).any():
            raise GemsError(f"tiles lie outside of its {raster.levels[0].shape[::-1]} pixels")
        tags = list(label.values()) if isinstance(label, dict) else [label or ""] * len(coords)
        return Tiles(file, coords, self.tile, how), tags if label is not None else []

    def _report(self, bad: str) -> None:
        """Raise, or warn of the slides that are skipped."""
        if self.unreadable and bad == "stop":
            raise GemsError(problems("slides cannot be read", _reasons(self.unreadable)))
        for path, why in self.unreadable.items():
            log.warning("skipping %s: %s", path, why)


def _reasons(unreadable: dict[Path, str]) -> list[str]:
    return [f"{path}: {why}" for path, why in unreadable.items()]


def _labels(
    files: list[Path], labels: str | Path | None
) -> tuple[dict[Path, SlideLabel], Table | None]:
    """The labels of each slide, and the table they come from."""
    if labels is None:
        return {}, None
    if labels == FOLDERS:
        return {f: f.parent.name for f in files}, None
    table = read_table(labels)
    return {f: known for f in files if (known := table.of(f)) is not None}, table


def _lost(files: list[Path], table: Table | None) -> dict[Path, str]:
    """What a table names and the folder does not have."""
    if table is None:
        return {}
    here = {name for f in files for name in (f.name, f.stem)}
    lost = sorted(table.names() - here)
    return {Path(name): f"{table.path} names it, but it is not there" for name in lost}


def _files(path: str | Path | Sequence[str | Path]) -> list[Path]:
    """Absolute, so that a pickled source finds them anywhere; sorted, alike on all ranks."""
    if not isinstance(path, (str, Path)):
        return [Path(p).absolute() for p in path]
    path = Path(path).absolute()
    if not path.is_dir():
        return [path]
    found = sorted(p for p in path.rglob("*") if p.is_file() and is_slide(p))
    if not found:
        raise GemsError(f"there are no slides in {path}")
    return found


def _check(
    tile: int,
    stride: int,
    mpp: float | None,
    magnification: float | None,
    level: int | None,
    tissue: float,
    bad: str,
) -> None:
    found = []
    if min(tile, stride) < 1:
        found.append(f"tile {tile} and stride {stride} must be 1 or more")
    if sum(x is not None for x in (mpp, magnification, level)) > 1:
        found.append(f"mpp {mpp}, magnification {magnification}, level {level}: give one of them")
    if min(mpp or 1, magnification or 1) <= 0 or 0 in (mpp, magnification):
        found.append(f"mpp {mpp} and magnification {magnification} must be above 0")
    if not 0 <= tissue <= 1:
        found.append(f"tissue is {tissue}; take a share from 0 to 1")
    if bad not in ("skip", "stop"):
        found.append(f"bad is {bad!r}; take 'skip' or 'stop'")
    if found:
        raise ValueError(problems("these slides cannot be asked for", found))
