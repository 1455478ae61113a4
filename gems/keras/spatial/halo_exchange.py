"""Where the ranks of a spatial group talk in the middle of a stage: the local graph ends a segment
there, and Python carries flat tensors to the next. What is cut out of a tile and put together to a
larger one are ops of the local graph, so that TensorFlow differentiates them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import tensorflow as tf

from gems.geometry.box import Box, moves
from gems.keras.spatial.group import SpatialGroup
from gems.keras.tracing.subgraph import Tensor

At = dict[str, Any]


class Communication(Protocol):
    """`given` are tensors of the segments before, `arrivals` placeholders of those behind."""

    @property
    def given(self) -> list[Tensor]: ...

    @property
    def arrivals(self) -> list[Tensor]: ...

    @property
    def grad(self) -> bool:
        """Whether gradients return; the same on every rank."""
        ...

    def forward(self, group: SpatialGroup, at: Mapping[str, Any]) -> At: ...

    def backward(self, group: SpatialGroup, gradients: Mapping[str, Any]) -> At:
        """Gradients of `given`, of those of `arrivals`, by name."""
        ...


@dataclass(frozen=True)
class AllReduce:
    """The sum over the group. The gradient of a summand is the sum of all ranks' gradients."""

    value: Tensor
    arrival: Tensor
    grad: bool

    @property
    def given(self) -> list[Tensor]:
        return [self.value]

    @property
    def arrivals(self) -> list[Tensor]:
        return [self.arrival]

    def forward(self, group: SpatialGroup, at: Mapping[str, Any]) -> At:
        return {self.arrival.name: group.all_reduce(at[self.value.name])}

    def backward(self, group: SpatialGroup, gradients: Mapping[str, Any]) -> At:
        return {self.value.name: group.all_reduce(gradients[self.arrival.name])}


@dataclass(frozen=True)
class AllGather:
    """The values of all ranks along a new first dim, without a gradient."""

    value: Tensor
    arrival: Tensor
    grad: bool = False

    @property
    def given(self) -> list[Tensor]:
        return [self.value]

    @property
    def arrivals(self) -> list[Tensor]:
        return [self.arrival]

    def forward(self, group: SpatialGroup, at: Mapping[str, Any]) -> At:
        return {self.arrival.name: tf.stack(group.all_gather(at[self.value.name]))}

    def backward(self, group: SpatialGroup, gradients: Mapping[str, Any]) -> At:
        raise AssertionError("an all-gather has no gradient")


@dataclass(frozen=True)
class HaloExchange:
    """Flat tensors to and from other members: boxes of a tiled value, one after the other."""

    dtype: Any
    sends: dict[int, Tensor]
    receives: dict[int, Tensor]  # placeholders
    grad: bool

    @property
    def given(self) -> list[Tensor]:
        return list(self.sends.values())

    @property
    def arrivals(self) -> list[Tensor]:
        return list(self.receives.values())

    def forward(self, group: SpatialGroup, at: Mapping[str, Any]) -> At:
        return _carry(group, self.sends, self.receives, at, self.dtype)

    def backward(self, group: SpatialGroup, gradients: Mapping[str, Any]) -> At:
        return _carry(group, self.receives, self.sends, gradients, self.dtype)


def _carry(
    group: SpatialGroup,
    sends: Mapping[int, Tensor],
    receives: Mapping[int, Tensor],
    at: Mapping[str, Any],
    dtype: Any,
) -> At:
    given = {m: at[t.name] for m, t in sends.items()}
    counts = {m: t.shape[0] for m, t in receives.items()}
    found = group.exchange(given, counts, dtype)
    return {receives[m].name: x for m, x in found.items()}


# --- boxes, as ops of the local graph -------------------------------------------------------------


@dataclass(frozen=True)
class Halo:
    """What this rank wants of a value that is in pieces: its own, and what others send."""

    want: Box
    own: Box  # this rank's cells of the value
    here: list[Box]  # the pieces of `want` that are its own
    sends: dict[int, list[Box]] = field(default_factory=dict)
    receives: dict[int, list[Box]] = field(default_factory=dict)


def halo(have: Sequence[Box], want: Sequence[Box], me: int) -> Halo:
    """This rank's part of an exchange. What ranks have is disjoint."""
    found = Halo(want[me], have[me], [])
    for move in moves(have, want):
        if move.source == me == move.target:
            found.here.append(move.box)
        elif move.source == me:
            found.sends.setdefault(move.target, []).append(move.box)
        elif move.target == me:
            found.receives.setdefault(move.source, []).append(move.box)
    return found


def sliced(x: Tensor, box: Box, frame: Box) -> Tensor:
    """The cells of `box` out of a tensor of those of `frame`."""
    if box == frame:
        return x
    if box.empty:
        return tf.zeros(box.shape, x.dtype)
    return tf.slice(x, box.relative_to(frame).start, box.shape)


def flat(x: Tensor, boxes: Sequence[Box], frame: Box) -> Tensor:
    """The cells of some boxes, one after the other."""
    parts = [tf.reshape(sliced(x, box, frame), [-1]) for box in boxes]
    return parts[0] if len(parts) == 1 else tf.concat(parts, 0)


def unflat(x: Tensor, boxes: Sequence[Box]) -> Iterator[tuple[Box, Tensor]]:
    """The inverse: each box with its cells."""
    if len(boxes) == 1:
        yield boxes[0], tf.reshape(x, boxes[0].shape)
        return
    parts = tf.split(x, [box.size for box in boxes])
    for box, part in zip(boxes, parts, strict=True):
        yield box, tf.reshape(part, box.shape)


def assembled(want: Box, pieces: Mapping[Box, Tensor], dims: Sequence[int]) -> Tensor:
    """A box of its pieces, which lie in rows and columns."""
    if not dims:
        return pieces[want]
    dim, *rest = dims
    cuts = sorted({c for box in pieces for c in (box.start[dim], box.stop[dim])})
    rows = []
    for low, high in pairwise(cuts):
        row = {
            box: t for box, t in pieces.items() if (box.start[dim], box.stop[dim]) == (low, high)
        }
        start = (*want.start[:dim], low, *want.start[dim + 1 :])
        stop = (*want.stop[:dim], high, *want.stop[dim + 1 :])
        rows.append(assembled(Box(start, stop), row, rest))
    return rows[0] if len(rows) == 1 else tf.concat(rows, dim)
