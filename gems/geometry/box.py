"""Who has which box and who wants which: pure integers, any number of dimensions."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Box:
    """The cells `start <= cell < stop`, dim by dim; coordinates may be negative.

    ::

              0   2       6
            0 ┌───────────┐
            1 │   ┌───────┤      Box((1, 2), (4, 6)) is [1:4, 2:6]:
              │   │▒▒▒▒▒▒▒│      shape (3, 4), size 12
            4 └───┴───────┘
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.start) != len(self.stop):
            raise ValueError(
                f"a box needs one start and one stop per dim, not {self.start} and {self.stop}"
            )
        if any(map(operator.lt, self.stop, self.start)):
            raise ValueError(f"a box cannot stop before it starts: {self}")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """All cells of a tensor: `Box.whole((4, 6))` is `[0:4, 0:6]`."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(operator.sub, self.stop, self.start))

    @property
    def size(self) -> int:
        """How many cells; 1 for a box without dims, as for a scalar."""
        return math.prod(self.shape)

    @property
    def empty(self) -> bool:
        return any(map(operator.eq, self.start, self.stop))

    def intersect(self, other: Box) -> Box:
        """The cells of both; an empty box where there are none."""
        self._same_dims(other)
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(start, tuple(map(max, start, stop)))

    def meets(self, other: Box) -> bool:
        """Whether the two share a cell. `moves` asks for every pair of ranks, so it is quick."""
        self._same_dims(other)
        return (
            all(map(operator.lt, self.start, other.stop))
            and all(map(operator.lt, other.start, self.stop))
            and not (self.empty or other.empty)
        )

    def without(self, other: Box) -> tuple[Box, ...]:
        """The cells of this box that are not in `other`, as disjoint boxes.

        ::

            ┌───────────┐      first what is above and below (1, 2),
            │     1     │      then what is left beside (3, 4)
            ├──┬─────┬──┤
            │ 3│other│4 │
            ├──┴─────┴──┤
            │     2     │
            └───────────┘
        """
        if not self.meets(other):
            return () if self.empty else (self,)
        hole = self.intersect(other)
        pieces: list[Box] = []
        start, stop = list(self.start), list(self.stop)
        for dim, (low, high) in enumerate(zip(hole.start, hole.stop, strict=True)):
            pieces.append(Box(tuple(start), (*stop[:dim], low, *stop[dim + 1 :])))
            pieces.append(Box((*start[:dim], high, *start[dim + 1 :]), tuple(stop)))
            start[dim], stop[dim] = low, high
        return tuple(piece for piece in pieces if not piece.empty)

    def shift(self, offset: Sequence[int]) -> Box:
        """The box moved by `offset` along each dim."""
        if len(offset) != len(self.start):
            raise ValueError(f"offset {tuple(offset)} has not one entry per dim of {self}")
        return Box(
            tuple(map(operator.add, self.start, offset)),
            tuple(map(operator.add, self.stop, offset)),
        )

    def relative_to(self, frame: Box) -> Box:
        """This box as seen from the first cell of `frame`: where `frame`'s own array keeps it."""
        self._same_dims(frame)
        return self.shift(tuple(map(operator.neg, frame.start)))

    def slices(self) -> tuple[slice, ...]:
        """Ready to index an array that starts at coordinate 0; see `relative_to` for others."""
        if any(a < 0 for a in self.start):
            raise ValueError(
                f"{self} starts below 0, where slices would count from the end; "
                "take it relative_to the box that the array holds"
            )
        return tuple(map(slice, self.start, self.stop))

    def __contains__(self, other: Box) -> bool:
        """Whether every cell of `other` is here."""
        self._same_dims(other)
        inside = all(map(operator.le, self.start, other.start)) and all(
            map(operator.ge, self.stop, other.stop)
        )
        return inside or other.empty

    def __str__(self) -> str:
        return f"[{', '.join(f'{a}:{b}' for a, b in zip(self.start, self.stop, strict=True))}]"

    @classmethod
    def parse(cls, text: str) -> Box:
        """The box that `str` wrote: `Box.parse("[1:4, 2:6]")`."""
        inner = text.strip()
        try:
            if not (inner.startswith("[") and inner.endswith("]")):
                raise ValueError
            inner = inner[1:-1].strip()
            ends = [part.split(":") for part in inner.split(",")] if inner else []
            pairs = [(int(a), int(b)) for a, b in ends]
        except ValueError:
            raise ValueError(f"{text!r} is not a box; write it like [1:4, 2:6]") from None
        return cls(tuple(a for a, _ in pairs), tuple(b for _, b in pairs))

    def _same_dims(self, other: Box) -> None:
        if len(self.start) != len(other.start):
            raise ValueError(
                f"{self} has {len(self.start)} dims and {other} has {len(other.start)}"
            )


