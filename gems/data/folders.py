"""Pictures in folders, one folder per class, in any size."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from gems.data.labels import numbered
from gems.data.pixels import Normal
from gems.data.rasters.core import Pixels
from gems.data.rasters.handles import Handles
from gems.data.rasters.plain import decoded
from gems.data.resample import inside, resample, taps
from gems.data.source import Box, Image, Target, Task, spans
from gems.errors import GemsError

ENDINGS = {".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp"}
KEPT = 8  # pictures that stay decoded: ranks of threads read several boxes of one


class Folders:
    """`path/class/picture`, each made `image_size` (one number, or height and width) large.

    `fit="resize"` squeezes the whole picture into it; "crop" takes its middle, the shorter side
    filling the image. `names` are the classes in order; else folders sorted by name.
    """

    task: Task = "classify"

    def __init__(
        self,
        path: str | Path,
        image_size: int | tuple[int, int] = 224,
        *,
        fit: Literal["resize", "crop"] = "resize",
        names: tuple[str, ...] | None = None,
        normal: Normal | None = None,
    ) -> None:
        size = (image_size, image_size) if isinstance(image_size, int) else image_size
        if min(size) < 1:
            raise ValueError(f"image_size is {image_size}; take 1 or more")
        if fit not in ("resize", "crop"):
            raise ValueError(f"fit is {fit!r}; take 'resize' or 'crop'")
        self.path, self.fit, self.normal = Path(path).absolute(), fit, normal or Normal()
        self.shape = (3, *size)
        self.files = tuple(
            sorted(p for p in self.path.glob("*/**/*") if p.suffix.lower() in ENDINGS)
        )
        if not self.files:
            raise GemsError(f"there are no pictures in folders of {self.path}: class/picture.png")
        labels = [p.relative_to(self.path).parts[0] for p in self.files]
        self.names = numbered(labels, names)
        self.classes = len(self.names)
        self._labels = np.array([self.names.index(label) for label in labels], np.int64)
        self._pictures: Handles[Pixels] = Handles(partial(decoded, mode="RGB"), KEPT)

    def __len__(self) -> int:
        return len(self.files)

    def read(self, index: int, box: Box) -> Image:
        rows, columns = spans(box, self.shape[1:])
        if rows[0] == rows[1] or columns[0] == columns[1]:
            return np.empty((3, rows[1] - rows[0], columns[1] - columns[0]), np.float32)
        picture = self._pictures.get(self.files[index])
        steps = [n / size for n, size in zip(picture.shape[:2], self.shape[1:], strict=True)]
        if self.fit == "crop":
            steps = [min(steps)] * 2
        # Half of what is left over along each axis lies before the image: nothing, to resize.
        starts = [
            (n - step * size) / 2
            for n, step, size in zip(picture.shape[:2], steps, self.shape[1:], strict=True)
        ]
        axes = (taps(*axis) for axis in zip(starts, steps, (rows, columns), strict=True))
        return self.normal.image(resample(inside(picture), *axes))

    def target(self, index: int, box: Box) -> Target:
        return np.array(self._labels[index])
