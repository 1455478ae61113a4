"""The same as `stages`, with ranks that are threads of one process, so that no message is copied
through the kernel: what cutting the function into four costs by itself."""

from __future__ import annotations

import threading
from statistics import median
from typing import Any

from benchmarks.keras.networks import batch, cross_entropy, keras_network, sgd
from benchmarks.keras.ranks import Size, answer, timed
from benchmarks.keras.stages import MICRO_BATCHES, plain_step


def measure(size: Size) -> Any:
    import keras
    from gems import Plan
    from gems.keras import Session
    from gems.transport.threads import run

    images, labels = batch(size.samples, size.side)
    sample = images[: size.samples // MICRO_BATCHES]
    plan = Plan(stages=4, micro_batches=MICRO_BATCHES, schedule="1f1b")
    models = []
    for _ in range(plan.world):  # with the same names
        keras.backend.clear_session()
        models.append(keras_network(size.side, size.blocks, size.width))
    plain, together = plain_step(size, images, labels), threading.Barrier(plan.world)
    ratios: list[tuple[float, float]] = []

    def work(transport: Any) -> None:
        session = Session(
            models[transport.rank], cross_entropy(), sample, plan, transport=transport
        )
        session.add_optimizer(sgd())
        for turn in range(size.turns + 1):
            together.wait()
            alone = timed(plain)[1] if transport.rank == 0 else 0.0

            def step() -> None:
                together.wait()
                session.step(images, labels)
                together.wait()

            found = timed(step)[1]  # of the process, hence of all ranks
            if transport.rank == 0 and turn:  # in the first, functions are built
                ratios.append((alone, found))
        session.close()

    run(plan.world, work)
    return {
        "plain cpu": median(a for a, _ in ratios),
        "four stages cpu": median(b for _, b in ratios),
        "ratio": median(b / a for a, b in ratios),
    }


if __name__ == "__main__":
    answer(measure)
