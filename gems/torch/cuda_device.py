"""All that is asked of torch.cuda about devices and their memory, in one place.

Tests replace these functions. None of them was ever run on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch


def count() -> int:
    """GPUs that this process may use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def current() -> int:
    return torch.cuda.current_device()


def use(index: int) -> None:
    """Make a GPU the current one of this process."""
    torch.cuda.set_device(index)


def properties(index: int) -> Any:
    """`name`, `major`, `minor`, `total_memory`, `multi_processor_count` and, where this torch has
    them, `uuid`, `clock_rate`, `memory_clock_rate` (kHz) and `memory_bus_width` (bits)."""
    return torch.cuda.get_device_properties(index)


def free_memory(index: int) -> int:
    """Bytes that this process may still allocate, those that its allocator holds included."""
    free, _ = torch.cuda.mem_get_info(index)
    return free + torch.cuda.memory_reserved(index)


def peaks(index: int) -> tuple[int, int]:
    """The most bytes in tensors, and the most that the allocator has taken from the device."""
    return torch.cuda.max_memory_allocated(index), torch.cuda.max_memory_reserved(index)


def now(index: int) -> tuple[int, int]:
    """Bytes in tensors, and those that the allocator has taken from the device."""
    return torch.cuda.memory_allocated(index), torch.cuda.memory_reserved(index)


def reset_peaks(index: int) -> None:
    torch.cuda.reset_peak_memory_stats(index)


def limit(index: int, size: int) -> None:
    """Let the allocator raise torch.OutOfMemoryError beyond `size` bytes."""
    torch.cuda.set_per_process_memory_fraction(size / properties(index).total_memory, index)
