"""Activation offload: what a micro-batch saves on a stage, in a store from forward to backward.

    forward     a tensor is saved         ──► OffloadedTensor        step of the chain
    S           all of them, by storage   ──► slots of the store     each storage range once
    free        packed tensors drop their tensors, which frees the memory
    L           slots                     ──► new memory             one allocation per slot
    backward    autograd unpacks          ──► a tensor of the same offset, shape and strides

Weights are not offloaded here. Whoever else holds a tensor (an unfinished message, the user's
batch) delays the freeing of its memory.
"""

from __future__ import annotations

from collections.abc import Set
from weakref import WeakSet

import torch

from gems.torch.autograd.saved_tensors import Pack, PackedTensor, Saved
from gems.torch.offload.stores import Slot, Store
from gems.torch.tensors.storage import storage_of
from gems.transport.protocol import Work

Tensor = torch.Tensor
ALIGNMENT = 64  # bytes: new memory is aligned as the old was, as far as kernels can tell


class _Range:
    """A range of a storage, from byte `start` on, in a slot of the store and later in memory."""

    def __init__(self, start: int, slot: Slot, device: torch.device) -> None:
        self.start, self.slot, self.device = start, slot, device
        self.memory: Tensor | None = None

    def prefetch(self) -> Work:
        self.memory = torch.empty(self.slot.size, dtype=torch.uint8, device=self.device)
        return self.slot.read(self.memory)


class OffloadedTensor(PackedTensor):
    """A saved tensor that is in a store for a while."""

    def __init__(self, x: Tensor, version: int | None) -> None:
        super().__init__(x, version)
        self.dtype, self.stride = x.dtype, x.stride()
        self.start = int(x.storage_offset()) * x.element_size()
        reach: int = sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        self.stop = self.start + (reach + 1) * x.element_size()
        self.range: _Range | None = None

    def unpack(self) -> Tensor:
        if self.tensor is None and not self.changed and self.range is not None:
            assert self.range.memory is not None, "not prefetched"
            memory = self.range.memory
            offset = (self.start - self.range.start) // self.dtype.itemsize
            empty = torch.empty(0, dtype=self.dtype, device=memory.device)
            self.tensor = empty.set_(memory.untyped_storage(), offset, self.shape, self.stride)
            self.version = None
        return super().unpack()


class OffloadedTensors:
    """What one micro-batch saves on one stage. `weights` are storages that are not offloaded."""

    def __init__(self, weights: Set[int], device: torch.device) -> None:
        self.weights, self.device = weights, device
        # Autograd holds them, and drops each in turn.
        self.packed: WeakSet[OffloadedTensor] = WeakSet()
        self.moving: list[tuple[OffloadedTensor, _Range]] = []
        self.ranges: list[_Range] = []

    def pack(self, x: Tensor, version: int | None, rest: Pack) -> Saved:
        """The tensor, to be offloaded, or as the rest of the chain packs it."""
        plain = type(x) in (Tensor, torch.nn.Parameter) and x.layout is torch.strided
        plain = plain and x.numel() > 0 and not x.is_conj() and not x.is_neg()
        if not plain or storage_of(x) in self.weights or x.device.type != self.device.type:
            return rest(x, version)
        packed = OffloadedTensor(x, version)
        self.packed.add(packed)
        return packed

    # --- out and back -------------------------------------------------------------------------

    def offload(self, store: Store) -> list[Work]:
        """Begin to write all of it, each storage range once."""
        groups: dict[int, list[OffloadedTensor]] = {}
        for packed in self.packed:
            assert packed.tensor is not None
            packed.check_version()
            groups.setdefault(storage_of(packed.tensor), []).append(packed)
        handles: list[Work] = []
        for group in groups.values():
            start = min(packed.start for packed in group) // ALIGNMENT * ALIGNMENT
            stop = max(packed.stop for packed in group)
            memory = _bytes(group[0], start, stop)
            found = _Range(start, store.slot(stop - start), memory.device)
            self.ranges.append(found)
            self.moving += [(packed, found) for packed in group]
            handles.append(found.slot.write(memory))
        return handles

    def free(self) -> None:
        """All is written: drop the tensors."""
        for packed, found in self.moving:
            packed.tensor, packed.range = None, found
        self.moving.clear()

    def prefetch(self) -> list[Work]:
        """Allocate memory, and begin to read."""
        return [found.prefetch() for found in self.ranges]

    def finish_prefetch(self) -> None:
        """All is read: free the slots. Autograd now holds the memory, and frees it as it goes."""
        for found in self.ranges:
            found.slot.free()
        self.ranges.clear()


def _bytes(packed: OffloadedTensor, start: int, stop: int) -> Tensor:
    """A range of the storage of a packed tensor, as bytes."""
    assert packed.tensor is not None
    empty = torch.empty(0, dtype=torch.uint8, device=packed.tensor.device)
    return empty.set_(packed.tensor.untyped_storage(), start, (stop - start,), (1,))
