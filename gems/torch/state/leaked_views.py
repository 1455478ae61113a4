"""Views of weights that a hook kept past the step: released with the weights, so that using one
raises instead of reading freed memory.

After every step the reference count of the storage tells whether there are any, in a microsecond.
Only then all Python objects are searched. During a step there may be more: what autograd has saved
for backward are views, too.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch

from gems.torch.tensors.released import is_released, release
from gems.torch.tensors.storage import references

Tensor = torch.Tensor
KEPT = "was kept as a view of weights past the step; clone it there, because what it is a view of"


class LeakedViews:
    """Views of one flat tensor, besides the expected ones."""

    def __init__(self, flat: Tensor) -> None:
        """All references that there are now are expected."""
        self.flat = flat
        self.least = self.expected = references(flat)

    def release(self, ours: Iterable[Tensor], why: str) -> int:
        """Release all but `ours`, for good. `why` the weights have no memory; returns the number of
        views."""
        now = references(self.flat)
        self.expected = max(self.least, min(self.expected, now))
        if now <= self.expected:
            return 0
        memory, known = self.flat.untyped_storage()._cdata, {id(self.flat), *map(id, ours)}
        known |= {id(t._gems[0]) for t in ours if is_released(t)}  # type: ignore[attr-defined]
        found = [x for x in gc.get_objects() if _is_view(x, memory) and id(x) not in known]
        for view in found:
            release(view, f"a tensor of shape {tuple(view.shape)}", f"{KEPT} {why}", keep=False)
        if not found:  # references from outside Python cannot be found
            self.expected = now
        return len(found)


def _is_view(x: object, memory: int) -> bool:
    if not issubclass(type(x), Tensor) or is_released(x):  # type: ignore[arg-type]
        return False
    try:
        return x.untyped_storage()._cdata == memory  # type: ignore[attr-defined]
    except (RuntimeError, NotImplementedError):  # sparse, or a compiler's: no storage
        return False
