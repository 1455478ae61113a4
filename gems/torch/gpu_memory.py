"""The allocator's side of memory on a GPU: peaks, a hard limit, and what to do when it is full.

Never run on a GPU: tests replace `gems.torch.cuda_device`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gems.draw.units import size
from gems.errors import PlanError, note
from gems.torch import cuda_device

VARIABLE = "PYTORCH_CUDA_ALLOC_CONF"
SEGMENTS = "expandable_segments:True"
FRAGMENTED = 1.2  # times the bytes in tensors that the allocator holds, from which on we advise


class GpuMemory:
    """Of one session on a device. On CPUs it does nothing.

    With `limit`, torch.OutOfMemoryError is raised beyond the memory budget, of which context and
    communicators leave the allocator so much less.
    """

    def __init__(self, device: torch.device, budget: int | None, *, limit: bool) -> None:
        self.index = (device.index or 0) if device.type == "cuda" else None
        self.budget, self.limited = budget, limit
        if limit and (self.index is None or budget is None):
            lacks = f"the device is {device}" if self.index is None else "memory is not given"
            raise PlanError(
                "limit_memory=True lets the allocator of a GPU raise beyond the memory budget, but "
                f"{lacks}; give memory='16GiB' on a GPU, or leave limit_memory out"
            )

    def begin(self, reserved: int) -> None:
        """Count peaks from here on. `reserved` bytes of the budget hold no tensors."""
        if self.index is None:
            return
        if self.limited:
            assert self.budget is not None
            if self.budget <= reserved:
                raise PlanError(
                    f"a limit of {size(self.budget)} leaves nothing: the context and communicators "
                    f"of this plan take {size(reserved)}; give more memory"
                )
            cuda_device.limit(self.index, self.budget - reserved)
        cuda_device.reset_peaks(self.index)

    def end(self) -> None:
        """Others may use the device without this session's limit."""
        if self.index is not None and self.limited:
            cuda_device.limit(self.index, cuda_device.properties(self.index).total_memory)

    def peak(self) -> tuple[int, int] | None:
        """Bytes in tensors and bytes reserved, the most since `begin`."""
        return None if self.index is None else cuda_device.peaks(self.index)


@contextmanager
def explained(session: Any) -> Iterator[None]:
    """Add to an error of a full GPU what was counted, the budget, and what helps."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        if session.gpu.index is not None:
            note(error, explanation(session))
        raise


def explanation(session: Any) -> str:
    gpu: GpuMemory = session.gpu
    index = gpu.index
    assert index is not None
    allocated, held = cuda_device.now(index)
    meter = getattr(getattr(session, "engine", None), "meter", None)  # of the step that failed
    counted = session.peak if meter is None else meter.peak.total
    budget = "no memory budget is given" if gpu.budget is None else f"budget {size(gpu.budget)}"
    free = cuda_device.free_memory(index) - held
    lines = [
        f"rank {session.rank} on cuda:{index}: GEMS counts {size(counted)} in this step "
        f"({budget}); the allocator has {size(allocated)} in tensors and {size(held)} reserved; "
        f"{size(free)} of the GPU are free",
    ]
    if held > FRAGMENTED * allocated and SEGMENTS not in os.environ.get(VARIABLE, ""):
        lines.append(
            f"much of what is reserved is in no tensor: start with {VARIABLE}={SEGMENTS}, so that "
            "the allocator can join free pieces"
        )
    lines.append(
        "else use smaller micro-batches, recompute='auto' with a memory budget, more stages or "
        "tiles; `gems plan` finds what fits"
    )
    return "\n".join(lines)
