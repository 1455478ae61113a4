"""A stage's gradients in flat memory, so that an all-reduce copies nothing.

    | gradient | gradient | ...   | one flag per gradient | running statistics |
      chunk 1    chunk 0            the rest

Each parameter's gradient starts as zeros in the bucket, and autograd accumulates there. A parameter
that got no gradient on any rank must end without one, as in plain training: the tensor's version
tells whether this rank wrote one, and the flags are summed along. Sharded gradients
(param_shards.py) are in other memory, and have only their flags here.

Chunks are for all-reduces that begin inside backward (overlapped_reduction.py). Each has memory of
its own. Where one backward is all that a step has, it is allocated once the chunk is complete:
autograd keeps a first gradient where it was computed, which is cheaper than adding it to zeros.
All else has the same memory in every step: the system takes its time to give out new pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from gems.errors import GemsError
from gems.torch.state.sparse_gradients import dense
from gems.torch.tensors.storage import references
from gems.torch.tensors.strides import laid_out

Tensor = torch.Tensor
CHUNKS = 8  # of a bucket that is reduced while backward runs, if they are of a fair size:
LEAST, MOST = 4 << 20, 25 << 20  # bytes
REST = -1  # the number of what is in no chunk

Kind = tuple[torch.dtype, torch.device]


@dataclass
class Chunk:
    """Gradients that are reduced at once: which of the bucket's they are, and their memory, once
    it is allocated."""

    kind: Kind
    indices: tuple[int, ...]
    memory: Tensor | None = None


def laid_like(flat: Tensor, parameter: Tensor) -> Tensor:
    """Flat memory as a gradient, in the memory format of its parameter: fused optimizers walk
    through both in the order of memory."""
    return laid_out(flat, parameter.shape, parameter.stride()).data


def restored(flat: Tensor, parameter: Tensor) -> Tensor:
    """Elements in row-major order as a gradient, in the memory format of its parameter."""
    return laid_like(torch.empty_like(flat), parameter).copy_(flat.view(parameter.shape))


class BucketMemory:
    """Memory of a stage's bucket from step to step, on CPUs: for GPUs torch keeps what is freed."""

    def __init__(self) -> None:
        self.held: dict[tuple[int, Kind], tuple[Tensor, int]] = {}

    def zeros(self, number: int, kind: Kind, size: int) -> Tensor:
        """Zeros for a chunk, or the rest: what it had before, unless somebody still holds a
        gradient there."""
        key = number, kind
        found, alone = self.held.pop(key, (None, 0))
        if found is not None and found.numel() == size and references(found) <= alone:
            self.held[key] = found, alone
            return found.zero_()
        found = torch.zeros(size, dtype=kind[0], device=kind[1])
        if kind[1].type == "cpu":
            self.held[key] = found, references(found)
        return found


