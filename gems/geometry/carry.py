"""Where the patches of an image are cut so that none reads a later one: integers, axis by axis.

Patches of a tile run in order, and each hands on what later ones read of it. So a value is cut
where the last output is whose window ends before the cut of the input:

    input     ├──────── 4 ──────── 8 ────────┤       kernel 3: output 3 reads input 4,
    output    ├────── 3 ──────── 7 ──────────┤       which the next patch makes

A cut moves back with every layer; what a patch then reads of earlier ones is its halo. So the last
patch would be the largest by far: the first cut, which is free, is moved on by half of that way.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from gems.geometry.layout import Spans
from gems.geometry.window import Span, Window

Points = tuple[tuple[tuple[int, ...], ...], ...]  # axis -> tile -> where its patches are cut


def points_of(spans: Spans, parts: Sequence[int]) -> Points:
    """Where the patches at these spans are cut, `parts` in each tile."""
    return tuple(
        tuple(tuple(b for _, b in row[at : at + n - 1]) for at in range(0, len(row), n))
        for row, n in zip(spans, parts, strict=True)
    )


def ready(window: Window, c: int, length: int, outputs: int) -> int:
    """How many of the first `outputs` can be made of the inputs before c, of `length`."""
    if c >= length:
        return outputs
    low, high = 0, outputs
    while low < high:
        middle = (low + high + 1) // 2
        if window.reads(0, middle)[1] <= c:
            low = middle
        else:
            high = middle - 1
    return low


def carried(
    points: Points, windows: Sequence[Window], lengths: Sequence[int], outputs: Sequence[int]
) -> Points:
    """Where what a layer makes is cut, if its input is cut at these points."""
    return tuple(
        tuple(tuple(ready(window, c, n, m) for c in tile) for tile in row)
        for row, window, n, m in zip(points, windows, lengths, outputs, strict=True)
    )


def latest(several: Iterable[Points]) -> Points:
    """The cut of what has come no further than any of these: the least of each point."""
    first, *rest = several
    for other in rest:
        first = tuple(
            tuple(tuple(map(min, mine, theirs)) for mine, theirs in zip(row, beside, strict=True))
            for row, beside in zip(first, other, strict=True)
        )
    return first


def behind(cuts: Iterable[tuple[Sequence[int], Sequence[int], int]]) -> float:
    """How far the last cut lies behind an even one, as a part of the image: of the even cuts, those
    that there are, and the length, of every value along an axis."""
    late = (
        (a - b) / max(n, 1) for even, points, n in cuts for a, b in zip(even, points, strict=True)
    )
    return max(late, default=0.0)


def moved_on(points: Iterable[int], late: float, length: int, least: int) -> tuple[int, ...]:
    """A cut half of that way before an even one. Values of fewer cells, `least` of them, are cut at
    as many whole cells further on, so that patches stay alike."""
    step = max(length // max(least, 1), 1)
    by = int(late / 2 * length) // step * step
    return tuple(min(c + by, length) for c in points)


def patches_of(points: Points, tiles: Spans) -> Spans:
    """The spans of all patches, where each tile has these cells."""
    found = []
    for row, spans in zip(points, tiles, strict=True):
        patches = []
        for inner, (low, high) in zip(row, spans, strict=True):
            stops = (min(max(c, low), high) for c in inner)
            patches += itertools.pairwise((low, *stops, high))
        found.append(tuple(patches))
    return tuple(found)


def causal(have: Spans, want: Spans) -> bool:
    """Whether every patch wants, along each axis, nothing behind what it has itself."""
    return all(
        want_stop <= have_stop or want_start == want_stop
        for row, wanted in zip(have, want, strict=True)
        for (_, have_stop), (want_start, want_stop) in zip(row, wanted, strict=True)
    )


def shared(a: Span, b: Span) -> Span | None:
    """The cells of both spans, if there are any."""
    low, high = max(a[0], b[0]), min(a[1], b[1])
    return (low, high) if low < high else None


def inside(a: Span, b: Span) -> bool:
    """Whether b has all cells of a."""
    return a[0] == a[1] or (b[0] <= a[0] and a[1] <= b[1])
