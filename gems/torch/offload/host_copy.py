"""Host copy of an offloaded flat parameter, on which the optimizer runs.

With a host store the memory is always there, and the optimizer works in it. With a disk store it is
there between `load` and `offload` or `free`; otherwise only the file has it.
"""

from __future__ import annotations

import torch

from gems.torch.offload.stores import Store
from gems.transport.protocol import Work

Tensor = torch.Tensor


def resize(tensor: Tensor, numel: int) -> None:
    """Allocate or free the storage of a flat tensor; the tensor and its views stay valid."""
    tensor.untyped_storage().resize_(numel * tensor.element_size())


class HostCopy:
    """`memory` is the host's; empty while only the disk has it."""

    def __init__(self, store: Store, first: Tensor) -> None:
        self.slot, self.store = store.slot(first.nbytes), store
        self.on_host = self.slot.memory is not None
        if self.slot.memory is not None:
            self.memory = self.slot.memory.view(first.dtype)
        else:
            self.memory = torch.empty(len(first), dtype=first.dtype)  # until `free`: for views
        self.write(first)

    def write(self, tensor: Tensor, start: int = 0) -> None:
        """Copy a tensor of any device here, from element `start` on."""
        self.slot.write(tensor, start * tensor.element_size()).wait()
        self.store.finish()

    def read(self, into: Tensor, start: int = 0) -> Work:
        """Fill a tensor, from element `start` on."""
        return self.slot.read(into, start * into.element_size())

    def load(self) -> int:
        """Have `memory`; returns the bytes read from disk."""
        if self.on_host:
            return 0
        resize(self.memory, len(self.memory))
        self.slot.read(self.memory).wait()
        return self.memory.nbytes

    def offload(self) -> None:
        """Write `memory` back to disk, then free it."""
        if not self.on_host:
            self.slot.write(self.memory).wait()
        self.free()

    def free(self) -> None:
        """Free `memory` without writing it back."""
        if not self.on_host:
            resize(self.memory, 0)
