"""Who wants to hear of each patch that a streamed stage has run, forward or backward.

with watched(bar):         # `bar()` is called after every patch of this thread's steps
    trainer.step(image, labels)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Hears = Callable[[], object]

_hears: ContextVar[Hears | None] = ContextVar("gems_patch_progress", default=None)


@contextmanager
def watched(hears: Hears) -> Iterator[None]:
    """Call `hears` after every patch while this lasts."""
    before = _hears.set(hears)
    try:
        yield
    finally:
        _hears.reset(before)


def patch_done() -> None:
    """One patch ran."""
    if (hears := _hears.get()) is not None:
        hears()
