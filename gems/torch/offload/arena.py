"""Host memory for slots of any size, in few segments that are kept: pinning takes long.

    segment   | slot | free | slot | slot | free      |

torch's own allocator rounds every block of pinned memory up to a power of two. A segment is plain
memory that CUDA is asked to pin, so that its bytes are those that were asked for.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch

from gems.errors import GemsError

Tensor = torch.Tensor
SEGMENT = 1 << 20  # bytes, at least: small slots share one
ALIGNMENT = 512
PAGE = 4096


@dataclass(frozen=True)
class Span:
    """Bytes of a segment."""

    segment: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


class Arena:
    """Hands out spans of its segments, the smallest that fits, and takes them back."""

    def __init__(self, *, pinned: bool) -> None:
        self.pinned = pinned
        self.segments: list[Tensor] = []
        self.free: list[Span] = []

    @property
    def size(self) -> int:
        """Bytes of all segments."""
        return sum(map(len, self.segments))

    def take(self, size: int) -> tuple[Span, Tensor]:
        """A span and its memory, of `size` bytes."""
        wanted = -(-max(size, 1) // ALIGNMENT) * ALIGNMENT
        fitting = [span for span in self.free if span.size >= wanted]
        found = min(fitting, key=lambda span: span.size) if fitting else self._grow(wanted)
        self.free.remove(found)
        stop = found.start + wanted
        if stop < found.stop:
            self.free.append(Span(found.segment, stop, found.stop))
        taken = Span(found.segment, found.start, stop)
        # `.data`: a version of its own, although all share one memory.
        return taken, self.segments[found.segment][found.start : found.start + size].data

    def give(self, span: Span) -> None:
        """Take a span back, and join it with the free ones beside it."""
        start, stop = span.start, span.stop
        for other in [other for other in self.free if other.segment == span.segment]:
            if other.stop == span.start or other.start == span.stop:
                self.free.remove(other)
                start, stop = min(start, other.start), max(stop, other.stop)
        self.free.append(Span(span.segment, start, stop))

    def _grow(self, wanted: int) -> Span:
        size = -(-max(wanted, SEGMENT) // PAGE) * PAGE
        self.segments.append(_pinned(size) if self.pinned else torch.empty(size, dtype=torch.uint8))
        self.free.append(Span(len(self.segments) - 1, 0, size))
        return self.free[-1]


def _pinned(size: int) -> Tensor:
    """Whole pages of host memory, pinned for as long as anybody has it."""
    memory = torch.empty(size + PAGE, dtype=torch.uint8)
    found = memory[-memory.data_ptr() % PAGE :][:size]
    cuda: Any = torch.cuda.cudart()
    if code := int(cuda.cudaHostRegister(found.data_ptr(), size, 1)):  # for all contexts
        raise GemsError(
            f"cannot pin {size:,} bytes of host memory for offloading (CUDA error {code}); raise "
            "the limit of locked memory (ulimit -l), offload less, or offload to disk"
        )
    address = found.data_ptr()
    weakref.finalize(
        found.untyped_storage(), lambda: cuda.cudaHostUnregister(address)
    ).atexit = False  # CUDA may have ended before
    return found
