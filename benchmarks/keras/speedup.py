"""Two ranks beside one, of the same plan, by gems.keras; torch_speedup.py does it by gems.torch.

Sessions of one and of two ranks take turns in the same processes.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

from benchmarks.keras.networks import batch, cross_entropy, keras_network, sgd
from benchmarks.keras.ranks import Size, answer, barrier, timed

MICRO_BATCHES = 4


def measure(size: Size) -> Any:
    from gems.keras import Session
    from gems.keras.launch import connect
    from gems.transport.threads import World

    images, labels = batch(size.samples, size.side)
    sample = images[: size.samples // MICRO_BATCHES]
    transport = connect()

    # All ranks make both, so that layers have the same names on all.
    models = [keras_network(size.side, size.blocks, size.width) for _ in range(2)]

    def session(model: Any, plan: Any, on: Any) -> Any:
        made = Session(model, cross_entropy(), sample, plan, transport=on)
        made.add_optimizer(sgd())
        return made

    one, two = plans()
    alone = session(models[0], one, World(1).rank(0)) if transport.rank == 0 else None
    both = session(models[1], two, transport)
    return turns(size, transport, alone, both, lambda s: s.step(images, labels))


def plans() -> tuple[Any, Any]:
    from gems import Plan

    return (
        Plan(stages=1, micro_batches=MICRO_BATCHES, schedule="1f1b"),
        Plan(stages=2, micro_batches=MICRO_BATCHES, schedule="1f1b"),
    )


def turns(size: Size, transport: Any, alone: Any, both: Any, step: Callable[[Any], Any]) -> Any:
    """Speed-ups in wall and in virtual time, medians over turns; the first one builds."""
    from gems.predict.simulate import virtual

    found = []
    for turn in range(size.turns + 1):
        barrier(transport)
        wall = timed(lambda: step(alone))[0] if alone is not None else 0.0
        barrier(transport)
        walls = transport.all_gather_object(timed(lambda: step(both))[0])
        timeline = both.timeline()
        if alone is not None and turn:
            own = virtual(alone.timeline(), alone.schedule, alone.plan).seconds
            theirs = virtual(timeline, both.schedule, both.plan).seconds
            found.append((wall / max(walls), own / theirs, wall, own))
    both.close()
    if alone is None:
        return None
    names = ("wall", "virtual", "one rank wall", "one rank virtual")
    return {name: median(row[i] for row in found) for i, name in enumerate(names)}


if __name__ == "__main__":
    answer(measure)
