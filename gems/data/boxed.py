"""One batch as an array that is read box by box, and ahead of time where a pool may do so.

[Note: reading ahead] A rank asks for the same boxes step after step. So a box that is asked for of
one batch is at once given to the workers to be read of the batches that follow, and is there when
their turn comes. A rank of a later stage asks for nothing, and nothing is read for it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Executor, Future
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from gems.data.source import Box

Array: TypeAlias = npt.NDArray[Any]
Read: TypeAlias = Callable[[int, Box], Array]  # of a sample, a box of its image dims


class Boxed:
    """Samples of a source: `shape`, `dtype` and slices, like an array.

    `lead` is how many dims a sample has before those of the image: 1 for channels, 0 in a mask.
    """

    def __init__(
        self,
        read: Read,
        indices: Sequence[int],
        shape: tuple[int, ...],
        dtype: npt.DTypeLike,
        lead: int,
        pool: Executor | None = None,
    ) -> None:
        self.shape = (len(indices), *shape)
        self.dtype = np.dtype(dtype)
        self.followers: tuple[Boxed, ...] = ()
        self._read, self._indices, self._lead, self._pool = read, indices, lead, pool
        self._ahead: dict[tuple[int, tuple[tuple[int, int], ...]], Future[Array]] = {}
        self._lock = threading.Lock()

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Array:
        return np.asarray(self[()], dtype)

    def __getitem__(self, key: Any) -> Array:
        """A box, by slices; dims that are not named are whole."""
        (first, last), *rest = self._spans(key if isinstance(key, tuple) else (key,))
        lead, image = rest[: self._lead], tuple(rest[self._lead :])
        shape = tuple(b - a for a, b in ((first, last), *rest))
        if 0 in shape:
            return np.empty(shape, self.dtype)
        for batch in (self, *self.followers):
            batch.ask(range(first, last), image)
        channels = tuple(slice(a, b) for a, b in lead)
        if last == first + 1:  # what was read is what is wanted: large images are not copied
            part = self._take(first, image)[channels]
            return np.ascontiguousarray(part, self.dtype)[None]
        out = np.empty(shape, self.dtype)
        for place, part in zip(range(first, last), out, strict=True):
            part[...] = self._take(place, image)[channels]
        return out

    def ask(self, places: Sequence[int], image: tuple[tuple[int, int], ...]) -> None:
        """Have a box of some samples read by the pool, if there is one."""
        with self._lock:
            for place in places:
                if self._pool is None or place >= len(self) or (place, image) in self._ahead:
                    continue
                try:
                    future = self._pool.submit(self._read, self._indices[place], _slices(image))
                except RuntimeError:  # the loader was closed: from now on, without it
                    self._pool = None
                else:
                    self._ahead[place, image] = future

    def forget(self) -> None:
        """Drop what was read ahead and never fetched. It can still be read."""
        with self._lock:
            for future in self._ahead.values():
                future.cancel()
            self._ahead, self._pool = {}, None

    def _take(self, place: int, image: tuple[tuple[int, int], ...]) -> Array:
        with self._lock:
            future = self._ahead.pop((place, image), None)
        if future is not None:
            with contextlib.suppress(CancelledError):  # it was closed before this one's turn
                return future.result()
        return self._read(self._indices[place], _slices(image))

    def _spans(self, key: tuple[Any, ...]) -> list[tuple[int, int]]:
        if len(key) > self.ndim or any(not isinstance(k, slice) for k in key):
            raise TypeError(f"an array of {self.shape} is read by slices, not by {key}")
        if any(k.step not in (None, 1) for k in key):
            raise ValueError(f"{key} has steps; boxes are read whole")
        key += (slice(None),) * (self.ndim - len(key))
        return [
            (start, max(start, stop))
            for start, stop, _ in (k.indices(n) for k, n in zip(key, self.shape, strict=True))
        ]


def _slices(image: tuple[tuple[int, int], ...]) -> Box:
    return tuple(slice(a, b) for a, b in image)
