"""What patches that carry take: each cell is made once, and halos are handed on and saved.

Along each axis of the grid values are cut as the runtime cuts them (gems/geometry/carry.py); boxes
are products of these spans, and so are sums over patches: nothing here counts them one by one.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from gems.geometry.box import split_points
from gems.geometry.carry import behind, moved_on, ready, shared
from gems.geometry.layout import clip, hull
from gems.geometry.window import Line, Span
from gems.model.graph import Flow, Graph

Row = list[Span]  # of each patch along an axis
FEW = (
    8  # patches along an axis that are all looked at; of more, those at both ends and a middle one
)


def length(span: Span) -> int:
    return span[1] - span[0]


def _both(a: Span, b: Span) -> int:
    """How many cells both have."""
    return length(shared(a, b) or (0, 0))


def _taken(have: Row, wants: Row) -> tuple[int, ...]:
    """How many cells of each patch all read together: it, and the next ones."""
    found = []
    for at, mine in enumerate(have):
        readers = itertools.takewhile(lambda s, mine=mine: s[0] < mine[1], wants[at:])
        found.append(sum(_both(want, mine) for want in readers) if length(mine) else 0)
    return tuple(found)


@dataclass(frozen=True)
class _Read:
    """Cells that a call reads of a value along an axis, patch by patch: all of them, those that the
    patch has itself, and those of the patch that any patch reads."""

    wants: tuple[int, ...]
    local: tuple[int, ...]
    taken: tuple[int, ...]


class _Axis:
    """The values of a sweep along one axis, in the middle one of the tiles."""

    def __init__(
        self, flows: Sequence[Flow], dim: int, tiles: int, parts: int, wanted: Collection[str]
    ) -> None:
        self.flows, self.dim, self.parts = flows, dim, parts
        self.lengths = {name: n[dim] for flow in flows for name, n, _ in flow.sizes}
        at = (tiles - 1) // 2  # its last patch computes what is read beyond the tile
        self.own = {}
        for name, n in self.lengths.items():
            points = split_points(n, tiles)
            self.own[name] = points[at], points[at + 1]
        self.made = {name for flow in flows for name in flow.writes}
        tile = self._tile(wanted)
        self.late = 0.0
        points = self._points()
        cuts = ((self._even(n), row, self.lengths[n]) for n, row in points.items())
        self.late = behind(cuts)
        if self.late:
            points = self._points()
        self.have: dict[str, Row] = {n: self._row(points[n], tile[n]) for n in self.made}
        self.reads: list[dict[str, _Read]] = []
        self.spans: dict[tuple[int, str], Row] = {}  # what each patch reads, for a call and a value
        self._read(points, tile)

    def between(self, flow: int, name: str, source: int, target: int) -> int:
        """Cells of one patch that another reads."""
        return _both(self.have[name][source], self.spans[flow, name][target])

    def window(self, windows: tuple[Line, ...] | None) -> Line | None:
        return None if windows is None else windows[self.dim]

    def _tile(self, wanted: Collection[str]) -> dict[str, Span]:
        """What the tile has of every value."""
        have = {n: span if n in wanted else (0, 0) for n, span in self.own.items()}
        for flow in reversed(self.flows):
            out = (0, 0)
            for name in flow.writes:
                out = hull(out, have[name])
            for name, windows in flow.reads:
                window = self.window(windows)
                if window is None:
                    want = self.own[name]
                else:
                    want = window.reads(*out) if length(out) else (0, 0)
                have[name] = hull(have[name], clip(want, self.lengths[name]))
        return have

    def _points(self) -> dict[str, list[int]]:
        """Where the patches of each value are cut."""
        found: dict[str, list[int]] = {}
        for flow in self.flows:
            mine = [(n, self.window(w)) for n, w in flow.reads if n in found]
            for name in flow.writes:
                rows = [self._free(name)]
                if mine:
                    rows = [
                        [ready(w, c, self.lengths[n], self.lengths[name]) for c in found[n]]
                        for n, w in mine
                        if w is not None
                    ]
                found[name] = [min(row) for row in zip(*rows, strict=True)]
        return found

    def _free(self, name: str) -> Sequence[int]:
        least = min(self.lengths[n] for n in self.made)
        return moved_on(self._even(name), self.late, self.lengths[name], least)

    def _even(self, name: str) -> list[int]:
        low, high = self.own[name]
        return [low + c for c in split_points(high - low, self.parts)[1:-1]]

    def _row(self, points: Sequence[int], tile: Span) -> Row:
        low, high = tile
        return list(itertools.pairwise((low, *(min(max(c, low), high) for c in points), high)))

    def _read(self, points: Mapping[str, list[int]], tile: Mapping[str, Span]) -> None:
        for at, flow in enumerate(self.flows):
            row: dict[str, _Read] = {}
            out = self.have[flow.writes[0]] if flow.writes else []
            for name, windows in flow.reads:
                window = self.window(windows)
                if window is not None and out:
                    wants = [window.reads(*s) if length(s) else (0, 0) for s in out]
                else:
                    cut = points.get(name) or self._even(name)
                    wants = self._row(cut, self.own[name])
                wants = [clip(s, self.lengths[name]) for s in wants]
                if name not in self.made:
                    before = self.have.get(name, [(0, 0)] * self.parts)
                    self.have[name] = [hull(a, b) for a, b in zip(before, wants, strict=True)]
                    continue
                have = self.have[name]
                local = (_both(a, b) for a, b in zip(wants, have, strict=True))
                row[name] = _Read(tuple(map(length, wants)), tuple(local), _taken(have, wants))
                self.spans[at, name] = wants
            self.reads.append(row)


class CarriedSweep:
    """A sweep of a streamed stage whose patches carry: on each of some `tiles`, `parts` patches.
    `wanted` are the values that are read after it."""

    def __init__(
        self, graph: Graph, blocks: Sequence[int], made: Mapping[str, int], at: int,
        tiles: Sequence[int], parts: Sequence[int], wanted: Collection[str],
    ) -> None:  # fmt: skip
        self.graph, self.blocks = graph, blocks
        flows = [
            Flow(f.reads, tuple(n for n in f.writes if made.get(n, at) == at), f.sizes)
            for i in blocks
            for f in graph.blocks[i].flows
        ]
        self.flows, self.parts = flows, tuple(parts)
        self.bytes = {name: size for flow in flows for name, _, size in flow.sizes}
        dims = max((len(n) for flow in flows for _, n, _ in flow.sizes), default=0)
        first = dims - len(self.parts)
        self.axes = [
            _Axis(flows, first + axis, t, n, wanted)
            for axis, (t, n) in enumerate(zip(tiles, parts, strict=True))
        ]
        self.halos = sum(self._halos())
        self.places = list(itertools.product(*map(_some, self.parts)))

    # --- patches ----------------------------------------------------------------------------------

    def share(self, name: str, place: Sequence[int]) -> float:
        """The part of a value that a patch has."""
        found = 1.0
        for axis, at in zip(self.axes, place, strict=True):
            if name in axis.have:
                found *= length(axis.have[name][at]) / max(axis.lengths[name], 1)
        return found

    def largest(self, name: str) -> float:
        return max(self.share(name, place) for place in self.places)

    def all_of(self, name: str) -> float:
        """The part of a value that the patches of a tile have together."""
        found = 1.0
        for axis in self.axes:
            if name in axis.have:
                cells = sum(map(length, axis.have[name]))
                found *= cells / max(axis.lengths[name], 1)
        return found

    def image(self, block: int) -> str:
        """The largest image that a block makes, or else reads."""
        one = self.graph.blocks[block]
        for names in (one.writes, one.reads):
            if known := [n for n in names if n in self.bytes and n in self.axes[0].have]:
                return max(known, key=self.bytes.__getitem__)
        return ""

    # --- halos -----------------------------------------------------------------------------------

    def _halos(self) -> list[float]:
        """Bytes of all halos that each call takes."""
        found = []
        for at in range(len(self.flows)):
            for name in self.axes[0].reads[at]:
                rows = [axis.reads[at][name] for axis in self.axes]
                found.append(self._size(name) * (_all(rows, "wants") - _all(rows, "local")))
        return found

    def _size(self, name: str) -> float:
        """Bytes of a value for a cell of the grid's dims."""
        return self.bytes[name] / max(prod(axis.lengths[name] for axis in self.axes), 1)

    def beyond(self, place: Sequence[int]) -> float:
        """Bytes of gradients of halos that wait before or after a patch runs backward, without
        the halos of the patches behind it, which are gone by then."""
        before = after = 0.0
        for at in range(len(self.flows)):
            for name in self.axes[0].reads[at]:
                rows = [axis.reads[at][name] for axis in self.axes]
                wants, taken, local = (
                    _from(rows, what, place, beyond=True) for what in ("wants", "taken", "local")
                )
                gone = wants - local
                before += self._size(name) * (wants - taken - gone)
                wants, taken = (_from(rows, x, place, beyond=False) for x in ("wants", "taken"))
                after += self._size(name) * (wants - taken - gone)
        return max(before, after)

    def beyond_store(self, place: Sequence[int]) -> float:
        """The same if halos are in a store: those of a patch, and of the one that follows in
        backward, which are being read; and gradients of both."""
        before = self._before(place)
        mine, given = self._moved(place)
        found = mine + max(mine, given)
        if before is None:
            return found
        found += sum(self._moved(before))
        return found - self._between(before, place)

    def _before(self, place: Sequence[int]) -> tuple[int, ...] | None:
        """The patch before one, row-major."""
        found = list(place)
        for axis in reversed(range(len(found))):
            if found[axis]:
                found[axis] -= 1
                return tuple(found)
            found[axis] = self.parts[axis] - 1
        return None

    def _moved(self, place: Sequence[int]) -> tuple[float, float]:
        """Bytes of the halos that a patch takes, and of those that it gives."""
        taken = given = 0.0
        for at in range(len(self.flows)):
            for name in self.axes[0].reads[at]:
                rows = [axis.reads[at][name] for axis in self.axes]
                wants, has, gives = (
                    prod(getattr(row, what)[k] for row, k in zip(rows, place, strict=True))
                    for what in ("wants", "local", "taken")
                )
                taken += self._size(name) * (wants - has)
                given += self._size(name) * (gives - has)
        return taken, given

    def _between(self, before: Sequence[int], place: Sequence[int]) -> float:
        """Bytes of the halos that one patch gives to the next."""
        found = 0.0
        for at, flow in enumerate(self.flows):
            for name, _ in flow.reads:
                if name in self.axes[0].reads[at]:
                    cells = 1
                    for axis, a, b in zip(self.axes, before, place, strict=True):
                        cells *= axis.between(at, name, a, b)
                    found += self._size(name) * cells
        return found


def _some(parts: int) -> Sequence[int]:
    """The patches of an axis to look at."""
    return range(parts) if parts <= FEW else (0, 1, 2, parts // 2, parts - 3, parts - 2, parts - 1)


def _all(rows: Sequence[_Read], what: str) -> int:
    return prod(sum(getattr(row, what)) for row in rows)


def _from(rows: Sequence[_Read], what: str, place: Sequence[int], *, beyond: bool) -> int:
    """Cells of a patch and those behind it, row-major; of those `beyond` it only."""
    cells = [getattr(row, what) for row in rows]
    found = 0 if beyond else prod(c[at] for c, at in zip(cells, place, strict=True))
    for axis, at in enumerate(place):
        before = prod(cells[k][place[k]] for k in range(axis))
        after = prod(sum(row) for row in cells[axis + 1 :])
        found += before * sum(cells[axis][at + 1 :]) * after
    return found
