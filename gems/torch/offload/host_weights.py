"""Where a part of a stage's weights lives when it is put away, and is worked on.

On the host its memory is always there, and the optimizer works in it. On disk it is there between
`open` and `close`, and bytes of a file else.
"""

from __future__ import annotations

import torch

from gems.torch.offload.stores import Store, Work

Tensor = torch.Tensor


def room(tensor: Tensor, cells: int) -> None:
    """Give a flat tensor memory, or take it away; it, and views of it, stay as they are."""
    tensor.untyped_storage().resize_(cells * tensor.element_size())


class Home:
    """Of one flat tensor. `memory` is the host's, empty while it is on disk only."""

    def __init__(self, store: Store, first: Tensor) -> None:
        self.slot, self.store = store.slot(first.nbytes), store
        self.on_host = self.slot.memory is not None
        if self.slot.memory is not None:
            self.memory = self.slot.memory.view(first.dtype)
        else:
            self.memory = torch.empty(len(first), dtype=first.dtype)  # until `leave`: for views
        self.write(first)

    def write(self, tensor: Tensor, start: int = 0) -> None:
        """Be what a tensor is, of the device or of the host, from cell `start` on."""
        self.slot.write(tensor, start * tensor.element_size()).wait()
        self.store.finish()

    def read(self, into: Tensor, start: int = 0) -> Work:
        """Fill a tensor of the device, from cell `start` on."""
        return self.slot.read(into, start * into.element_size())

    def open(self) -> int:
        """Have `memory`. Gives the bytes that this took."""
        if self.on_host:
            return 0
        room(self.memory, len(self.memory))
        self.slot.read(self.memory).wait()
        return self.memory.nbytes

    def close(self) -> None:
        """What was written to `memory` stays."""
        if not self.on_host:
            self.slot.write(self.memory).wait()
        self.leave()

    def leave(self) -> None:
        """Nothing was written."""
        if not self.on_host:
            room(self.memory, 0)
