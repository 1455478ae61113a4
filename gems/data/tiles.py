"""Which tiles of a slide are read, and how: coordinates in pixels of the largest level.

These are the conventions of CLAM and TRIDENT, whose HDF5 files of `coords` are read and written.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gems.data.extras import extra
from gems.data.rasters.core import Raster
from gems.data.thumbnail import thumbnail
from gems.data.tissue import shares, tissue
from gems.errors import GemsError
from gems.files import in_one_move

NEAR = 0.01  # scales that differ by less than this share are taken as the same
MOST = 5e7  # tiles of one slide
TEN = 10.0  # microns per pixel times power: 0.25 at 40x, 0.5 at 20x


@dataclass(frozen=True)
class View:
    """A level of a slide, and how many of its pixels along each axis are one of a tile."""

    level: int
    downsample: float
    step: float

    @property
    def scale(self) -> float:
        """Pixels of the largest level per pixel of a tile."""
        return self.downsample * self.step

    def start(self, place: int) -> float:
        """Where on the level a tile begins, whose place on the largest level is given."""
        return place / self.downsample if self.step != 1 else round(place / self.downsample)


@dataclass(frozen=True, eq=False)
class Tiles:
    """The tiles of one slide: x and y of each corner, side in pixels as they are read."""

    path: Path
    coords: npt.NDArray[np.int64]
    side: int
    view: View

    @property
    def covered(self) -> int:
        """The side of a tile in pixels of the largest level."""
        return round(self.side * self.view.scale)

    def save(self, path: str | Path) -> Path:
        """Write them as HDF5: dataset `coords`, and how they are read as its attributes."""
        h5py = extra("h5py")

        with in_one_move(Path(path)) as made, h5py.File(made, "w") as file:
            coords = file.create_dataset("coords", data=self.coords)
            coords.attrs.update(
                name=self.path.stem,
                patch_size=self.side,
                patch_level=self.view.level,
                patch_size_level0=self.covered,
                downsample=self.view.downsample,
            )
        return Path(path)


def read_coords(path: str | Path, covered: int) -> npt.NDArray[np.int64]:
    """The `coords` of an HDF5 file, for tiles that cover `covered` pixels of the largest level."""
    h5py = extra("h5py")
    try:
        with h5py.File(path) as file:
            coords = file["coords"]
            shape, kind = tuple(coords.shape), coords.dtype.kind
            if len(shape) != 2 or shape[1] != 2 or kind not in "iu" or not shape[0] < MOST:
                raise GemsError(f"{path}: coords are {shape}, not one x and y per tile")
            found, stated = np.asarray(coords), coords.attrs.get("patch_size_level0")
            stated = None if stated is None else int(stated)
    except GemsError:
        raise
    except Exception as error:  # h5py reports damage by errors of many kinds
        raise GemsError(f"{path} has no coordinates of tiles: {error}") from error
    if stated is not None and abs(int(stated) - covered) > 1:
        raise GemsError(
            f"{path}: its tiles cover {int(stated)} pixels of the slide, not {covered}; "
            "take the same tile size and magnification"
        )
    return found.astype(np.int64)


def view(
    raster: Raster,
    mpp: float | None = None,
    magnification: float | None = None,
    level: int | None = None,
) -> View:
    """The level to read for a scale, and the rest of the way to it: the nearest finer one.

    ::

        level         0       1       2          asked for: 1 micron per pixel
        mpp         0.25     0.5      2          read: level 1, 2 of its pixels for 1
    """
    downsamples = [x.downsample for x in raster.levels]
    if level is not None:
        if not 0 <= level < len(downsamples):
            raise GemsError(f"there is no level {level}, but 0 to {len(downsamples) - 1}")
        return View(level, downsamples[level], 1.0)
    if mpp is None and magnification is None:
        return View(0, 1.0, 1.0)
    scale = _scale(raster, mpp, magnification)
    if scale < 1 - NEAR:
        raise GemsError(
            f"its largest level is {1 / scale:.3g} times too coarse for "
            + (f"{mpp} microns per pixel" if mpp is not None else f"{magnification}x")
        )
    finer = [i for i, d in enumerate(downsamples) if d <= scale * (1 + NEAR)]
    number = max(finer, key=lambda i: downsamples[i])
    step = scale / downsamples[number]
    return View(number, downsamples[number], 1.0 if abs(step - 1) < NEAR else step)


def _scale(raster: Raster, mpp: float | None, magnification: float | None) -> float:
    if raster.mpp is None and raster.power is None:
        raise GemsError("it does not say its microns per pixel; give level=0 instead")
    if mpp is not None:
        own = raster.mpp if raster.mpp is not None else TEN / (raster.power or TEN)
        return mpp / own
    assert magnification is not None
    power = raster.power if raster.power is not None else TEN / (raster.mpp or TEN)
    return power / magnification


def grid(raster: Raster, view: View, side: int, stride: int, least: float) -> npt.NDArray[np.int64]:
    """x and y of the tiles, row by row, whose centre is on the slide and that have tissue enough.

    `least` is the share of a tile that must be tissue; at 0 the slide is not even looked at.
    """
    height, width = raster.levels[0].shape
    covered = side * view.scale
    places = (height / (stride * view.scale) + 1) * (width / (stride * view.scale) + 1)
    if not places < MOST:
        raise GemsError(
            f"{height} x {width} pixels in steps of {stride * view.scale:g} make {places:.3g} "
            "tiles; take larger tiles, a larger stride or fewer microns per pixel"
        )
    ys, xs = (
        np.rint(np.arange(max(1, np.ceil(n / (stride * view.scale)))) * stride * view.scale)
        for n in (height, width)
    )
    ys = ys[(ys + covered / 2 <= height) | (ys == 0)]
    xs = xs[(xs + covered / 2 <= width) | (xs == 0)]
    y, x = (a.ravel() for a in np.meshgrid(ys, xs, indexing="ij"))
    if least > 0:
        mask = tissue(thumbnail(raster))
        ratio = mask.shape[0] / height, mask.shape[1] / width
        size = covered * ratio[0], covered * ratio[1]
        kept = shares(mask, np.stack([y * ratio[0], x * ratio[1]], axis=1), size) >= least
        y, x = y[kept], x[kept]
    return np.stack([x, y], axis=1).astype(np.int64)
