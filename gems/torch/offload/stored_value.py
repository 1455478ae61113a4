"""A value in a store, on the host or on disk, of which boxes are read and written.

What streamed stages hand each other is never whole on the device: a patch reads the box that it
needs, and writes the box that it makes. So that few copies make a box, a value is stored in panels,
with the cells of a row of the image together:

    image   c0 ├──────┬──────┤ c2         panel 0: row 0, row 1, ...; panel 1: row 0, row 1, ...
            r0 │ 0  0 │ 1  1 │
            r1 │ 0  0 │ 1  1 │            a box is a run of rows of each panel that it meets,
            r2 │ 0  0 │ 1  1 │            hence one read or write for each

Rows that nobody has written yet are zeros, so that a gradient is summed box by box in any order.
Reads may begin before they are needed, and writes go on behind the caller. The values of a rank
belong to it: a value that nobody holds any more gives its space back.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from math import prod

import torch

from gems.geometry.box import Box, split_points
from gems.model.graph import Value
from gems.torch.offload.stores import Slot, Store
from gems.torch.tensors.strides import strided, tile_strides
from gems.transport.protocol import Work

Tensor = torch.Tensor
PANELS = 4  # in the width of a patch: little of what a box does not need is read with it


class ValueStore:
    """The values of one rank that are in a store. Messages use it from threads of their own."""

    def __init__(self, store: Store, device: torch.device) -> None:
        self.store, self.device = store, device
        self.lock = threading.Lock()
        self.given_up: deque[tuple[Slot, list[PendingWrite]]] = deque()

    @property
    def used(self) -> int:
        with self.lock:
            self._free()
        return self.store.used

    def make(
        self, value: Value, dims: Sequence[int], parts: Sequence[int], frame: Box | None = None
    ) -> StoredValue:
        """Space for a value, or for its `frame`, whose `dims` are run in so many `parts`."""
        frame = Box.whole(value.shape) if frame is None else frame
        return StoredValue(self, value, frame, tuple(dims), tuple(parts))

    def like(self, value: StoredValue) -> StoredValue:
        """Space for another one of the same form: for a gradient."""
        return StoredValue(self, value.value, value.frame, value.dims, value.parts)

    def slot(self, size: int) -> Slot:
        with self.lock:
            self._free()
            return self.store.slot(size)

    def give_up(self, slot: Slot, pending: list[PendingWrite]) -> None:
        """Nobody can ask for it any more. A garbage collection may come in the middle of anything,
        on any thread, so that this takes no lock and waits for nothing."""
        self.given_up.append((slot, pending))

    def _free(self) -> None:
        """Take back the space that was given up; what is still being written there is of no use,
        nor why it failed."""
        while self.given_up:
            slot, pending = self.given_up.popleft()
            for write in pending:
                with suppress(Exception):
                    write.work.wait()
            slot.free()


class _Panel:
    """Some columns of a value: `columns` of each dim but the first of the image."""

    def __init__(self, box: Box, at: int, rows: int) -> None:
        self.box, self.at = box, at  # its cells; its first byte
        self.written = bytearray(rows)

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The runs of rows among these that were written."""
        while (first := self.written.find(1, start, stop)) >= 0:
            end = self.written.find(0, first, stop)
            start = stop if end < 0 else end
            yield first, start


class PendingWrite:
    """A write in the background, with the memory that it reads."""

    def __init__(self, work: Work, buffer: Tensor) -> None:
        self.work, self.buffer = work, buffer


