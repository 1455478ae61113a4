"""How many bytes of tensors are alive, and how many were at most."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes:
    """Counts the storages that tensor operations create inside, for as long as they live.

        with LiveBytes() as live:
            step()              # a first one: buffers that are kept are made here
            live.reset()
            step()
        live.peak               # bytes, the kept buffers included

    It sees what the dispatcher sees: results of every operation forward and backward (autograd
    runs CPU work on the calling thread), gradients, receive buffers. It does not see the inside
    of one operation (a workspace of oneDNN), nor memory made elsewhere (numpy). Tensors that
    existed before are not counted, nor are views of them. Other threads count once they enter
    `live.here()`.
    """

    def __init__(self) -> None:
        self.live = 0
        self.held = 0
        self.peak = 0
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        # A finalizer may run anywhere, also inside `_add` when the collector strikes there.
        self._lock = threading.RLock()
        self._watch = _Watch(self)

    def __enter__(self) -> LiveBytes:
        self._watch.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._watch.__exit__(*error)

    def here(self) -> TorchDispatchMode:
        """The same count, for another thread to enter."""
        return _Watch(self)

    def reset(self) -> None:
        """Forget the peak so far: what is alive now is the peak."""
        with self._lock:
            self.peak = self.live

    def hold(self, size: int) -> None:
        """So many bytes are there from now on that no operation makes: weights that come and go."""
        with self._lock:
            self.held = size
            self.peak = max(self.peak, self.live + self.held)

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        with self._lock:
            if key in self._alive:
                return

            # The storage's Python object lives as long as the memory does, even when only C++
            # (a saved tensor, a message under way) still holds it.
            def gone(_: Any) -> None:
                with self._lock:
                    self.live -= size
                    del self._alive[key]

            self._alive[key] = weakref.ref(storage, gone)
            self.live += size
            self.peak = max(self.peak, self.live + self.held)


class _Watch(TorchDispatchMode):
    def __init__(self, count: LiveBytes) -> None:
        super().__init__()
        self.count = count

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[override]
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages(result):
            if storage._cdata not in given:  # neither a view nor in place: new memory
                self.count._add(storage)
        return result


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    tensors = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
    found = (tensor.untyped_storage() for tensor in tensors)
    return [storage for storage in found if storage.device.type != "meta"]  # fakes have none
