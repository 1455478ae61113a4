"""Which rank of a spatial group has which box of a tensor: integers, axis by axis of the grid.

A stage on a grid of tiles has, for every value, one span of cells per row and per
column of the grid: the box of a rank is the product of its row's and its column's spans.

    grid (2, 2)      columns 0:3   3:5
        rows 0:2          tile 0   tile 1        own: disjoint, and cover the tensor
             2:4          tile 2   tile 3        have: what a rank really holds, own and more
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from gems.geometry.box import Box, split_points
from gems.geometry.window import Span, Window

Spans = tuple[tuple[Span, ...], ...]  # axis of the grid -> position along it -> cells


@dataclass(frozen=True)
class Layout:
    """A cut tensor. `dims[k]` is the dim of the tensor that axis k of the grid split_points."""

    shape: tuple[int, ...]
    dims: tuple[int, ...]
    own: Spans
    have: Spans

    @property
    def grid(self) -> tuple[int, ...]:
        return tuple(len(spans) for spans in self.own)

    def boxes(self, spans: Spans | None = None) -> tuple[Box, ...]:
        """The box of every rank, row-major: of what it has, or of other spans."""
        return self._have_boxes if spans in (None, self.have) else self._boxes(spans)

    def own_boxes(self) -> tuple[Box, ...]:
        return self._own_boxes

    @cached_property
    def _have_boxes(self) -> tuple[Box, ...]:
        return self._boxes(self.have)

    @cached_property
    def _own_boxes(self) -> tuple[Box, ...]:
        return self._have_boxes if self.own == self.have else self._boxes(self.own)

    def _boxes(self, spans: Spans) -> tuple[Box, ...]:
        return tuple(self._box(chosen) for chosen in itertools.product(*spans))

    def _box(self, chosen: Sequence[Span]) -> Box:
        start, stop = [0] * len(self.shape), list(self.shape)
        for dim, (a, b) in zip(self.dims, chosen, strict=True):
            start[dim], stop[dim] = a, b
        return Box(tuple(start), tuple(stop))

    def follow(
        self, shape: Sequence[int], dims: Sequence[int], windows: Sequence[Window]
    ) -> Layout:
        """The layout of what a layer makes of this tensor, split where its windows suggest."""
        spans = []
        for mine, dim, window in zip(self.own, dims, windows, strict=True):
            length = shape[dim]
            inner = [min(max(window.follow(b), 0), length) for _, b in mine[:-1]]
            points = (0, *itertools.accumulate(inner, max), length)
            spans.append(tuple(itertools.pairwise(points)))
        own = tuple(spans)
        return Layout(tuple(shape), tuple(dims), own, own)


def even(shape: Sequence[int], dims: Sequence[int], grid: Sequence[int]) -> Layout:
    """A tensor split into near-equal tiles along `dims`."""
    spans = tuple(
        tuple(itertools.pairwise(split_points(shape[dim], parts)))
        for dim, parts in zip(dims, grid, strict=True)
    )
    return Layout(tuple(shape), tuple(dims), spans, spans)


def nested(tiles: Layout, parts: Sequence[int]) -> Layout:
    """The same tensor with every tile split into near-equal parts along each axis."""
    own = tuple(
        tuple(
            (a + low, a + high)
            for a, b in spans
            for low, high in itertools.pairwise(split_points(b - a, count))
        )
        for spans, count in zip(tiles.own, parts, strict=True)
    )
    return Layout(tiles.shape, tiles.dims, own, own)


def together(spans: Spans, parts: Sequence[int]) -> Spans:
    """The spans around every so many in a row, along each axis: of the parts of a tile."""
    return tuple(
        tuple(functools.reduce(hull, row[at : at + n]) for at in range(0, len(row), n))
        for row, n in zip(spans, parts, strict=True)
    )


def layout_like(shape: Sequence[int], layouts: Iterable[Layout]) -> Layout | None:
    """The first of these layouts that also tiles a tensor of this shape."""
    for layout in layouts:
        if len(layout.shape) != len(shape):
            continue
        lengths = [layout.shape[d] for d in layout.dims]
        if max(lengths) > 1 and lengths == [shape[d] for d in layout.dims]:
            return Layout(tuple(shape), layout.dims, layout.own, layout.own)
    return None


def hull(a: Span, b: Span) -> Span:
    """The smallest span around both; an empty one counts for nothing."""
    if a[0] == a[1]:
        return b
    return a if b[0] == b[1] else (min(a[0], b[0]), max(a[1], b[1]))


def hulls(a: Spans, b: Spans) -> Spans:
    return tuple(tuple(map(hull, x, y)) for x, y in zip(a, b, strict=True))


def clip(span: Span, length: int) -> Span:
    """The part of a span that lies in 0..length."""
    low = min(max(span[0], 0), length)
    return low, max(low, min(span[1], length))


def read(spans: Spans, windows: Sequence[Window]) -> Spans:
    """What the outputs in `spans` read, beyond the image's border too; nothing for no outputs."""
    return tuple(
        tuple(window.reads(a, b) if b > a else (0, 0) for a, b in row)
        for row, window in zip(spans, windows, strict=True)
    )


def clipped(spans: Spans, layout: Layout) -> Spans:
    return tuple(
        tuple(clip(span, layout.shape[dim]) for span in row)
        for row, dim in zip(spans, layout.dims, strict=True)
    )


def around(layout: Layout, spans: Spans) -> Iterator[tuple[list[int], tuple[Box, ...]]]:
    """What is read of an image with a circular border, as boxes of it: the offset of each copy of
    the image along the tiled dims, and what every rank reads of that copy."""
    for wraps in itertools.product((0, -1, 1), repeat=len(layout.dims)):
        moved = [wrap * layout.shape[d] for wrap, d in zip(wraps, layout.dims, strict=True)]
        shifted = tuple(
            tuple((a + move, b + move) for a, b in row)
            for row, move in zip(spans, moved, strict=True)
        )
        boxes = layout.boxes(clipped(shifted, layout))
        if not all(box.empty for box in boxes):
            yield moved, boxes


def coordinate(grid: Sequence[int], rank: int) -> tuple[int, ...]:
    """The row, column, ... of a rank in a grid, row-major."""
    found = []
    for axis in range(len(grid)):
        found.append(rank // prod(grid[axis + 1 :]) % grid[axis])
    return tuple(found)
