"""An optimizer's state that is put away, and is there while the parameters it belongs to are
stepped."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.optim import Optimizer

from gems.torch.offload.stores import Slot, Store
from gems.torch.state.released import release, restore
from gems.torch.tracing.op_meter import storage_of

Tensor = torch.Tensor
WHY = "is offloaded and not in memory between updates"


class States:
    """The memory of state tensors in slots of a store. The tensors stay the optimizer's, without
    their memory. Single numbers, such as counts of steps, are not worth a slot."""

    def __init__(self, optimizer: Optimizer, store: Store) -> None:
        self.optimizer, self.store = optimizer, store
        self.slots: dict[int, tuple[Tensor, Slot]] = {}  # by the number of the storage
        self.of: dict[Tensor, list[int]] = {}  # which storages belong to a parameter

    def fetch(self, parameters: Iterable[Tensor]) -> None:
        handles = []
        for number in (n for p in parameters for n in self.of.get(p, ())):
            tensor, slot = self.slots[number]
            restore(tensor)
            tensor.untyped_storage().resize_(slot.size)
            handles.append(slot.read(tensor))
        for handle in handles:
            handle.wait()

    def put(self, parameters: Iterable[Tensor]) -> int:
        """Put away the state of some parameters, new or fetched; gives its bytes."""
        size, handles, written = 0, [], []
        for p in parameters:
            before = set(self.of.pop(p, ()))
            state = self.optimizer.state.get(p, {})
            for tensor in (x for x in state.values() if _worthwhile(x)):
                number = storage_of(tensor)
                if number not in self.slots:
                    self.slots[number] = tensor, self.store.slot(tensor.nbytes)
                before.discard(number)
                self.of.setdefault(p, []).append(number)
                handles.append(self.slots[number][1].write(tensor))
                written.append(tensor)
                size += tensor.nbytes
            for number in before:  # the optimizer has other tensors now
                self._free(number)
        for handle in handles:
            handle.wait()
        self.store.finish()
        for tensor in written:
            memory = tensor.untyped_storage()
            release(tensor, "the optimizer's state", WHY)
            memory.resize_(0)
        return size

    def clear(self) -> None:
        """The optimizer was given another state."""
        for number in list(self.slots):
            self._free(number)
        self.of.clear()

    def has(self, tensor: Tensor) -> bool:
        """Whether this one is put away."""
        return storage_of(tensor) in self.slots

    def copy(self, tensor: Tensor) -> Tensor:
        """What a state tensor says that is put away, on the host."""
        into = torch.empty(tensor.shape, dtype=tensor.dtype)
        self.slots[storage_of(tensor)][1].read(into).wait()
        self.store.finish()
        return into

    def present(self, tensor: Tensor) -> Tensor:
        """A state tensor, or a copy of it if it is put away."""
        return self.copy(tensor) if self.has(tensor) else tensor

    def _free(self, number: int) -> None:
        self.slots.pop(number)[1].free()


def _worthwhile(x: object) -> bool:
    """Memory of its own, in one piece, of more than a number."""
    if not isinstance(x, Tensor) or x.numel() < 2 or not x.is_contiguous():
        return False
    return x.untyped_storage().nbytes() == x.nbytes
