"""Batches of a source, in an order that depends on the seed and the epoch alone.

Workers are threads. OpenSlide and the decoders of TIFF, JPEG and HDF5 release Python's lock while
they work, so threads read at the same time: on two cores that were busy with other work besides, 2
read 1.3 times as many tiles as 1. They share caches and open files, and cannot outlive the process
as forgotten children would. `benchmarks/slides` has the figures.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Literal, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from gems.data.augment import Augment
from gems.data.boxed import Boxed
from gems.data.source import Box, Image, Source, Target, whole
from gems.errors import note

Batch: TypeAlias = tuple[Boxed, "Target | Boxed"]
T = TypeVar("T")
AHEAD = 2  # batches that workers read in advance


class Loader:
    """Batches that `gems.Trainer.step` takes: images read box by box, and labels, masks
    or numbers.

    `epoch(3, start=7)` continues in the middle of an epoch exactly where one left off. Every rank
    makes its own loader with the same arguments; each then reads only the boxes of its own tile.
    `last` is whether an incomplete last batch is kept or dropped; `dtype` is what images
    are given as.
    """

    def __init__(
        self,
        source: Source,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        augment: Augment | None = None,
        workers: int = 0,
        last: Literal["keep", "drop"] = "keep",
        dtype: npt.DTypeLike = np.float32,
    ) -> None:
        for name, value, least in (
            ("batch_size", batch_size, 1),
            ("seed", seed, 0),
            ("workers", workers, 0),
            ("the number of samples", len(source), 1),
        ):
            if value < least:
                raise ValueError(f"{name} is {value}; it must be {least} or more")
        if last not in ("keep", "drop"):
            raise ValueError(f"last is {last!r}; take 'keep' or 'drop', for an incomplete batch")
        if last == "drop" and len(source) < batch_size:
            raise ValueError(
                f"batches of {batch_size} of {len(source)} samples, and last='drop' leaves none; "
                "take smaller batches or last='keep'"
            )
        self.source, self.batch_size, self.seed, self.shuffle = source, batch_size, seed, shuffle
        self.augment, self.dtype = augment, np.dtype(dtype)
        full, rest = divmod(len(source), batch_size)
        self.steps = full + (1 if rest and last == "keep" else 0)
        self._pool = ThreadPoolExecutor(workers, "gems-data") if workers else None
        self._closed = False

    def epoch(self, number: int = 0, start: int = 0) -> Iterator[Batch]:
        """The batches of one epoch, from step `start` on."""
        if self._closed:
            raise RuntimeError("this loader is closed; make another")
        if number < 0 or not 0 <= start <= self.steps:
            raise ValueError(
                f"epoch {number} from step {start}; epochs count from 0, and one has "
                f"{self.steps} steps"
            )
        return self._batches(number, start)

    def order(self, number: int) -> npt.NDArray[np.int64]:
        """The samples of an epoch, one after the other."""
        if not self.shuffle:
            return np.arange(len(self.source))
        return np.random.default_rng((self.seed, number)).permutation(len(self.source))

    def close(self) -> None:
        """End the workers."""
        self._closed = True
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _batches(self, number: int, start: int) -> Iterator[Batch]:
        order = self.order(number)
        coming = deque(self._batch(number, order, s) for s in range(start, self.steps)[: AHEAD + 1])
        try:
            for step in range(start, self.steps):
                for part in zip(*coming, strict=True):
                    if isinstance(part[0], Boxed):
                        part[0].followers = part[1:]
                yield coming[0]
                _forget(coming.popleft())
                if step + AHEAD + 1 < self.steps:
                    coming.append(self._batch(number, order, step + AHEAD + 1))
        finally:
            for batch in coming:
                _forget(batch)

    def _batch(self, number: int, order: npt.NDArray[np.int64], step: int) -> Batch:
        indices = order[step * self.batch_size : (step + 1) * self.batch_size].tolist()
        shape = self.source.shape

        def image(index: int, box: Box) -> Image:
            return self._image(number, index, box)

        def mask(index: int, box: Box) -> Target:
            return self._mask(number, index, box)

        images = Boxed(image, indices, shape, self.dtype, 1, self._pool)
        if self.source.task == "segment":
            return images, Boxed(mask, indices, shape[1:], np.int64, 0, self._pool)
        box = whole(shape[1:])
        labels = [self._named(i, self.source.target, box) for i in indices]
        if self.source.task == "regress":
            return images, np.array(labels, np.float32)
        return images, np.array(labels, np.int64)

    def _image(self, number: int, index: int, box: Box) -> Image:
        if self.augment is None:
            return self._named(index, self.source.read, box)
        shape = self.source.shape
        change = self.augment.draw(shape, self.seed, number, index)
        pixels = self._named(index, self.source.read, change.source(box, shape[1:]))
        return change.colour(np.ascontiguousarray(change.turn(pixels)))

    def _mask(self, number: int, index: int, box: Box) -> Target:
        if self.augment is None:
            return self._named(index, self.source.target, box)
        shape = self.source.shape
        change = self.augment.draw(shape, self.seed, number, index)
        return change.turn(self._named(index, self.source.target, change.source(box, shape[1:])))

    def _named(self, index: int, read: Callable[[int, Box], T], box: Box) -> T:
        """What `read` gives; errors name the sample."""
        try:
            return read(index, box)
        except Exception as error:
            note(error, f"while reading sample {index} of {type(self.source).__name__}")
            raise


def _forget(batch: Batch) -> None:
    for part in batch:
        if isinstance(part, Boxed):
            part.forget()
