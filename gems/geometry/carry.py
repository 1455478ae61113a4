"""Where the patches of an image are cut so that none reads a later one: integers, axis by axis.

Patches of a tile run in order, and each hands on what later ones read of it. So a value is cut
where the last output is whose window ends before the cut of the input:

    input     ├──────── 4 ──────── 8 ────────┤       kernel 3: output 3 reads input 4,
    output    ├────── 3 ──────── 7 ──────────┤       which the next patch makes

A cut moves back with every layer; what a patch then reads of earlier ones is its halo.
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
