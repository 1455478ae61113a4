"""Real pictures without a download: crops of those that come inside scikit-image's wheel."""

from __future__ import annotations

import importlib.resources
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gems.data.source import Box, Image, Target, Task, spans
from gems.errors import GemsError

# Label i is the i-th picture. Tissue, retina and sky first; then daily life; then textures.
FILES: tuple[str, ...] = (
    "ihc.png",
    "retina.jpg",
    "hubble_deep_field.jpg",
    "astronaut.png",
    "coffee.png",
    "rocket.jpg",
    "chelsea.png",
    "brick.png",
    "grass.png",
    "gravel.png",
    "moon.png",
    "coins.png",
    "camera.png",
    "motorcycle_left.png",
)


class Pictures:
    """Which picture is this crop from? One class per picture, up to `len(FILES)`.

    Sample i shows picture i modulo `classes`, at a place drawn from the seed and i. Samples are
    float32, 3 x `image_size` x `image_size` (grey pictures three times over), with
    mean 0 and deviation 1 per channel over the pictures chosen. A picture smaller than the crop
    is continued by its mirror image, so any size can be asked for. Training and evaluation crops
    come from the same pictures and overlap: a high score shows learning, not generalisation.
    """

    task: Task = "classify"

    def __init__(
        self, image_size: int = 32, classes: int = 10, samples: int = 1024, seed: int = 0
    ) -> None:
        if image_size < 1:
            raise ValueError(f"image_size is {image_size}; take 1 or more")
        if not 1 <= classes <= len(FILES):
            raise ValueError(f"{classes} classes, but there are 1 to {len(FILES)} pictures")
        if samples < 1:
            raise ValueError(f"samples is {samples}; take 1 or more")
        self.image_size, self.samples, self.seed = image_size, samples, seed
        self.classes = classes
        self.shape = (3, image_size, image_size)
        self.names = tuple(file.partition(".")[0] for file in FILES[:classes])
        self._pictures = [read_picture(file) for file in FILES[:classes]]
        self._mean, self._deviation = _moments(self._pictures)

    def __len__(self) -> int:
        return self.samples

    def read(self, index: int, box: Box) -> Image:
        picture, rng = (
            self._pictures[index % self.classes],
            np.random.default_rng((self.seed, index)),
        )
        rows, columns = (_window(side, self.image_size, rng) for side in picture.shape[:2])
        (top, bottom), (left, right) = spans(box, self.shape[1:])
        pixels = picture[np.ix_(rows[top:bottom], columns[left:right])].astype(np.float32)
        return ((pixels - self._mean) / self._deviation).transpose(2, 0, 1)

    def target(self, index: int, box: Box) -> Target:
        return np.array(index % self.classes, np.int64)


def _window(side: int, size: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """`size` neighbouring indices into `side` pixels, turning around at the edges if need be."""
    start = rng.integers(side - size + 1 if size <= side else side)
    index = np.arange(start, start + size) % (2 * side)
    return np.minimum(index, 2 * side - 1 - index)


def _moments(
    pictures: Sequence[npt.NDArray[np.uint8]],
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Mean and deviation per channel, every picture counting the same whatever its size."""
    mean = np.mean([p.mean(axis=(0, 1)) for p in pictures], axis=0)
    variance = np.mean(
        [p.var(axis=(0, 1)) + (p.mean(axis=(0, 1)) - mean) ** 2 for p in pictures], axis=0
    )
    return mean.astype(np.float32), np.sqrt(variance).astype(np.float32)


def read_picture(file: str) -> npt.NDArray[np.uint8]:
    """Height x width x 3 of a picture in the installed scikit-image."""
    encoded = _resource(file)
    from imageio.v3 import imread

    pixels = np.asarray(imread(encoded, extension=f".{file.rpartition('.')[2]}"))
    if pixels.ndim == 2:
        pixels = np.repeat(pixels[:, :, None], 3, axis=2)
    return pixels[:, :, :3].astype(np.uint8, copy=False)


def _resource(file: str) -> bytes:
    """The file as it lies inside the installed package: never from the network."""
    try:
        return (importlib.resources.files("skimage") / "data" / file).read_bytes()
    except ModuleNotFoundError as error:
        raise GemsError(
            "the pictures come with scikit-image, which is not installed; "
            "`pip install gems-hires[data]`, or use synthetic data"
        ) from error
    except FileNotFoundError as error:
        raise GemsError(
            f"the installed scikit-image does not contain {file}; "
            "`pip install --upgrade gems-hires[data]`, or use synthetic data"
        ) from error
