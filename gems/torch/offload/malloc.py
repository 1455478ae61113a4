"""Return freed host memory to the system, so that offloading to disk lowers resident memory.

glibc keeps free memory that lies below memory in use, and reuses it for the next tensor of about
that size: after a while all of it is resident. With other C libraries nothing is done.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

MMAP_THRESHOLD = -3  # of malloc.h
LARGE = 1 << 20


def mmap_large() -> None:
    """From now on, allocate large tensors by mmap, which returns them to the system when freed."""
    _call("mallopt", MMAP_THRESHOLD, LARGE)


def trim() -> None:
    """Return all that is free now."""
    _call("malloc_trim", 0)


def _call(name: str, *args: int) -> None:
    try:
        found: Callable[..., int] = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError):  # another C library
        return
    found(*args)
