"""Caches of functions must not keep the fake tensors of a recording."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from gems.torch.reads import caches


def forget_cached(modules: Iterable[nn.Module]) -> None:
    """Empty every `functools.lru_cache` of these that holds a fake tensor; real ones fill it again.

    They are looked for by name. A search of all objects would touch tuples that other threads are
    just making, which Python does not allow.
    """
    for cache in caches(modules):
        if cache.cache_info().currsize and _holds_fake(cache):
            cache.cache_clear()


def _holds_fake(cache: Any) -> bool:
    """Whether a cached result is a fake tensor, or has one in it."""
    left, seen = gc.get_referents(cache), set[int]()
    for _ in range(4):  # the cache, its entries, a tuple or dict in them
        if any(isinstance(x, FakeTensor) for x in left):
            return True
        inner = [x for x in left if isinstance(x, (dict, tuple, list)) or _is_entry(x)]
        left = [y for x in inner if id(x) not in seen for y in gc.get_referents(x)]
        seen.update(map(id, inner))
    return False


def _is_entry(x: Any) -> bool:
    return type(x).__name__ == "_lru_list_elem"
