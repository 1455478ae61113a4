"""Activation offload: what a micro-batch saves on a stage, in a store from forward to backward.

    forward     autograd saves a tensor   ──► PackedTensor           saved-tensor hooks
    S           all of them, by storage   ──► slots of the store     each storage range once
    free        packed tensors drop their tensors, which frees the memory
    L           slots                     ──► new memory             one allocation per slot
    backward    autograd unpacks          ──► a tensor of the same offset, shape and strides

Weights are not offloaded here: their packed tensors only check that they do not change. Whoever
else holds a tensor (an unfinished message, the user's batch) delays the freeing of its memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import contextmanager
from weakref import WeakSet

import torch

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


class PackedTensor:
    """A saved tensor; `unpack` returns an equal one.

    With a `version` it must not change in between: autograd itself checks that only for tensors
    that no hook packs.
    """

    def __init__(self, x: Tensor, version: int | None) -> None:
        self.tensor: Tensor | None = x.detach()
        self.version, self.changed = version, False
        self.dtype, self.shape, self.stride = x.dtype, tuple(x.shape), x.stride()
        self.start = int(x.storage_offset()) * x.element_size()
        reach: int = sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        self.stop = self.start + (reach + 1) * x.element_size()
        self.range: _Range | None = None

    def check_version(self) -> None:
        if self.tensor is not None and self.version is not None:
            self.changed = self.tensor._version != self.version

    def unpack(self) -> Tensor:
        self.check_version()
        if self.changed:
            raise RuntimeError(
                f"a tensor needed for a gradient, of shape {self.shape}, has been modified by an "
                "inplace operation; use one that is not in place"
            )
        if self.tensor is None:
            assert self.range is not None and self.range.memory is not None, "not prefetched"
            memory = self.range.memory
            offset = (self.start - self.range.start) // self.dtype.itemsize
            empty = torch.empty(0, dtype=self.dtype, device=memory.device)
            self.tensor = empty.set_(memory.untyped_storage(), offset, self.shape, self.stride)
            self.version = None
        return self.tensor


def unpacked(x: Tensor | PackedTensor) -> Tensor:
    return x.unpack() if isinstance(x, PackedTensor) else x


class SavedTensors:
    """What one micro-batch saves on one stage. `weights` are storages that are not offloaded."""

    def __init__(self, weights: Set[int], device: torch.device) -> None:
        self.weights, self.device = weights, device
        self.packed: WeakSet[PackedTensor] = (
            WeakSet()
        )  # autograd holds them, and drops each in turn
        self.moving: list[tuple[PackedTensor, _Range]] = []
        self.ranges: list[_Range] = []

    # --- saving -------------------------------------------------------------------------------

    def pack(self, x: Tensor, version: int | None = None) -> PackedTensor | Tensor:
        """A packed tensor, to be offloaded; or the tensor itself, if it cannot be."""
        plain = type(x) in (Tensor, torch.nn.Parameter) and x.layout is torch.strided
        if not plain or not x.numel() or x.is_conj() or x.is_neg():
            return x
        packed = PackedTensor(x, version)
        if storage_of(x) not in self.weights and x.device.type == self.device.type:
            self.packed.add(packed)
        return packed

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Pack what autograd saves inside."""
        pack = lambda x: self.pack(x, x._version)  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(pack, unpacked):
            yield

    # --- out and back -------------------------------------------------------------------------

    def offload(self, store: Store) -> list[Work]:
        """Begin to write all of it, each storage range once."""
        groups: dict[int, list[PackedTensor]] = {}
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


def _bytes(packed: PackedTensor, start: int, stop: int) -> Tensor:
    """A range of the storage of a packed tensor, as bytes."""
    assert packed.tensor is not None
    empty = torch.empty(0, dtype=torch.uint8, device=packed.tensor.device)
    return empty.set_(packed.tensor.untyped_storage(), start, (stop - start,), (1,))
