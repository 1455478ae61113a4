"""What `fit` under a plan does not do, by name, before anything runs."""

from __future__ import annotations

from typing import Any

import keras
from keras import layers

from gems.errors import PlanError, problems
from gems.plans.plan import Plan

STEPS = ("train_step", "test_step", "predict_step", "compute_loss", "compute_metrics")


def reject_model(model: Any) -> None:
    """Raise unless this is a Keras 3 model on a backend that has a session."""
    if not isinstance(model, keras.Model):
        older = type(model).__module__.startswith("tf_keras")
        why = "a model of tf_keras 2; import keras (3.15 or later) instead" if older else (
            f"a {type(model).__name__}; give it a keras.Model, or gems.Trainer an nn.Module"
        )  # fmt: skip
        raise PlanError(f"gems.keras.distribute takes a model of Keras 3, and got {why}")
    if (backend := keras.backend.backend()) not in ("tensorflow", "torch"):
        raise PlanError(
            f"gems.keras runs on Keras's tensorflow and torch backends, not on {backend}; set "
            "KERAS_BACKEND before Keras is imported"
        )
    found = [
        f"{type(model).__name__} has a {name} of its own, which would run on one rank"
        for name in STEPS
        if getattr(type(model), name) is not getattr(keras.Model, name)
    ]
    found += [
        f"{layer.path or layer.name} makes a mask, which reaches the loss beside the output"
        for layer in (model._flatten_layers() if backend == "torch" else ())
        if isinstance(layer, layers.Masking) or getattr(layer, "mask_zero", False)
    ]
    if found:
        raise PlanError(
            problems(
                "this model's fit cannot run under a plan; use a loss and metrics of compile, or "
                "a loop of your own over gems.keras.session.Session:",
                found,
            )
        )


def reject_compiled(model: Any) -> None:
    """Raise for arguments of `compile` that a plan does not carry out."""
    if not model.compiled:
        return
    asked = model._compile_config.config if hasattr(model, "_compile_config") else {}
    found = []
    if model.run_eagerly:
        found.append("run_eagerly=True: stages are graphs; leave it out")
    if (steps := model.steps_per_execution) > 1:
        found.append(f"steps_per_execution={steps}: a batch is an update; leave it out")
    if asked.get("jit_compile") is True:
        found.append("jit_compile=True: stages are not compiled by XLA; leave it out")
    if found:
        raise PlanError(problems("compile's arguments do not apply under a plan:", found))


def reject_plan(plan: Plan) -> None:
    """Raise for techniques that Keras models have on no backend."""
    from gems.keras.offered import problems_of

    found = problems_of(plan)
    if keras.backend.backend() == "torch" and any(grid.tiles for grid in plan.grids):
        found.append("spatial tiles: use Keras on TensorFlow, or gems.Trainer for torch models")
    if found:
        raise PlanError(problems("gems.keras does not run this plan:", found))
