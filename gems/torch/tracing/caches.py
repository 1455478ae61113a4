"""No cache may keep a fake tensor of a recording: emptied where it is known, else rejected."""

from __future__ import annotations

import gc
import logging
import sys
import traceback
import types
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from gems.errors import TraceError
from gems.torch.tracing.frozen import of_the_user
from gems.torch.tracing.variables import CACHE, caches

log = logging.getLogger(__name__)
LEVELS = 6  # of containers between a tensor and what holds them
WIDEST = 1000  # objects on one level


@contextmanager
def uncompiled() -> Iterator[None]:
    """TorchScript runs as written. Its optimizer computes constants once and keeps them in the
    compiled function: under a recording these would be fake, also for later runs."""
    with torch.jit.optimized_execution(False):
        yield


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


def reject_kept(made: list[weakref.ref[torch.Tensor]]) -> None:
    """Raise if something still holds one of these tensors of a recording that is over."""
    for generation in (0, 1, 2):  # the young first: all objects of a large process take seconds
        if all(tensor() is None for tensor in made):
            return
        gc.collect(generation)
    if not (alive := [x for tensor in made if (x := tensor()) is not None]):
        return
    if (holder := _holder(alive)) is None:
        log.debug("%d tensors of the recording are still in memory", len(alive))
        return
    raise TraceError(
        f"forward keeps a tensor in {holder} when it first runs, where GEMS cannot take it out "
        "again: later runs would find a tensor of the recording, which has no numbers. In a new "
        "process, run the model once on a real micro-batch before giving it to GEMS, so that it is "
        "filled; or keep the tensor in a buffer (register_buffer(..., persistent=False))"
    )


def _holder(tensors: list[Any]) -> str | None:
    """What keeps these in memory, by a name that a user can look for.

    This looks through all objects of the process, so it is for a run that is about to end.
    """
    level, seen = tensors, {id(tensors)}
    for _ in range(LEVELS):
        found = gc.get_referrers(*level)
        seen.add(id(found))
        above = []
        for x in found:
            if id(x) in seen or isinstance(x, types.FrameType):
                continue
            seen.add(id(x))
            if (name := _name_of(x, level)) is not None:
                return name
            above.append(x)
        if not above or len(above) > WIDEST:
            return None
        level = above
        seen.add(id(level))
    return None


def clear_frames(error: BaseException | None) -> None:
    """Clear the variables of the functions that raised: an error is kept, its tensors are not."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _of_a_model(module: str | None) -> bool:
    return of_the_user(module) and (module or "").partition(".")[0] != "gems"


def _name_of(x: Any, inside: list[Any]) -> str | None:
    """The name of a module's variable, a class, a function or a layer; None: look further up."""
    ids = set(map(id, inside))
    if isinstance(x, dict):
        module = sys.modules.get(str(x.get("__name__")))
        if module is not None and vars(module) is x:
            return next((f"{module.__name__}.{k}" for k, v in x.items() if id(v) in ids), None)
    if isinstance(x, (type, types.FunctionType)) and _of_a_model(x.__module__):
        return f"{x.__module__}.{x.__qualname__}"
    if type(x) is CACHE:
        return f"the cache of {getattr(x, '__qualname__', x)}"
    if isinstance(x, nn.Module):
        return f"an attribute of {type(x).__name__}"
    return "a threading.local" if "local" in type(x).__name__.lower() else None