@dataclass(frozen=True, order=True)
class Move:
    """`box`, in global coordinates, goes from who has it to who wants it; both may be the same."""

    source: int
    target: int
    box: Box

    def __str__(self) -> str:
        return f"{self.source}->{self.target} {self.box}"

    @classmethod
    def parse(cls, text: str) -> Move:
        """The move that `str` wrote: `Move.parse("0->1 [1:4, 2:6]")`."""
        arrow, _, box = text.strip().partition(" ")
        source, _, target = arrow.partition("->")
        if not (source.isdecimal() and target.isdecimal()):
            raise ValueError(f"{text!r} is not a move; write it like 0->1 [1:4, 2:6]")
        return cls(int(source), int(target), Box.parse(box))


def split_points(length: int, parts: int) -> tuple[int, ...]:
    """The `parts + 1` borders of near-equal parts of `0..length`, the larger ones first.

    `split_points(10, 4)` is `(0, 3, 6, 8, 10)`; with more parts than cells the last ones are empty.
    """
    if parts < 1 or length < 0:
        raise ValueError(f"cannot split a length of {length} into {parts} parts; give 1 or more")
    each, longer = divmod(length, parts)
    return tuple(each * i + min(i, longer) for i in range(parts + 1))


def tiles(shape: Sequence[int], grid: Sequence[int]) -> tuple[Box, ...]:
    """One box per cell of `grid`, row-major; disjoint, and together all of `shape`.

    `tiles((5, 4), (2, 2))`::

        ┌───┬───┐ 0     tile 0 is [0:3, 0:2]
        │ 0 │ 1 │       tile 1 is [0:3, 2:4]
        ├───┼───┤ 3     tile 2 is [3:5, 0:2]
        │ 2 │ 3 │       tile 3 is [3:5, 2:4]
        └───┴───┘ 5
    """
    if len(shape) != len(grid):
        raise ValueError(
            f"shape {tuple(shape)} and grid {tuple(grid)} need as many entries as each other; "
            "put 1 in the grid for a dim that is not split"
        )
    spans = [
        tuple(itertools.pairwise(split_points(length, parts)))
        for length, parts in zip(shape, grid, strict=True)
    ]
    return tuple(
        Box(tuple(a for a, _ in span), tuple(b for _, b in span))
        for span in itertools.product(*spans)
    )


def moves(have: Sequence[Box], want: Sequence[Box]) -> tuple[Move, ...]:
    """Every part of a tensor that must go from rank to rank so that each gets the box it wants.

    Entry i of both lists is rank i's; an empty box where it has or wants nothing. Sorted by source,
    then target. Two ranks of a row, each wanting one cell more than it has (a halo)::

        have     ├──── 0 ────┼──── 1 ────┤          moves:  0->0 [0:3]   1->0 [3:4]
                 0           3           6                  0->1 [2:3]   1->1 [3:6]
        want 0   ├───────────────┤
        want 1           ├───────────────┤

    What several ranks want is copied to each. What several ranks have is delivered once, by the
    rank itself if it can and else by the next one that has it, so that the load spreads. The
    adjoint is thus well defined: the same parts travel back, and the sources add them up.
    Cells nobody has (beyond the image) are nobody's to send, and are left out.
    """
    found = (
        move for target, wanted in enumerate(want) for move in _deliveries(have, wanted, target)
    )
    return tuple(sorted(found))


def moves_of(rank: int, have: Sequence[Box], want: Sequence[Box]) -> tuple[Move, ...]:
    """Those of `moves` that a rank has a part in."""
    mine = have[rank]
    targets = (t for t, wanted in enumerate(want) if t == rank or mine.meets(wanted))
    found = (move for target in targets for move in _deliveries(have, want[target], target))
    return tuple(sorted(move for move in found if rank in (move.source, move.target)))


def _deliveries(have: Sequence[Box], wanted: Box, target: int) -> Iterator[Move]:
    taken: list[Box] = []
    for source in _nearest_first(target, len(have)):
        if not have[source].meets(wanted):
            continue
        part = have[source].intersect(wanted)
        pieces = [part]
        for other in taken:
            pieces = [left for piece in pieces for left in piece.without(other)]
        yield from (Move(source, target, piece) for piece in pieces)
        taken.append(part)


def _nearest_first(rank: int, ranks: int) -> Iterator[int]:
    """`rank`, then the following ones, around the ring."""
    return ((rank + step) % ranks for step in range(ranks))
