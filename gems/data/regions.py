"""One slide in two parts that share no pixel: to train on, and to hold out."""

from __future__ import annotations

from collections import defaultdict
from itertools import product

import numpy as np
import numpy.typing as npt

from gems.data.source import Indices, share

BLOCKS = 4  # along each axis: neighbours are alike, so whole regions are held out, not single tiles


def divide(
    corners: npt.NDArray[np.int64], side: int, held_out: float, rng: np.random.Generator
) -> tuple[Indices, Indices]:
    """Which tiles to train on and which to hold out, of one slide.

    ::

        ┌───┬───┬───┬───┐
        │   │▒▒▒│   │   │     blocks are held out at random until they are enough tiles;
        ├───┼───┼───┼───┤     tiles elsewhere that overlap one of theirs are left out
        │   │   │   │▒▒▒│
        └───┴───┴───┴───┘
    """
    block = np.zeros(len(corners), np.int64)
    for axis in (0, 1):
        places, place = np.unique(corners[:, axis], return_inverse=True)
        block = block * BLOCKS + place * min(BLOCKS, len(places)) // len(places)
    names, sizes = np.unique(block, return_counts=True)
    if len(names) < 2:
        raise ValueError("all tiles lie at one place; take smaller tiles or more slides")
    order = rng.permutation(len(names))
    enough = np.searchsorted(np.cumsum(sizes[order]), share(held_out, len(corners))) + 1
    out = np.isin(block, names[order[: min(enough, len(names) - 1)]])
    train = np.flatnonzero(~out)
    clear = _clear(corners[train], corners[out], side)
    return train[clear], np.flatnonzero(out)


def _clear(
    tiles: npt.NDArray[np.int64], others: npt.NDArray[np.int64], side: int
) -> npt.NDArray[np.bool_]:
    """Which of `tiles` overlap none of `others`; corners are rounded, so by more than a pixel."""
    reach = max(side - 1, 1)
    near: defaultdict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for x, y in others.tolist():
        near[x // reach, y // reach].append((x, y))
    around = tuple(product((-1, 0, 1), repeat=2))

    def alone(x: int, y: int) -> bool:
        return not any(
            abs(x - a) < reach and abs(y - b) < reach
            for i, j in around
            for a, b in near.get((x // reach + i, y // reach + j), ())
        )

    return np.array([alone(x, y) for x, y in tiles.tolist()], bool)
