"""Data parallelism by `distribute` under data=2, on ranks that are processes; mirrored.py measures
tf.distribute on the same work."""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks.keras.networks import batch, cross_entropy, keras_network, sgd
from benchmarks.keras.ranks import Size, answer, timed

STEPS = 2  # batches of a call of fit


def compiled(size: Size) -> Any:
    model = keras_network(size.side, size.blocks, size.width)
    model.compile(sgd(), cross_entropy(), metrics=["accuracy"])
    return model


def fitted(model: Any, size: Size) -> dict[str, float]:
    """Medians over calls of `fit`, per batch; the first one builds."""
    images, labels = batch(size.samples * STEPS, size.side)

    def fit() -> None:
        model.fit(images, labels, batch_size=size.samples, verbose=0, shuffle=False)

    fit()
    found = [timed(fit) for _ in range(size.turns)]
    return {name: median(row[i] for row in found) / STEPS for i, name in enumerate(("wall", "cpu"))}


def measure(size: Size) -> Any:
    import gems.keras
    from gems import Plan

    plan = Plan(stages=1, data=2, micro_batches=1, schedule="sequential")
    model = gems.keras.distribute(compiled(size), plan, backend="gloo")
    found = fitted(model, size)
    first = model.gems.rank == 0
    model.gems.close()
    return found if first else None


if __name__ == "__main__":
    answer(measure)
