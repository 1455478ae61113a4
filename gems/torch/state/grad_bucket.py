"""A stage's gradients in one flat tensor per type, so that an all-reduce copies nothing.

    | gradient | gradient | ... | one flag per gradient | running statistics |

Each parameter's gradient starts as zeros in the bucket, and autograd accumulates there. A parameter
that got no gradient on any rank must end without one, as in plain training: the tensor's version
tells whether this rank wrote one, and the flags are summed along. Sharded gradients
(param_shards.py) are in other memory, and have only their flags here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from gems.torch.state.sparse_gradients import dense
from gems.torch.tensors.strides import fitting

Tensor = torch.Tensor


def laid_like(flat: Tensor, parameter: Tensor) -> Tensor:
    """Flat memory as a gradient, in the memory format of its parameter: fused optimizers walk
    through both in the order of memory."""
    shape = tuple(parameter.shape)
    return flat.as_strided(shape, fitting(shape, tuple(parameter.stride()))).data


def restored(flat: Tensor, parameter: Tensor) -> Tensor:
    """Elements in row-major order as a gradient, in the memory format of its parameter."""
    return laid_like(torch.empty_like(flat), parameter).copy_(flat.view(parameter.shape))


class GradBucket:
    """Gradients of `parameters`, and other tensors to be summed with them, for one step."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        others: Sequence[Tensor],
        sharded: Mapping[int, Tensor] | None = None,
    ) -> None:
        """`sharded` has zeros for the gradients that are not in the bucket, by parameter id."""
        self.parameters, self.others = list(parameters), list(others)
        sharded = sharded or {}
        sizes: dict[tuple[torch.dtype, torch.device], int] = {}

        def reserve(x: Tensor, count: int) -> tuple[Tensor, int, int]:
            start = sizes.get((x.dtype, x.device), 0)
            sizes[x.dtype, x.device] = start + count
            return x, start, count

        gradients = {id(p): reserve(p, p.numel()) for p in self.parameters if id(p) not in sharded}
        flags = [reserve(p, 1) for p in self.parameters]
        rest = [reserve(x, x.numel()) for x in self.others]
        memory = {
            key: torch.zeros(size, dtype=key[0], device=key[1]) for key, size in sizes.items()
        }
        self.memory = list(memory.values())

        def part(x: Tensor, start: int, count: int) -> Tensor:
            # `.data`: a version of its own, although all share one memory.
            return memory[x.dtype, x.device][start : start + count].data

        self.gradients = [
            laid_like(part(*gradients[id(p)]), p) if id(p) in gradients else sharded[id(p)]
            for p in self.parameters
        ]
        self.flags = [part(*at) for at in flags]
        self.sums = [part(*at).view(x.shape) for at, x in zip(rest, others, strict=True)]
        for p, gradient in zip(self.parameters, self.gradients, strict=True):
            if p.grad is not None:  # accumulated by earlier calls
                gradient.copy_(dense(p.grad))
            p.grad = gradient

    def pack(self) -> list[Tensor]:
        """What to all-reduce: gradients, flags and the other tensors."""
        for p, gradient, flag in zip(self.parameters, self.gradients, self.flags, strict=True):
            written = p.grad is not gradient or gradient._version > 0
            if p.grad is not gradient and p.grad is not None:  # a hook replaced it
                gradient.copy_(dense(p.grad))
            flag.fill_(float(written and p.grad is not None))
        for x, total in zip(self.others, self.sums, strict=True):
            total.copy_(x)
        return self.memory

    def unpack(self) -> list[Tensor]:
        """After the all-reduce: set each gradient, or None; returns the sums of the others."""
        flags = torch.cat(self.flags).tolist() if self.flags else []
        for p, gradient, flag in zip(self.parameters, self.gradients, flags, strict=True):
            p.grad = gradient if flag else None
        return self.sums
