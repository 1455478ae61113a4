"""The order in which `fit` shuffles is the same on all ranks: rank 0's."""

from __future__ import annotations

import random
import secrets
from typing import Any

import keras
import numpy as np

from gems.transport.protocol import Transport


def take_rank_0s(transport: Transport) -> None:
    """Unless all ranks were seeded alike, take over rank 0's generators, as they are now."""
    if transport.world == 1:
        return
    told = transport.all_gather_object(_states())
    if all(state == told[0] for state in told):
        return
    version, values, gauss = told[0]["python"]
    random.setstate((version, tuple(values), gauss))
    name, keys, at, has_gauss, cached = told[0]["numpy"]
    np.random.set_state((name, np.array(keys, np.uint32), at, has_gauss, cached))
    _put_of_backend(told[0]["backend"])


def _states() -> dict[str, Any]:
    version, values, gauss = random.getstate()
    name, keys, at, has_gauss, cached = np.random.get_state(legacy=True)  # type: ignore[misc]
    return {
        "python": [version, list(values), gauss],
        "numpy": [name, [int(k) for k in keys], int(at), int(has_gauss), float(cached)],
        "backend": _of_backend(),
    }


def _of_backend() -> Any:
    if keras.backend.backend() == "torch":
        import torch

        return torch.get_rng_state().numpy().tobytes()
    from tensorflow.python.eager import context

    seed = context.global_seed()
    return secrets.randbits(31) if seed is None else seed  # no two alike: rank 0's is taken


def _put_of_backend(state: Any) -> None:
    if keras.backend.backend() == "torch":
        import torch

        torch.set_rng_state(torch.from_numpy(np.frombuffer(state, np.uint8).copy()))
        return
    import tensorflow as tf

    tf.random.set_seed(state)