class StoredValue:
    """One value, or its gradient. Boxes are counted from the first cell of `frame`, like slices of
    a tensor that has the frame only."""

    def __init__(
        self,
        values: ValueStore,
        value: Value,
        frame: Box,
        dims: tuple[int, ...],
        parts: tuple[int, ...],
    ) -> None:
        self.values, self.value, self.frame = values, value, frame
        self.dims, self.parts = dims, parts
        self.shape, self.dtype = frame.shape, getattr(torch, value.dtype)
        self.first, others = dims[0], tuple(zip(dims, parts, strict=True))[1:]
        self.rows = self.shape[self.first]
        self.panels: list[_Panel] = []
        itemsize, at = self.dtype.itemsize, 0
        cuts = [split_points(self.shape[d], min(PANELS * n, self.shape[d]) or 1) for d, n in others]
        for spans in itertools.product(*map(itertools.pairwise, cuts)):
            start, stop = [0] * len(self.shape), list(self.shape)
            for (dim, _), (a, b) in zip(others, spans, strict=True):
                start[dim], stop[dim] = a, b
            panel = _Panel(Box(tuple(start), tuple(stop)), at, self.rows)
            self.panels.append(panel)
            at += panel.box.size * itemsize
        self.nbytes = at
        self.slot = values.slot(at)
        self.pending: list[PendingWrite] = []
        weakref.finalize(self, values.give_up, self.slot, self.pending).atexit = False

    def __repr__(self) -> str:
        return f"StoredValue({self.value.name}, {self.shape}, {self.value.dtype})"

    @property
    def written(self) -> bool:
        """Whether any of it is."""
        return any(any(panel.written) for panel in self.panels)

    # --- reading ----------------------------------------------------------------------------------

    def begin(self, box: Box | None, device: torch.device | None = None) -> Reading:
        """Begin to read a box, or all, to the device of the rank or to another."""
        whole = Box.whole(self.shape)
        return Reading(self, whole if box is None else box, device or self.values.device)

    # --- writing ----------------------------------------------------------------------------------

    def write(self, box: Box, part: Tensor) -> None:
        """Write a box, in the background."""
        self.settle()  # not more in flight than one box
        for panel, inside in self.overlapping(box):
            whole = self.rows_of(panel, inside)
            mine = part[inside.relative_to(box).slices()]
            if inside == whole:
                buffer = self._row_major(mine)
            else:  # the other cells of its rows stay
                buffer = self._load(panel, inside, part.device)
                here = inside.relative_to(whole).slices()
                self.cells(buffer, whole.shape)[here] = mine
            self._store(panel, inside, buffer)

    def add(self, reading: Reading, part: Tensor) -> None:
        """Add to the cells of a box that is being read."""
        self.write(reading.box, reading.finish().add_(part))

    def settle(self) -> None:
        """Wait for all writes."""
        while self.pending:
            self.pending.pop().work.wait()

    # --- panels -----------------------------------------------------------------------------------

    def overlapping(self, box: Box) -> Iterator[tuple[_Panel, Box]]:
        """The panels that a box overlaps, and the cells of each."""
        for panel in self.panels:
            if panel.box.meets(box):
                yield panel, panel.box.intersect(box)

    def rows_of(self, panel: _Panel, inside: Box) -> Box:
        """All cells of the rows of a panel in which a box lies."""
        start, stop = list(panel.box.start), list(panel.box.stop)
        start[self.first], stop[self.first] = inside.start[self.first], inside.stop[self.first]
        return Box(tuple(start), tuple(stop))

    def _row_bytes(self, panel: _Panel) -> int:
        return panel.box.size // max(self.rows, 1) * self.dtype.itemsize

    def _row_major(self, part: Tensor) -> Tensor:
        """Cells with those of a row together, in memory of their own."""
        moved = part.detach().movedim(self.first, 0)
        return torch.empty(moved.shape, dtype=self.dtype, device=part.device).copy_(moved)

    def cells(self, buffer: Tensor, shape: Sequence[int]) -> Tensor:
        """Such memory in the form of the value."""
        rest = [n for d, n in enumerate(shape) if d != self.first]
        return buffer.view(shape[self.first], *rest).movedim(0, self.first)

    def _load(self, panel: _Panel, inside: Box, device: torch.device) -> Tensor:
        """The rows of a panel in which a box lies, now."""
        buffer, works = self.fetch(panel, inside, device)
        for work in works:
            work.wait()
        return buffer

    def fetch(self, panel: _Panel, inside: Box, device: torch.device) -> tuple[Tensor, list[Work]]:
        """Memory for the rows of a panel, which are being read. What follows on the same slot comes
        after what was asked of it before."""
        a, b = inside.start[self.first], inside.stop[self.first]
        shape = (b - a, panel.box.size // max(self.rows, 1))
        runs = list(panel.runs(a, b))
        make = torch.empty if runs == [(a, b)] else torch.zeros
        buffer, size = make(shape, dtype=self.dtype, device=device), self._row_bytes(panel)
        works = [
            self.slot.read(buffer[start - a : stop - a].view(-1), panel.at + start * size)
            for start, stop in runs
        ]
        return buffer, works

    def _store(self, panel: _Panel, inside: Box, buffer: Tensor) -> None:
        a, b = inside.start[self.first], inside.stop[self.first]
        work = self.slot.write(buffer.view(-1), panel.at + a * self._row_bytes(panel))
        self.pending.append(PendingWrite(work, buffer))
        panel.written[a:b] = b"\1" * (b - a)


class Reading:
    """A box that is being read."""

    def __init__(self, value: StoredValue, box: Box, device: torch.device) -> None:
        self.value, self.box, self.device = value, box, device
        self.parts = [
            (panel, inside, *value.fetch(panel, inside, device))
            for panel, inside in value.overlapping(box)
        ]

    @property
    def nbytes(self) -> int:
        return prod(self.box.shape) * self.value.dtype.itemsize

    def finish(self) -> Tensor:
        """The box, with dims in memory in the order of the value's."""
        value, shape = self.value, self.box.shape
        like = torch.empty(0, dtype=value.dtype, device=self.device)
        found = strided(shape, tile_strides(value.value, shape), like)
        for panel, inside, buffer, works in self.parts:
            for work in works:
                work.wait()
            rows = value.rows_of(panel, inside)
            cells = value.cells(buffer, rows.shape)
            found[inside.relative_to(self.box).slices()] = cells[inside.relative_to(rows).slices()]
        self.parts.clear()
        return found
