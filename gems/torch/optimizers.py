"""Optimizers by name, as the command line takes them.

Weight decay is for all parameters: biases and the weights of norms are not left out, as in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
}
MOMENTUM = {"sgd": 0.9, "rmsprop": 0.0}  # what those that have one take if none is given


def optimizer(
    name: str,
    parameters: Iterable[Any],
    learning_rate: float,
    weight_decay: float = 0.0,
    momentum: float | None = None,
) -> Optimizer:
    """One of torch's optimizers. Only sgd (0.9 unless given) and rmsprop (0) have `momentum`.

    Weight decay is added to the gradient, or, in adamw, taken from the weights themselves.
    """
    wrong = {
        f"optimizer is {name!r}, not one of {', '.join(OPTIMIZERS)}": name not in OPTIMIZERS,
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
    more = {}
    if name in MOMENTUM:
        more["momentum"] = MOMENTUM[name] if momentum is None else momentum
    return OPTIMIZERS[name](parameters, lr=learning_rate, weight_decay=weight_decay, **more)
