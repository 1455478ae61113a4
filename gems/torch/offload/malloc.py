"""Have freed memory of the host go back to the system: where memory is put away on disk, that is
what it is for.

glibc keeps what lies below what is still in use, and takes it again for the next tensor of about
that size: after a while all of it has been written to, and is resident. Elsewhere nothing is done.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

MMAP_THRESHOLD = -3  # of malloc.h
LARGE = 1 << 20


def lean() -> None:
    """From now on, large pieces come from the system and go back to it."""
    _call("mallopt", MMAP_THRESHOLD, LARGE)


def trim() -> None:
    """Give back all that is free now."""
    _call("malloc_trim", 0)


def _call(name: str, *args: int) -> None:
    try:
        found: Callable[..., int] = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError):  # another C library
        return
    found(*args)
