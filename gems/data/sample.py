"""A small slide of real tissue to try things on, without the network.

The tissue is `ihc.png` of scikit-image's wheel: colonic glands whose FHL2 protein was stained brown
(DAB) and whose nuclei were stained blue (haematoxylin), 512 x 512 pixels, published without known
copyright restrictions, courtesy of the Center for Microscopy and Molecular Imaging.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gems.data.extras import extra
from gems.data.pictures import read_picture
from gems.files import in_one_move, write

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
    with in_one_move(sample.slide) as path:
        write_slide(path, pixels, MPP)
    with in_one_move(sample.masks / "ihc.png") as path:
        extra("PIL.Image").fromarray(mask).save(path, format="png")
    write(sample.labels, text)
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
