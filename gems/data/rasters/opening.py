"""Which reader a file gets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeAlias

from gems.data.rasters.core import Damaged, Raster
from gems.data.rasters.openslide import Slide
from gems.data.rasters.plain import Picture
from gems.data.rasters.tiff import Tiff
from gems.errors import GemsError, problems

Reader: TypeAlias = Literal["auto", "tifffile", "openslide", "picture"]
READERS: dict[str, Callable[[Path], Raster]] = {
    "tifffile": Tiff,
    "openslide": Slide,
    "picture": Picture,
}
PICTURES = {".png", ".jpg", ".jpeg", ".bmp"}
TIFFS = {".tif", ".tiff", ".svs"}
SLIDES = {".ndpi", ".vms", ".vmu", ".scn", ".mrxs", ".svslide", ".bif", ".dcm", ".czi"}


def is_slide(path: Path) -> bool:
    """Whether a file's name is that of a slide or a picture."""
    return path.suffix.lower() in PICTURES | TIFFS | SLIDES


def open_raster(path: str | Path, reader: Reader = "auto") -> Raster:
    """An open file. "auto" tries the fastest reader first: tifffile, OpenSlide, then Pillow."""
    path = Path(path)
    if reader not in ("auto", *READERS):
        raise ValueError(f"reader is {reader!r}; take auto, {', '.join(READERS)}")
    if not path.exists():
        raise GemsError(f"{path} does not exist")
    suffix = path.suffix.lower()
    names = ("picture",) if suffix in PICTURES else ("openslide",)
    if suffix in TIFFS:
        names = ("tifffile", "openslide", "picture")
    found = []
    for name in names if reader == "auto" else (reader,):
        try:
            return READERS[name](path)
        except Damaged as error:
            raise GemsError(str(error)) from error
        except GemsError as error:
            found.append(f"{name}: {error}")
    raise GemsError(problems(f"{path} cannot be read", found))
