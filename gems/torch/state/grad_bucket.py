"""A stage's gradients in one piece of memory per type, so that summing them copies nothing.

    | gradient | gradient | ... | one flag per gradient | running statistics |

Each parameter's gradient starts as zeros in its place, and autograd adds to it there. A parameter
that nobody gave a gradient must end without one, as in plain training: whether a gradient came is
seen from the version of the tensor, and the flags are summed along. Gradients that are shared out
(param_shards.py) have their places elsewhere, and only their flags here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from gems.torch.runtime.strides import fitting
from gems.torch.state.sparse_gradients import dense

Tensor = torch.Tensor


def laid_like(flat: Tensor, parameter: Tensor) -> Tensor:
    """Flat memory as a gradient, in the memory format of its parameter: fused optimizers walk
    through both in the order of memory."""
    shape = tuple(parameter.shape)
    return flat.as_strided(shape, fitting(shape, tuple(parameter.stride()))).data


def restored(flat: Tensor, parameter: Tensor) -> Tensor:
    """Cells in row-major order as a gradient, in the memory format of its parameter."""
    return laid_like(torch.empty_like(flat), parameter).copy_(flat.view(parameter.shape))


class Bucket:
    """Gradients of `parameters`, and tensors to be summed with them, for one step."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        beside: Sequence[Tensor],
        elsewhere: Mapping[int, Tensor] | None = None,
    ) -> None:
        """`elsewhere` has zeros for the gradients that are not kept here, by the parameter's id."""
        self.parameters, self.beside = list(parameters), list(beside)
        elsewhere = elsewhere or {}
        sizes: dict[tuple[torch.dtype, torch.device], int] = {}

        def room(x: Tensor, count: int) -> tuple[Tensor, int, int]:
            start = sizes.get((x.dtype, x.device), 0)
            sizes[x.dtype, x.device] = start + count
            return x, start, count

        gradients = {id(p): room(p, p.numel()) for p in self.parameters if id(p) not in elsewhere}
        flags = [room(p, 1) for p in self.parameters]
        others = [room(x, x.numel()) for x in self.beside]
        memory = {
            key: torch.zeros(size, dtype=key[0], device=key[1]) for key, size in sizes.items()
        }
        self.memory = list(memory.values())

        def part(x: Tensor, start: int, count: int) -> Tensor:
            # `.data`: a version of its own, although all share one memory.
            return memory[x.dtype, x.device][start : start + count].data

        self.places = [
            laid_like(part(*gradients[id(p)]), p) if id(p) in gradients else elsewhere[id(p)]
            for p in self.parameters
        ]
        self.flags = [part(*at) for at in flags]
        self.sums = [part(*at).view(x.shape) for at, x in zip(others, beside, strict=True)]
        for p, place in zip(self.parameters, self.places, strict=True):
            if p.grad is not None:  # from earlier calls of the same update
                place.copy_(dense(p.grad))
            p.grad = place

    def fill(self) -> list[Tensor]:
        """What to sum: gradients as they are, flags, and what goes beside them."""
        for p, place, flag in zip(self.parameters, self.places, self.flags, strict=True):
            came = p.grad is not place or place._version > 0
            if p.grad is not place and p.grad is not None:  # somebody put another one there
                place.copy_(dense(p.grad))
            flag.fill_(float(came and p.grad is not None))
        for x, place in zip(self.beside, self.sums, strict=True):
            place.copy_(x)
        return self.memory

    def empty(self) -> list[Tensor]:
        """After the sum: gradients are in their places, or None; gives what was summed beside."""
        came = torch.cat(self.flags).tolist() if self.flags else []
        for p, place, flag in zip(self.parameters, self.places, came, strict=True):
            p.grad = place if flag else None
        return self.sums
