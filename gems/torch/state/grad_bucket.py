"""A stage's gradients in one flat tensor per type, so that an all-reduce copies nothing.

    | gradient | gradient | ... | one flag per gradient | running statistics |
      chunk 1    chunk 0          the rest

Each parameter's gradient starts as zeros in the bucket, and autograd accumulates there. A parameter
that got no gradient on any rank must end without one, as in plain training: the tensor's version
tells whether this rank wrote one, and the flags are summed along. Sharded gradients
(param_shards.py) are in other memory, and have only their flags here.

Chunks are for all-reduces that begin inside backward (overlapped_reduction.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from gems.errors import GemsError
from gems.torch.state.sparse_gradients import dense
from gems.torch.tensors.strides import laid_out

Tensor = torch.Tensor
CHUNKS = 8  # of a bucket that is reduced while backward runs, if they are of a fair size:
LEAST, MOST = 1 << 20, 25 << 20  # bytes


@dataclass(frozen=True)
class Chunk:
    """Gradients that are reduced at once: their memory, and which of the bucket's they are."""

    memory: Tensor
    indices: tuple[int, ...]


def laid_like(flat: Tensor, parameter: Tensor) -> Tensor:
    """Flat memory as a gradient, in the memory format of its parameter: fused optimizers walk
    through both in the order of memory."""
    return laid_out(flat, parameter.shape, parameter.stride()).data


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
        *,
        chunked: bool = False,
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
        self.chunks = self._chunks(memory, gradients) if chunked else []
        self.begun = 0  # of them
        self.versions: dict[int, int] = {}  # of gradients when their chunk began
        ends = {key: 0 for key in memory}
        for x, start, count in gradients.values() if chunked else ():
            ends[x.dtype, x.device] = start + count
        self.rest = [memory[key][end:] for key, end in ends.items()]

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

    def _chunks(
        self,
        memory: Mapping[tuple[torch.dtype, torch.device], Tensor],
        at: Mapping[int, tuple[Tensor, int, int]],
    ) -> list[Chunk]:
        """In the order in which backward completes them, of one type each."""
        total = sum(count * x.element_size() for x, _, count in at.values())
        size = min(max(total // CHUNKS, LEAST), MOST)
        found: list[Chunk] = []
        waiting: dict[tuple[torch.dtype, torch.device], list[int]] = {}

        def close(key: tuple[torch.dtype, torch.device]) -> None:
            indices = waiting.pop(key)
            spans = [at[id(self.parameters[i])] for i in indices]
            stop = spans[0][1] + spans[0][2]
            found.append(Chunk(memory[key][spans[-1][1] : stop], tuple(indices)))

        for index in reversed(range(len(self.parameters))):
            p = self.parameters[index]
            if id(p) in at and p.numel():
                key = p.dtype, p.device
                waiting.setdefault(key, []).append(index)
                held = sum(self.parameters[i].numel() for i in waiting[key])
                if held * p.element_size() >= size:
                    close(key)
        for key in list(waiting):
            close(key)
        return found

    def in_place(self, number: int) -> bool:
        """Whether all gradients of a chunk are in the bucket: a hook may have replaced one."""
        chunk = self.chunks[number]
        return all(self.parameters[i].grad is self.gradients[i] for i in chunk.indices)

    def begin_chunk(self) -> Tensor:
        """The next chunk, complete, to be all-reduced."""
        chunk = self.chunks[self.begun]
        self.begun += 1
        self.versions |= {i: self.gradients[i]._version for i in chunk.indices}
        return chunk.memory

    def pack(self) -> list[Tensor]:
        """What is left to all-reduce: gradients, flags and the other tensors."""
        self.written: list[bool] = []
        for i, (p, gradient) in enumerate(zip(self.parameters, self.gradients, strict=True)):
            written = p.grad is not gradient or gradient._version > 0
            if i in self.versions:
                self._see_unchanged(i)
            elif p.grad is not gradient and p.grad is not None:  # a hook replaced it
                gradient.copy_(dense(p.grad))
            self.written.append(written and p.grad is not None)
            self.flags[i].fill_(float(self.written[-1]))
        for x, total in zip(self.others, self.sums, strict=True):
            total.copy_(x)
        return [*(chunk.memory for chunk in self.chunks[self.begun :]), *self.rest]

    def _see_unchanged(self, index: int) -> None:
        p, gradient = self.parameters[index], self.gradients[index]
        if p.grad is not gradient or gradient._version != self.versions[index]:
            raise GemsError(
                f"the gradient of a weight of shape {tuple(p.shape)} changed after its all-reduce "
                "had begun: backward accumulated it more often than in the step before, or a hook "
                "changed it late. Set grad_sync='end' in the plan"
            )

    def unpack(self) -> list[Tensor]:
        """After the all-reduce: set each gradient, or None; returns the sums of the others.

        What this rank wrote, all have: flags are read, and a GPU waited for, only for the rest.
        """
        unsure = [i for i, written in enumerate(self.written) if not written]
        flags = torch.cat([self.flags[i] for i in unsure]).tolist() if unsure else []
        absent = {i for i, flag in zip(unsure, flags, strict=True) if not flag}
        for i, (p, gradient) in enumerate(zip(self.parameters, self.gradients, strict=True)):
            p.grad = None if i in absent else gradient
        return self.sums
