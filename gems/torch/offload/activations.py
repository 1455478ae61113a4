"""What a micro-batch keeps on a stage, put away between forward and backward.

    forward     autograd saves a tensor ──► View                     hooks around the forward
    S           all views, by memory    ──► slots of the store       each piece of memory once
    let go      views forget their tensors: nobody has the memory any more
    L           slots                   ──► new memory               one piece for each slot
    backward    autograd asks the View  ──► a tensor of the same offset, shape and strides

Weights are there anyway, and stay: their views only look that they do not change. Who else holds a
tensor (a message on its way, the user's batch) has it for as long as that takes: then its memory
goes a little later.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import contextmanager
from weakref import WeakSet

import torch

from gems.torch.offload.stores import Slot, Store
from gems.torch.tracing.op_meter import storage_of
from gems.transport.protocol import Work

Tensor = torch.Tensor
ALIGNED = 64  # bytes: new memory begins where the old one did, as far as kernels can tell


class _Piece:
    """A piece of memory in the store, and later here again."""

    def __init__(self, start: int, slot: Slot, device: torch.device) -> None:
        self.start, self.slot, self.device = start, slot, device
        self.memory: Tensor | None = None

    def fetch(self) -> Work:
        self.memory = torch.empty(self.slot.size, dtype=torch.uint8, device=self.device)
        return self.slot.read(self.memory)


class View:
    """Stands for a tensor that is kept; `open` gives one that is the same, cell by cell.

    It must not have changed by then, if it had a `version`: autograd looks to that only where
    nobody comes between.
    """

    def __init__(self, x: Tensor, version: int | None) -> None:
        self.tensor: Tensor | None = x.detach()
        self.version, self.changed = version, False
        self.dtype, self.shape, self.stride = x.dtype, tuple(x.shape), x.stride()
        self.start = int(x.storage_offset()) * x.element_size()
        reach: int = sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        self.stop = self.start + (reach + 1) * x.element_size()
        self.piece: _Piece | None = None

    def look(self) -> None:
        """Whether it is as it was."""
        if self.tensor is not None and self.version is not None:
            self.changed = self.tensor._version != self.version

    def open(self) -> Tensor:
        self.look()
        if self.changed:
            raise RuntimeError(
                f"a tensor needed for a gradient, of shape {self.shape}, has been modified by an "
                "inplace operation; use one that is not in place"
            )
        if self.tensor is None:
            assert self.piece is not None and self.piece.memory is not None, "it is still away"
            memory = self.piece.memory
            offset = (self.start - self.piece.start) // self.dtype.itemsize
            empty = torch.empty(0, dtype=self.dtype, device=memory.device)
            self.tensor = empty.set_(memory.untyped_storage(), offset, self.shape, self.stride)
            self.version = None
        return self.tensor


def opened(x: Tensor | View) -> Tensor:
    return x.open() if isinstance(x, View) else x


class Bundle:
    """All that one micro-batch keeps on one stage. `weights` are storages that stay."""

    def __init__(self, weights: Set[int], device: torch.device) -> None:
        self.weights, self.device = weights, device
        self.views: WeakSet[View] = WeakSet()  # autograd has them, and forgets them one by one
        self.moving: list[tuple[View, _Piece]] = []
        self.pieces: list[_Piece] = []

    # --- what is kept -------------------------------------------------------------------------

    def keep(self, x: Tensor, version: int | None = None) -> View | Tensor:
        """A view in place of the tensor, of which memory is put away; or the tensor itself."""
        plain = type(x) in (Tensor, torch.nn.Parameter) and x.layout is torch.strided
        if not plain or not x.numel() or x.is_conj() or x.is_neg():
            return x
        view = View(x, version)
        if storage_of(x) not in self.weights and x.device.type == self.device.type:
            self.views.add(view)
        return view

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Keep what autograd saves meanwhile."""
        pack = lambda x: self.keep(x, x._version)  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(pack, opened):
            yield

    # --- there and back -----------------------------------------------------------------------

    def store(self, store: Store) -> list[Work]:
        """Begin to write all of it, each piece of memory once."""
        groups: dict[int, list[View]] = {}
        for view in self.views:
            assert view.tensor is not None
            view.look()
            groups.setdefault(storage_of(view.tensor), []).append(view)
        handles: list[Work] = []
        for views in groups.values():
            start = min(view.start for view in views) // ALIGNED * ALIGNED
            stop = max(view.stop for view in views)
            memory = _bytes(views[0], start, stop)
            piece = _Piece(start, store.slot(stop - start), memory.device)
            self.pieces.append(piece)
            self.moving += [(view, piece) for view in views]
            handles.append(piece.slot.write(memory))
        return handles

    def let_go(self) -> None:
        """It is written."""
        for view, piece in self.moving:
            view.tensor, view.piece = None, piece
        self.moving.clear()

    def load(self) -> list[Work]:
        """Make room again, and begin to read."""
        return [piece.fetch() for piece in self.pieces]

    def arrive(self) -> None:
        """It is read: the store's room is free."""
        for piece in self.pieces:
            piece.slot.free()
        self.pieces.clear()  # autograd has what is left of them, and lets go of it as it goes


def _bytes(view: View, start: int, stop: int) -> Tensor:
    """Memory that a view is of, as bytes."""
    assert view.tensor is not None
    empty = torch.empty(0, dtype=torch.uint8, device=view.tensor.device)
    return empty.set_(view.tensor.untyped_storage(), start, (stop - start,), (1,))
