"""One rank under `distribute` beside plain `fit`, taking turns in one process."""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks.keras.networks import batch, cross_entropy, keras_network, sgd
from benchmarks.keras.ranks import Size, answer, medians, timed

STEPS = 2  # batches of a call of fit


def measure(size: Size) -> Any:
    import gems.keras
    from gems import Plan

    images, labels = batch(size.samples * STEPS, size.side)
    models = {}
    for name in ("fit", "distribute"):
        models[name] = keras_network(size.side, size.blocks, size.width)
        models[name].compile(sgd(), cross_entropy(), metrics=["accuracy"])
    plan = Plan(stages=1, micro_batches=1, schedule="sequential")
    gems.keras.distribute(models["distribute"], plan)

    def fit(name: str) -> None:
        models[name].fit(images, labels, batch_size=size.samples, verbose=0, shuffle=False)

    for name in models:
        fit(name)
    turns, ratios = [], []
    for _ in range(size.turns):
        turn = {}
        for name in models:
            turn[f"{name} wall"], turn[f"{name} cpu"] = timed(lambda name=name: fit(name))
        turns.append({key: seconds / STEPS for key, seconds in turn.items()})
        ratios.append({k: turn[f"distribute {k}"] / turn[f"fit {k}"] for k in ("wall", "cpu")})
    both = medians(turns) | {f"ratio {k}": median(r[k] for r in ratios) for k in ("wall", "cpu")}
    return both


if __name__ == "__main__":
    answer(measure)
