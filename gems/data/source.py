"""Numbered samples that are read box by box, and their division into two parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

Box: TypeAlias = tuple[slice, ...]  # one per dim of the image; channels are not among them
Task: TypeAlias = Literal["classify", "segment", "regress"]
Image: TypeAlias = npt.NDArray[np.float32]
Target: TypeAlias = npt.NDArray[np.int64] | npt.NDArray[np.float32]
Indices: TypeAlias = npt.NDArray[np.int64]


class Source(Protocol):
    """Where samples come from.

    A source can be pickled, may be read by several threads at once, and gives the same numbers
    each time: `read(i, box)` is the box of `read(i, everything)`, bit for bit.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one sample: channels, then height and width (depth first for a volume)."""
        ...

    @property
    def classes(self) -> int:
        """How many there are; to regress, how many numbers a sample has."""
        ...

    @property
    def names(self) -> tuple[str, ...]:
        """Of the classes, or of the numbers."""
        ...

    @property
    def task(self) -> Task: ...

    def __len__(self) -> int: ...

    def read(self, index: int, box: Box) -> Image:
        """All channels of a box of a sample, normalised: (channels, *box)."""
        ...

    def target(self, index: int, box: Box) -> Target:
        """To classify, the label, whatever the box; to segment, the box of the mask; to regress,
        all numbers of the sample, whatever the box."""
        ...


@runtime_checkable
class Divided(Protocol):
    """A source that knows which of its samples belong together."""

    def divide(self, held_out: float, seed: int) -> tuple[Indices, Indices]:
        """Which samples to train on and which to hold out: what is alike is on one side."""
        ...


@dataclass(frozen=True, eq=False)
class Subset:
    """Some samples of a source, as a source."""

    source: Source
    indices: Indices

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    @property
    def classes(self) -> int:
        return self.source.classes

    @property
    def names(self) -> tuple[str, ...]:
        return self.source.names

    @property
    def task(self) -> Task:
        return self.source.task

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, index: int, box: Box) -> Image:
        return self.source.read(int(self.indices[index]), box)

    def target(self, index: int, box: Box) -> Target:
        return self.source.target(int(self.indices[index]), box)


def split(source: Source, held_out: float = 0.25, seed: int = 0) -> tuple[Subset, Subset]:
    """What to train on, and the rest: the same for the same seed, without a sample in common.

    Slides are kept whole, all tiles of one on the same side; a single slide is divided by regions.
    """
    if not 0 < held_out < 1:
        raise ValueError(f"held_out is {held_out}; take a share between 0 and 1, such as 0.25")
    if len(source) < 2:
        raise ValueError(f"{len(source)} samples cannot be divided; there must be 2 or more")
    if isinstance(source, Divided):
        train, rest = source.divide(held_out, seed)
    else:
        order = np.random.default_rng((seed, len(source))).permutation(len(source))
        count = share(held_out, len(source))
        train, rest = np.sort(order[count:]), np.sort(order[:count])
    return Subset(source, train), Subset(source, rest)


def share(held_out: float, count: int) -> int:
    """How many of `count` (2 or more) are held out: at least one, and not all."""
    return min(max(round(held_out * count), 1), count - 1)


def shape_of(channels: int, size: int | tuple[int, ...], dims: int = 2) -> tuple[int, ...]:
    """Of a sample whose image is a square or cube of one side, or has the sides given."""
    return (channels, *((size,) * dims if isinstance(size, int) else size))


def spans(box: Box, sides: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """First and last-plus-one cell of each dim, or an error if the box is no box of an image."""
    if len(box) != len(sides):
        raise ValueError(f"a box of {len(box)} dims of an image of {len(sides)}: {tuple(sides)}")
    found = tuple(
        (0 if s.start is None else int(s.start), side if s.stop is None else int(s.stop))
        for s, side in zip(box, sides, strict=True)
    )
    if any(s.step not in (None, 1) for s in box) or any(
        not 0 <= a <= b <= side for (a, b), side in zip(found, sides, strict=True)
    ):
        raise ValueError(f"{box} is not a box of an image of {tuple(sides)}")
    return found


def whole(sides: Sequence[int]) -> Box:
    """The box that is everything."""
    return tuple(slice(0, side) for side in sides)
