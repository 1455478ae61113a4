"""CPU seconds of four stages, summed over their ranks, beside a plain tf.function step over the
same micro-batches; and the bytes that each stage saves, predicted and held."""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks.keras.networks import batch, cross_entropy, keras_network, sgd
from benchmarks.keras.ranks import Size, answer, barrier, timed

MICRO_BATCHES = 4


def measure(size: Size) -> Any:
    import numpy as np

    from gems import Plan
    from gems.keras import Session

    images, labels = batch(size.samples, size.side)
    sample = images[: size.samples // MICRO_BATCHES]
    plan = Plan(stages=4, micro_batches=MICRO_BATCHES, schedule="1f1b")
    model = keras_network(size.side, size.blocks, size.width)
    session = Session(model, cross_entropy(), sample, plan)
    session.add_optimizer(sgd())
    first, transport = session.rank == 0, session.transport
    plain = plain_step(size, images, labels) if first else None
    ratios = []
    for turn in range(size.turns + 1):
        barrier(transport)
        alone = timed(plain)[1] if plain is not None else 0.0
        barrier(transport)
        mine = timed(lambda: session.step(images, labels))[1]
        ratios.append((alone, sum(transport.all_gather_object(mine))))
        if turn == 0:
            ratios.clear()  # functions were built
    held = transport.all_gather_object(saved(session, np))
    session.close()
    if not first:
        return None
    return {
        "plain cpu": median(a for a, _ in ratios),
        "four stages cpu": median(b for _, b in ratios),
        "ratio": median(b / a for a, b in ratios),
        "saved": [row for rows in held for row in rows],
    }


def plain_step(size: Size, images: Any, labels: Any) -> Any:
    """A loop over micro-batches inside one tf.function, and an update."""
    import tensorflow as tf

    model, optimizer = keras_network(size.side, size.blocks, size.width), sgd()
    optimizer.build(model.trainable_variables)
    objective, part = cross_entropy(), len(images) // MICRO_BATCHES
    x, y = tf.constant(images), tf.constant(labels)

    @tf.function
    def step() -> None:
        values = [v.value for v in model.trainable_variables]
        total = [tf.zeros_like(v) for v in values]
        for i in range(MICRO_BATCHES):
            at = slice(i * part, (i + 1) * part)
            with tf.GradientTape() as tape:
                loss = objective(y[at], model(x[at], training=True))
            found = tape.gradient(loss, values)
            total = [a + g / MICRO_BATCHES for a, g in zip(total, found, strict=True)]
        optimizer.apply(total, model.trainable_variables)

    step()
    return step


def saved(session: Any, np: Any) -> list[dict[str, Any]]:
    """Of the stages of this rank: what the planner was told, and the memory that arrays take."""
    import tensorflow as tf

    rows = []
    for (_, training, _), part in session.part.programs.known.items():
        for stage, program in part.programs.items() if training else ():
            at = {name: tf.ones(t.shape, t.dtype) for name, t in program.given.items()}
            kept = [x for name, x in program.forward(at).items() if name.startswith("k:")]
            memory = {np.from_dlpack(x).ctypes.data: np.asarray(x).nbytes for x in kept}
            predicted = session.costs[stage].activations
            rows.append({"stage": stage, "predicted": predicted, "held": sum(memory.values())})
    return rows


if __name__ == "__main__":
    answer(measure)