class GradBucket:
    """Gradients of `parameters`, and other tensors to be summed with them, for one step."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        others: Sequence[Tensor],
        sharded: Mapping[int, Tensor] | None = None,
        *,
        chunked: bool = False,
        late: bool = False,
        memory: BucketMemory | None = None,
    ) -> None:
        """`sharded` has zeros for the gradients that are not in the bucket, by parameter id; `late`
        allocates chunks when they are complete; all else is in `memory`, if it is given."""
        self.parameters, self.others = list(parameters), list(others)
        memory = BucketMemory() if memory is None else memory
        self.gradients = [(sharded or {}).get(id(p)) for p in self.parameters]
        inside = [i for i, gradient in enumerate(self.gradients) if gradient is None]
        early = [i for i in inside if chunked and self.parameters[i].numel()]
        self.chunks = self._chunks(early)
        self.begun = 0  # of them
        self.versions: dict[int, int] = {}  # of gradients when their chunk began
        for i, gradient in enumerate(self.gradients):
            if gradient is not None:
                self._place(i, gradient)
        for number, chunk in enumerate(self.chunks if not late else ()):
            size = sum(self.parameters[i].numel() for i in chunk.indices)
            self._allocate(chunk, memory.zeros(number, chunk.kind, size))
        self._allocate_rest([i for i in inside if i not in {*early}], memory)

    def _allocate_rest(self, indices: Sequence[int], reused: BucketMemory) -> None:
        """Memory of what is reduced last: these gradients, flags and the other tensors."""
        sizes: dict[Kind, int] = {}

        def reserve(x: Tensor, count: int) -> tuple[Tensor, int, int]:
            start = sizes.get((x.dtype, x.device), 0)
            sizes[x.dtype, x.device] = start + count
            return x, start, count

        gradients = {i: reserve(self.parameters[i], self.parameters[i].numel()) for i in indices}
        flags = [reserve(p, len(self.parameters)) for p in self.parameters[:1]]
        others = [reserve(x, x.numel()) for x in self.others]
        memory = {kind: reused.zeros(REST, kind, size) for kind, size in sizes.items()}

        def part(x: Tensor, start: int, count: int) -> Tensor:
            # `.data`: a version of its own, although all share one memory.
            return memory[x.dtype, x.device][start : start + count].data

        for i, at in gradients.items():
            self._place(i, laid_like(part(*at), self.parameters[i]))
        self.flags = [part(*at) for at in flags]  # one for each parameter
        self.sums = [part(*at).view(x.shape) for at, x in zip(others, self.others, strict=True)]
        self.rest = list(memory.values())

    def _allocate(self, chunk: Chunk, given: Tensor | None = None) -> Tensor:
        """Memory of a chunk, with the gradients that are there. What is `given` has zeros."""
        parameters = [self.parameters[i] for i in chunk.indices]
        counts = [p.numel() for p in parameters]
        if given is None:
            whole = all(p.grad is not None for p in parameters)
            make = torch.empty if whole else torch.zeros
            given = make(sum(counts), dtype=chunk.kind[0], device=chunk.kind[1])
        chunk.memory = given
        parts = chunk.memory.split(counts)
        for i, p, part in zip(chunk.indices, parameters, parts, strict=True):
            self._place(i, laid_like(part.data, p))
        return chunk.memory

    def _place(self, index: int, gradient: Tensor) -> None:
        """Let a parameter have its gradient in this memory."""
        p = self.parameters[index]
        if p.grad is not None:
            gradient.copy_(dense(p.grad))
        p.grad = self.gradients[index] = gradient

    def _chunks(self, early: Sequence[int]) -> list[Chunk]:
        """In the order in which backward completes them, of one type each."""
        sizes = {i: self.parameters[i].nbytes for i in reversed(early)}
        most = min(max(sum(sizes.values()) // CHUNKS, LEAST), MOST)
        found: list[Chunk] = []
        waiting: dict[Kind, list[int]] = {}
        bytes_of: dict[Kind, int] = {}
        for index, size in sizes.items():
            p = self.parameters[index]
            kind = p.dtype, p.device
            waiting.setdefault(kind, []).append(index)
            bytes_of[kind] = bytes_of.get(kind, 0) + size
            if bytes_of[kind] >= most:
                found.append(Chunk(kind, tuple(waiting.pop(kind))))
                bytes_of[kind] = 0
        return found + [Chunk(kind, tuple(left)) for kind, left in waiting.items()]

    def in_place(self, number: int) -> bool:
        """Whether a chunk can begin with the gradients that it has: a hook may have replaced or
        removed one."""
        chunk = self.chunks[number]
        if chunk.memory is None:
            return all(self.parameters[i].grad is not None for i in chunk.indices)
        return all(self.parameters[i].grad is self.gradients[i] for i in chunk.indices)

    def begin_chunk(self) -> Tensor:
        """The next chunk, complete, to be all-reduced."""
        chunk = self.chunks[self.begun]
        self.begun += 1
        memory = self._allocate(chunk) if chunk.memory is None else chunk.memory
        self.versions |= {i: self._gradient(i)._version for i in chunk.indices}
        return memory

    def _gradient(self, index: int) -> Tensor:
        gradient = self.gradients[index]
        assert gradient is not None, "its chunk has no memory yet"
        return gradient

    def pack(self) -> list[Tensor]:
        """What is left to all-reduce: gradients, flags and the other tensors."""
        left = [
            c.memory if c.memory is not None else self._allocate(c)
            for c in self.chunks[self.begun :]
        ]
        self.written: list[bool] = []
        for i, p in enumerate(self.parameters):
            gradient = self._gradient(i)
            written = p.grad is not gradient or gradient._version > 0
            if i in self.versions:
                self._see_unchanged(i)
            elif p.grad is not gradient and p.grad is not None:  # a hook replaced it
                gradient.copy_(dense(p.grad))
            self.written.append(written and p.grad is not None)
        for flags in self.flags:  # without a copy, for which the host would wait on a GPU
            flags.fill_(1.0)
            for i in (i for i, written in enumerate(self.written) if not written):
                flags[i].fill_(0.0)
        for x, total in zip(self.others, self.sums, strict=True):
            total.copy_(x)
        return [*left, *self.rest]

    def _see_unchanged(self, index: int) -> None:
        p, gradient = self.parameters[index], self._gradient(index)
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
        flags = self.flags[0].tolist() if unsure else []
        absent = {i for i in unsure if not flags[i]}
        for i, p in enumerate(self.parameters):
            p.grad = None if i in absent else self.gradients[i]
        return self.sums
