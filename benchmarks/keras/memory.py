"""Memory of each rank with a model built lazily, or as a whole, if BUILT is `whole`: the weights it
holds, and what resident memory grew by, until its session is there."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any

from benchmarks.keras.networks import CLASSES
from benchmarks.keras.ranks import Size, answer


def resident() -> int:
    """Bytes of this process."""
    with open("/proc/self/statm", encoding="utf-8") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def network(width: int) -> Any:
    """Dense layers of equal size, so that memory is weights."""
    import keras
    from keras import layers

    x = inputs = keras.Input((width,))
    for _ in range(8):
        x = layers.Dense(width, activation="relu")(x)
    return keras.Model(inputs, layers.Dense(CLASSES)(x))


def measure(size: Size) -> Any:
    import tensorflow as tf

    import gems.keras
    from gems import Plan
    from gems.keras.launch import connect

    width = 64 * size.width
    transport = connect()
    before = resident()
    lazily = os.environ["BUILT"] == "lazily"
    with gems.keras.lazily() if lazily else nullcontext():
        model = network(width)
    plan = Plan(stages=4, micro_batches=1, schedule="1f1b", balance="memory")
    sample = tf.TensorSpec((1, width), "float32")
    session = gems.keras.Session(model, "mse", sample, plan, transport=transport)
    held = sum(_bytes(v) for v in model.weights if v._value is not None)
    found = transport.all_gather_object({"held": held, "grew": resident() - before})
    whole = sum(map(_bytes, model.weights))
    session.close()
    return {"weights": whole, "ranks": found} if session.rank == 0 else None


def _bytes(v: Any) -> int:
    count = 4
    for n in v.shape:
        count *= n
    return count


if __name__ == "__main__":
    answer(measure)
