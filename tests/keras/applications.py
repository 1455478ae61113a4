"""keras.applications under every schedule against plain Keras, in float64, as a table.

    python -m tests.keras.applications [--models ResNet50,...] [--plans gems,...] [--side 32]

Takes minutes for each model. On threads; under a launcher (torchrun for gloo, mpirun for MPI), on
its ranks, those plans that take so many. Ends with 1 if a difference is above 1e-10.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import keras

import tests.keras.conftest  # noqa: F401  (sets the environment before TensorFlow is imported)
from gems.distributed.launchers import place
from gems.keras.launch import connect
from gems.plans.plan import Plan
from tests.keras.exact import float64, plain, planned, worst
from tests.keras.networks import CLASSES, images, loss, subclassed, unet

EXACT = 1e-10
SMALL = {"unet": unet, "subclassed": subclassed}  # of tests.keras.networks, 16 px
MODELS = (
    *("ResNet50", "DenseNet121", "EfficientNetB0", "MobileNetV3Small", "ConvNeXtTiny"),
    *SMALL,
)
PLANS = {
    "sequential": Plan(stages=1, micro_batches=4, schedule="sequential"),
    "1f1b": Plan(stages=2, micro_batches=4, schedule="1f1b"),
    "gpipe": Plan(stages=2, micro_batches=4, schedule="gpipe"),
    "interleaved": Plan(stages=4, ranks=2, micro_batches=4, schedule="interleaved"),
    "zero-bubble": Plan(stages=2, micro_batches=4, schedule="zero-bubble"),
    "gems": Plan(stages=2, schedule="gems", replications=2),
    "gems-zb": Plan(stages=2, schedule="gems-zb", replications=2),
    "recompute": Plan(stages=2, micro_batches=4, recompute="always"),
    "fold": Plan(stages=4, micro_batches=4, schedule="auto", placement="fold"),
    "tiles": Plan(stages=1, spatial="1x2", micro_batches=4, schedule="sequential"),
    "tiles-1f1b": Plan(stages=2, spatial=["2x1"], micro_batches=4, schedule="1f1b"),
    "levels": Plan(stages=4, micro_batches=4, schedule="auto", placement="levels"),
    "both-ways": Plan(stages=2, micro_batches=4, schedule="auto", bidirectional=True),
    "hybrid": Plan(stages=2, schedule="gems", replications=1, data=2),
    "tiles-gems": Plan(stages=2, spatial=["1x2", "2x1"], schedule="gems", replications=2),
    "tiles-zb": Plan(stages=2, spatial=["1x2"], micro_batches=4, schedule="zero-bubble"),
    "copies": Plan(stages=1, micro_batches=2, schedule="sequential", data=2),
}


def model(name: str, side: int) -> Any:
    if name in SMALL:
        return SMALL[name]
    make = getattr(keras.applications, name)
    options = {"classes": CLASSES, "classifier_activation": None, "weights": None}
    return lambda: make(input_shape=(side, side, 3), **options)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--plans", default=",".join(PLANS))
    parser.add_argument("--side", type=int, default=32)
    asked = parser.parse_args()
    float64()
    transport = None if place() is None else connect()
    first, differences = transport is None or transport.rank == 0, [0.0]
    for name in asked.models.split(","):
        make, side = model(name, asked.side), 16 if name in SMALL else asked.side
        batches = images(2, 4, side)
        expected = plain(make, loss(), batches, 4)
        for chosen in asked.plans.split(","):
            plan, start = PLANS[chosen], time.perf_counter()
            if transport is not None and plan.world != transport.world:
                continue
            found = planned(make, loss(), batches, plan, transport=transport)
            if transport is not None:
                for more in transport.all_gather_object(found.gradients):
                    found.gradients |= more
            seconds = time.perf_counter() - start
            differences.append(worst(found, expected))
            if first:
                print(f"{name:18} {chosen:12} {differences[-1]:8.1e} {seconds:6.1f} s", flush=True)
    if transport is not None:
        transport.close()
    return int(max(differences) > EXACT)


if __name__ == "__main__":
    sys.exit(main())
