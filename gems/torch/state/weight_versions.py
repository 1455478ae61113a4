"""Two versions of a rank's weights, and optimizers that step the newer one in the older's place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn
from torch.autograd import _unsafe_preserve_version_counter as unseen_by_autograd

Tensor = torch.Tensor


class Versions:
    """W(t), the weights after t updates, are in memory t % 2: so W(t + 2) takes the place of W(t).

    Parameters stay what they are; their `.data` is one memory or the other. Autograd keeps for
    backward either a parameter itself, whose `.data` must be what it was in forward when backward
    runs, or a view of the memory, which is nobody's business until its version is no longer used.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.memories: dict[nn.Parameter, list[Tensor]] = {}
        self.updates = self.shown = 0
        self.cover(parameters)

    def cover(self, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
        """Have two of all that is trained, and was frozen so far; gives the new memories."""
        found = []
        for p in parameters:
            if p.requires_grad and p not in self.memories:
                found.append(other := p.data.clone())
                pair = [p.data, other]
                self.memories[p] = pair if self.shown % 2 == 0 else pair[::-1]
        return found

    def show(self, version: int) -> None:
        """Let parameters have the values of a version: the newest, or the one before."""
        if version % 2 != self.shown % 2:
            for p, memories in self.memories.items():
                p.data = memories[version % 2]
        self.shown = version

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the next version out of the newest, over the one before."""
        self.show(self.updates + 1)
        for memories in self.memories.values():
            memories[self.shown % 2].copy_(memories[self.updates % 2])
        # Backwards under way will find in a parameter what forward left: the other memory.
        with unseen_by_autograd(tuple(self.memories)):
            optimizer.step()
        for p, memories in self.memories.items():
            memories[self.shown % 2] = p.data  # some optimizers put another there
        self.updates += 1

    @property
    def bytes(self) -> int:
        """Of what is there twice, once."""
        return sum(p.numel() * p.element_size() for p in self.memories)

    # --- between runs -------------------------------------------------------------------------

    def restart(self) -> None:
        """Begin with what parameters are now, in both memories."""
        for p, memories in self.memories.items():
            memories[1 - self.shown % 2].copy_(p.data)
            memories[:] = [p.data, memories[1 - self.shown % 2]]
        self.updates = self.shown = 0

    def older(self) -> dict[nn.Parameter, Tensor]:
        """The version before the newest, if there was one."""
        at = (self.updates + 1) % 2
        return {p: m[at] for p, m in self.memories.items()} if self.updates else {}

    def resume(self, older: Mapping[nn.Parameter, Tensor]) -> None:
        """Begin with what parameters are now as the newest version, after this one."""
        self.restart()
        if not older:
            return
        for p, memories in self.memories.items():
            memories.reverse()
            if p in older:
                memories[0].copy_(older[p])
        self.updates = self.shown = 1
