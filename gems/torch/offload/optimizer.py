"""Optimizer state that is offloaded, except while the parameters it belongs to are stepped."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.optim import Optimizer

from gems.torch.offload.stores import Slot, Store
from gems.torch.tensors.released import release, restore
from gems.torch.tensors.storage import storage_of

Tensor = torch.Tensor
WHY = "is offloaded and not in memory between updates"


class OffloadedState:
    """State tensors in slots of a store. The optimizer still has the tensors, without storage.
    Single numbers, such as step counts, are not offloaded."""

    def __init__(self, optimizer: Optimizer, store: Store) -> None:
        self.optimizer, self.store = optimizer, store
        self.slots: dict[int, tuple[Tensor, Slot]] = {}  # by storage
        self.storages: dict[Tensor, list[int]] = {}  # of each parameter

    def load(self, parameters: Iterable[Tensor]) -> None:
        handles = []
        for storage in (s for p in parameters for s in self.storages.get(p, ())):
            tensor, slot = self.slots[storage]
            restore(tensor)
            tensor.untyped_storage().resize_(slot.size)
            handles.append(slot.read(tensor))
        for handle in handles:
            handle.wait()

    def offload(self, parameters: Iterable[Tensor]) -> int:
        """Offload the state of these parameters, new or loaded; returns its bytes."""
        handles, written = [], []
        for p in parameters:
            before = set(self.storages.pop(p, ()))
            state = self.optimizer.state.get(p, {})
            for tensor in (x for x in state.values() if _can_offload(x)):
                storage = storage_of(tensor)
                if storage not in self.slots:
                    self.slots[storage] = tensor, self.store.slot(tensor.nbytes)
                before.discard(storage)
                self.storages.setdefault(p, []).append(storage)
                handles.append(self.slots[storage][1].write(tensor))
                written.append(tensor)
            for storage in before:  # the optimizer has replaced these tensors
                self._free(storage)
        for handle in handles:
            handle.wait()
        size = sum(tensor.nbytes for tensor in written)
        for tensor in written:
            memory = tensor.untyped_storage()
            release(tensor, "the optimizer's state", WHY)
            memory.resize_(0)
        return size

    def clear(self) -> None:
        """Free all slots: the optimizer was given another state."""
        for storage in list(self.slots):
            self._free(storage)
        self.storages.clear()

    def has(self, tensor: Tensor) -> bool:
        return storage_of(tensor) in self.slots

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy of an offloaded state tensor, in host memory."""
        into = torch.empty(tensor.shape, dtype=tensor.dtype)
        self.slots[storage_of(tensor)][1].read(into).wait()
        self.store.finish()
        return into

    def present(self, tensor: Tensor) -> Tensor:
        """A state tensor, or a copy of it if it is offloaded."""
        return self.copy(tensor) if self.has(tensor) else tensor

    def _free(self, storage: int) -> None:
        self.slots.pop(storage)[1].free()


def _can_offload(x: object) -> bool:
    """A contiguous tensor of more than one number, with a storage of its own."""
    if not isinstance(x, Tensor) or x.numel() < 2 or not x.is_contiguous():
        return False
    return x.untyped_storage().nbytes() == x.nbytes
