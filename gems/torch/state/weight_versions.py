"""Double-buffered weights (PipeDream-2BW): each optimizer step overwrites the older version."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn
from torch.autograd import _unsafe_preserve_version_counter as unseen_by_autograd

Tensor = torch.Tensor


class WeightVersions:
    """W(t), the weights after t optimizer steps, are in buffer t % 2: W(t + 2) overwrites W(t).

    Parameters stay the same objects; their `.data` is one buffer or the other. Autograd saves for
    backward either a parameter itself, whose `.data` must be the same in backward as in forward, or
    a view of the buffer, which stays valid as long as its version is used.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.buffers: dict[nn.Parameter, list[Tensor]] = {}
        self.updates = self.shown = 0
        self.cover(parameters)

    def cover(self, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
        """Double-buffer all that is trained, and was frozen so far; returns the new buffers."""
        found = []
        for p in parameters:
            if p.requires_grad and p not in self.buffers:
                found.append(other := p.data.clone())
                pair = [p.data, other]
                self.buffers[p] = pair if self.shown % 2 == 0 else pair[::-1]
        return found

    def show(self, version: int) -> None:
        """Set parameters to a version: the newest, or the one before."""
        if version % 2 != self.shown % 2:
            for p, buffers in self.buffers.items():
                p.data = buffers[version % 2]
        self.shown = version

    def step(self, step: Callable[[], None]) -> None:
        """Let an optimizer compute the next version from the newest, in the buffer of the one
        before."""
        self.show(self.updates + 1)
        for buffers in self.buffers.values():
            buffers[self.shown % 2].copy_(buffers[self.updates % 2])
        # Unfinished backwards use the other buffer: autograd must not count this as a change.
        with unseen_by_autograd(tuple(self.buffers)):
            step()
        for p, buffers in self.buffers.items():
            buffers[self.shown % 2] = p.data  # some optimizers replace it
        self.updates += 1

    @property
    def bytes(self) -> int:
        """Of one buffer."""
        return sum(p.numel() * p.element_size() for p in self.buffers)

    # --- between runs -------------------------------------------------------------------------

    def restart(self) -> None:
        """Begin with what parameters are now, in both buffers."""
        for p, buffers in self.buffers.items():
            buffers[1 - self.shown % 2].copy_(p.data)
            buffers[:] = [p.data, buffers[1 - self.shown % 2]]
        self.updates = self.shown = 0

    def older(self) -> dict[nn.Parameter, Tensor]:
        """The version before the newest, if there was one."""
        at = (self.updates + 1) % 2
        return {p: m[at] for p, m in self.buffers.items()} if self.updates else {}

    def resume(self, older: Mapping[nn.Parameter, Tensor]) -> None:
        """Begin with what parameters are now as the newest version, after this one."""
        self.restart()
        if not older:
            return
        for p, buffers in self.buffers.items():
            buffers.reverse()
            if p in older:
                buffers[0].copy_(older[p])
        self.updates = self.shown = 1
