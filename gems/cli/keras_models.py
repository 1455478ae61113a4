"""Models of keras.applications: which front end runs them, and what it does not take.

On Keras's torch backend a model is an nn.Module like any other. On TensorFlow gems.keras runs it.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gems.errors import GemsError, PlanError, problems

if TYPE_CHECKING:
    from gems.data.source import Source
    from gems.hardware import Machine
    from gems.keras.planning import Study
    from gems.plans.plan import Plan

PREFIX = "keras/"
SUFFIXES = (".keras", ".weights.h5", ".safetensors")
PYTORCH = "that is for PyTorch models"
# What a run of a Keras model does not do: by option, the values that it has nevertheless.
VALUES: dict[str, tuple[tuple[Any, ...], str]] = {
    "accumulate": ((1,), "a step is an update; give more --parts instead"),
    "backend": ((None, "gloo", "mpi"), "give gloo or mpi"),
    "class_weights": ((None,), "leave it out"),
    "compare_fp32": ((None, False), f"{PYTORCH}; leave it out"),
    "compile": ((False,), f"stages are TensorFlow functions, and {PYTORCH}; leave it out"),
    "device": (("auto", "cpu"), "gems.keras runs on CPUs; leave it out"),
    "ignore_index": ((-100,), "leave it out"),
    "limit_memory": ((False,), "it limits the allocator of a GPU; leave it out"),
    "loss": ((None, "cross-entropy", "mse", "mae", "huber"), "give cross-entropy or leave it out"),
    "master_weights": ((False,), "--precision bf16 has fp32 weights already; leave it out"),
    "memory_format": ((None,), "images have channels last already; leave it out"),
    "objective": (("time", "memory"), "Keras models have one image size; give time or memory"),
    "offload_folder": ((None,), "nothing is offloaded; leave it out"),
    "optimizer": (("sgd", "adam", "adamw", "rmsprop", "adagrad", "nadam"), "Keras has no other"),
    "precision": (("fp32", "bf16"), "give bf16, which needs no loss scale"),
    "task": (("classify",), "keras.applications classify; use model.fit of a model of your own"),
}


def is_keras(given: argparse.Namespace) -> bool:
    return (given.model or "").startswith(PREFIX)


def on_tensorflow(given: argparse.Namespace) -> bool:
    """Whether the model is Keras's, on its TensorFlow backend. Keras is not imported."""
    return is_keras(given) and _backend() == "tensorflow"


def _backend() -> str:
    """As Keras finds it."""
    if "KERAS_BACKEND" in os.environ:
        return os.environ["KERAS_BACKEND"]
    try:
        found = json.loads(Path("~/.keras/keras.json").expanduser().read_text())
        return found.get("backend", "tensorflow")
    except (OSError, ValueError, AttributeError):
        return "tensorflow"


def reject_options(given: argparse.Namespace, plan: Plan | str = "auto") -> None:
    """Raise for options, and techniques of the plan, that gems.keras does not have."""
    if not on_tensorflow(given):
        return
    found = list(_problems(given))
    if not isinstance(plan, str):
        from gems.keras.offered import problems_of

        found += [f"the plan: {problem}" for problem in problems_of(plan)]
    if found:
        raise PlanError(
            problems(f"{given.model} runs on TensorFlow, which these are not for:", found)
        )


def _problems(given: argparse.Namespace) -> Iterator[str]:
    for name, (known, why) in VALUES.items():
        value = getattr(given, name, known[0])
        if value not in known:
            shown = "" if value is True else f" {value}"
            yield f"--{name.replace('_', '-')}{shown}: {why}"
    file = getattr(given, "export", None)
    if file is not None and not str(file).endswith(SUFFIXES):
        yield f"--export {file}: the ending must be one of {', '.join(SUFFIXES)}"


def reject_data(given: argparse.Namespace, source: Source) -> None:
    """Raise unless these are images with a class each, or numbers to regress."""
    if source.task == "segment" or len(source.shape) != 3:
        kind = "masks" if source.task == "segment" else f"{len(source.shape) - 1} dims"
        raise GemsError(
            f"--app {given.app} has samples with {kind}, and {given.model} classifies images; "
            "train a Keras model of your own by its fit (docs/keras.md)"
        )


def seed_keras(given: argparse.Namespace) -> None:
    """Keras's initializers and generators are seeded by its own; layers are counted from 1, so that
    plans name the same ones in whichever process."""
    from gems.models import libraries

    libraries.names("keras")  # imports Keras, or raises with what is missing
    import keras

    keras.backend.clear_session()
    keras.utils.set_random_seed(getattr(given, "seed", 0))


def built(given: argparse.Namespace, make: Callable[[], Any]) -> Any:
    """What `make` gives, without values, of which each rank makes its own."""
    seed_keras(given)
    import keras

    from gems.keras.lazily_built import lazily

    if (backend := keras.backend.backend()) != "tensorflow":
        raise GemsError(f"Keras is configured for {backend}; set KERAS_BACKEND={backend} as well")
    if getattr(given, "precision", "fp32") == "bf16":
        keras.mixed_precision.set_global_policy("mixed_bfloat16")
    with lazily():
        return make()


def studied(
    given: argparse.Namespace, on: Machine, make: Callable[[], Any], shape: Sequence[int]
) -> Study:
    """The model on a machine, for samples of this shape, channels last: its graph, and costs."""
    reject_options(given)
    model = built(given, make)
    import tensorflow as tf

    from gems.keras.planning import Study

    return Study(model, tf.TensorSpec(tuple(shape), "float32"), on)
