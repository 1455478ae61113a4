"""Optimizers of Keras by the names of the command line, with torch's defaults where they differ."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (keras.optimizers.SGD, {}),
    "adam": (keras.optimizers.Adam, {"epsilon": 1e-8}),
    "adamw": (keras.optimizers.AdamW, {"epsilon": 1e-8}),
    "rmsprop": (keras.optimizers.RMSprop, {"rho": 0.99, "epsilon": 1e-8}),
    "adagrad": (keras.optimizers.Adagrad, {"initial_accumulator_value": 0.0, "epsilon": 1e-10}),
    "nadam": (keras.optimizers.Nadam, {"epsilon": 1e-8}),
}
MOMENTUM = {"sgd": 0.9, "rmsprop": 0.0}  # what those that have one take if none is given


def optimizer(
    name: str,
    learning_rate: float,
    weight_decay: float = 0.0,
    momentum: float | None = None,
    clip: float | None = None,
) -> Any:
    """An optimizer that was not built yet. Weight decay is added to the gradient, or, in adamw,
    taken from the weights themselves; `clip` is the largest norm of the whole gradient."""
    wrong = {
        f"optimizer is {name!r}, and Keras has {', '.join(OPTIMIZERS)}": name not in OPTIMIZERS,
        f"learning_rate is {learning_rate}, not above 0": not learning_rate > 0,
        f"weight_decay is {weight_decay}, not 0 or more": not weight_decay >= 0,
    }
    if momentum is not None:
        wrong |= {
            f"{name} has no momentum to set to {momentum}; leave it out": name not in MOMENTUM,
            f"momentum is {momentum}, not from 0 up to 1": not 0 <= momentum < 1,
        }
    if any(wrong.values()):
        found = "; ".join(problem for problem, is_so in wrong.items() if is_so)
        raise ValueError(f"this optimizer cannot be made: {found}")
    make, more = OPTIMIZERS[name]
    if name in MOMENTUM:
        more = {**more, "momentum": MOMENTUM[name] if momentum is None else momentum}
    if name == "adamw":
        more = {**more, "weight_decay": weight_decay}
    made = make(learning_rate, global_clipnorm=clip, **more)
    if weight_decay and name != "adamw":
        _decay_by_gradient(made, weight_decay)
    return made


def _decay_by_gradient(made: Any, weight_decay: float) -> None:
    """Keras's own `weight_decay` is that of adamw, whatever the optimizer."""
    own = made.update_step

    def update_step(gradient: Any, variable: Any, learning_rate: Any) -> None:
        decay = tf.cast(variable.value, gradient.dtype) * weight_decay
        own(gradient + decay, variable, learning_rate)

    made.update_step = update_step
