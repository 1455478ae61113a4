"""A sweep whose patches hand halos on: each cell is computed once, by one patch of a tile.

    recompute   each patch has what is read of it, so halos are computed again by the neighbours
    carry       a patch has its own cells, cut so that it reads earlier patches only (carry.py)

What enters a sweep is read as boxes, with all that a patch reads of it. Between tiles it is as in
`recompute`: the patches at the edge of a tile compute what is read beyond it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from gems.geometry.carry import (
    Points,
    behind,
    carried,
    causal,
    inside,
    latest,
    moved_on,
    patches_of,
    points_of,
    shared,
)
from gems.geometry.layout import Layout, Spans, clip, clipped, hulls, read, together
from gems.geometry.window import Span
from gems.torch.spatial.partition import CallNotTileable, StageLayout, widen
from gems.torch.spatial.rule import OWN, Rule

Shape = Sequence[int]


def lay_out_carried(laid: StageLayout, parts: Sequence[int], later: Collection[str]) -> StageLayout:
    """The same calls and values, cut so that patches carry; `later` are the values read after."""
    made = {name for call in laid.calls for name in call.writes}
    entering = {name for name in laid.layouts if name not in made}
    tiles = _tiles(laid, parts, entering, made.intersection(later))
    cuts = _Cuts(laid, parts, made)
    layouts = dict(laid.layouts)
    for name in made & layouts.keys():
        have, own = (patches_of(cuts.points[name], s) for s in (tiles[name].have, tiles[name].own))
        layouts[name] = replace(layouts[name], own=own, have=have)
    boxes: dict[str, Spans] = {}
    wants: list[dict[str, Spans]] = []
    for at, rule in enumerate(laid.rules):
        row: dict[str, Spans] = {}
        for name, windows in rule.windows.items() if rule else ():
            assert rule is not None
            if windows == OWN:
                row[name] = patches_of(cuts.joined[at][name], tiles[name].own)
            else:
                row[name] = read(layouts[next(iter(rule.outs))].have, windows)
            here = clipped(row[name], layouts[name])
            if name in entering:
                boxes[name] = hulls(boxes[name], here) if name in boxes else here
            else:
                assert causal(layouts[name].have, here), "a patch would read a later one"
        wants.append(row)
    layouts.update({name: replace(layouts[name], have=have) for name, have in boxes.items()})
    return replace(laid, layouts=layouts, wants=wants)


def _tiles(
    laid: StageLayout, parts: Sequence[int], entering: set[str], wanted: set[str]
) -> dict[str, Layout]:
    """What each tile has of every value: all that its patches have together."""
    whole = {}
    for name, x in laid.layouts.items():
        own = together(x.own, parts)
        whole[name] = replace(x, own=own, have=own)
    tiles = StageLayout(laid.calls, laid.ops, laid.rules, whole)
    widen(tiles, entering, set(), len(laid.calls) + 1, wanted)
    return tiles.layouts


class _Cuts:
    """Where the patches of each value are cut. `joined` has where calls that sum over their own
    cells cut what they read: all at the same places, so that the later ones wait."""

    def __init__(self, laid: StageLayout, parts: Sequence[int], made: Collection[str]) -> None:
        self.laid, self.parts, self.made = laid, parts, made
        self.layouts = laid.layouts
        self.late: list[float] = [0.0] * len(parts)  # along each axis
        self._cut()
        self.late = [self._behind(axis) for axis in range(len(parts))]
        if any(self.late):
            self._cut()

    def _cut(self) -> None:
        laid = self.laid
        self.points: dict[str, Points] = {}
        self.joined: list[dict[str, Points]] = []
        for call, op, rule in zip(laid.calls, laid.ops, laid.rules, strict=True):
            mine = {n: w for n, w in rule.windows.items() if n in self.made} if rule else {}
            own = {n: w for n, w in rule.windows.items() if w == OWN} if rule else {}
            self.joined.append(self._alike(own, mine))
            for name in rule.outs if rule else ():
                assert rule is not None
                self.points[name] = self._out(rule, name, mine)
            for old, new in call.mutates:
                if old in mine and new and self.points[new] != self.points[old]:
                    raise CallNotTileable(
                        call, op.name,
                        f"changes {old} in place, of which patches have made more than of what it "
                        "is combined with; give the result as a new tensor, or use "
                        "stream_halo='recompute'",
                    )  # fmt: skip

    def _out(self, rule: Rule, name: str, mine: Mapping[str, object]) -> Points:
        """Of a result: as late as the latest input. What is made of boxes only is free."""
        if not mine:
            return self._free(name)
        outputs = self._lengths(name)
        return latest(
            carried(self.points[n], rule.windows[n], self._lengths(n), outputs) for n in mine
        )

    def _alike(self, own: Mapping[str, object], mine: Mapping[str, object]) -> dict[str, Points]:
        if not mine:
            return {name: self._even(name) for name in own}
        return dict.fromkeys(own, latest(self.points[n] for n in mine)) if own else {}

    def _even(self, name: str) -> Points:
        return points_of(self.layouts[name].own, self.parts)

    def _free(self, name: str) -> Points:
        lengths = self._lengths(name)
        return tuple(
            tuple(moved_on(tile, late, n, self._least(axis)) for tile in row)
            for axis, (row, late, n) in enumerate(
                zip(self._even(name), self.late, lengths, strict=True)
            )
        )

    def _behind(self, axis: int) -> float:
        return behind(
            (even, points, self._lengths(name)[axis])
            for name, found in self.points.items()
            for even, points in zip(self._even(name)[axis], found[axis], strict=True)
        )

    def _least(self, axis: int) -> int:
        """The fewest cells of a value along an axis."""
        return min(self._lengths(n)[axis] for n in self.made if n in self.layouts)

    def _lengths(self, name: str) -> list[int]:
        layout = self.layouts[name]
        return [layout.shape[d] for d in layout.dims]


def one_tile(laid: StageLayout, places: Sequence[range]) -> StageLayout:
    """Patches next to each other by themselves: of one tile, or around one of them."""

    def mine(spans: Spans) -> Spans:
        return tuple(row[at.start : at.stop] for row, at in zip(spans, places, strict=True))

    layouts = {n: replace(x, own=mine(x.own), have=mine(x.have)) for n, x in laid.layouts.items()}
    wants = [{name: mine(spans) for name, spans in row.items()} for row in laid.wants]
    return replace(laid, layouts=layouts, wants=wants)


def carrying(laid: StageLayout) -> set[str]:
    """The calls of a tile whose patches exchange halos."""
    axes = range(len(next(iter(laid.layouts.values())).own)) if laid.layouts else ()
    return {
        call.name
        for call, row in zip(laid.calls, laid.wants, strict=True)
        if any(_rows(laid, name, spans, axis) for name, spans in row.items() for axis in axes)
    }


def near(laid: StageLayout, axis: int, at: int) -> range:
    """The patches along an axis with which one exchanges halos, itself among them."""
    others = [0, *(cells[1] for cells in exchanged(laid, axis, at) if cells)]
    return range(at + min(others), at + max(others) + 1)


def exchanged(laid: StageLayout, axis: int, at: int) -> list[tuple[int, ...]]:
    """What a patch exchanges along one axis, as it sees it: with whom, and which cells."""
    found: list[tuple[int, ...]] = []
    for name, wants in (pair for row in laid.wants for pair in row.items()):
        if (rows := _rows(laid, name, wants, axis)) is not None:
            have, want = rows
            first = have[at][0]
            found += [
                (way, other - at, cells[0] - first, cells[1] - first)
                for way, other, cells in _shares(have, want, at)
            ]
            found.append(())
    return found


def _rows(
    laid: StageLayout, name: str, wants: Spans, axis: int
) -> tuple[Sequence[Span], Sequence[Span]] | None:
    """What the patches along an axis have and want of a value, if any wants what others have."""
    layout = laid.layouts[name]
    have, length = layout.have[axis], layout.shape[layout.dims[axis]]
    want = [clip(span, length) for span in wants[axis]]
    alone = all(inside(w, h) for w, h in zip(want, have, strict=True))
    return None if alone else (have, want)


def _shares(have: Sequence[Span], want: Sequence[Span], at: int) -> Iterator[tuple[int, int, Span]]:
    """Cells that a patch wants of earlier ones (0), and those of it that later ones want (1). At a
    border that is reflected the next but one may want some, and the next none."""
    for other in range(len(have)):
        way = int(other > at)
        cells = shared(have[at], want[other]) if way else shared(have[other], want[at])
        if cells is not None and other != at:
            yield way, other, cells
