"""Optimizers and learning rates by name, as the command line takes them.

Weight decay is for all parameters: biases and the weights of norms are not left out, as in torch.
A learning rate over time is a function from the step (0 is the first update) to a factor of the
learning rate, as `torch.optim.lr_scheduler.LambdaLR` takes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

Factor = Callable[[int], float]

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
        found = "; ".join(fault for fault, is_so in wrong.items() if is_so)
        raise ValueError(f"this optimizer cannot be made: {found}")
    more = {}
    if name in MOMENTUM:
        more["momentum"] = MOMENTUM[name] if momentum is None else momentum
    return OPTIMIZERS[name](parameters, lr=learning_rate, weight_decay=weight_decay, **more)


# --- learning rates -------------------------------------------------------------------------------


def constant() -> Factor:
    return lambda step: 1.0


def step_decay(factor: float, every: int) -> Factor:
    """Times `factor` after each `every` steps: 1, …, 1, factor, …, factor, factor², …"""
    if not 0 < factor <= 1 or every < 1:
        raise ValueError(
            f"step decay by {factor} every {every} steps: "
            "give a factor above 0, up to 1, and 1 step or more"
        )
    return lambda step: factor ** (step // every)


def cosine(steps: int, floor: float = 0.0) -> Factor:
    """From 1 down to `floor` in half a wave over `steps`, and there from then on."""
    if steps < 1 or not 0 <= floor <= 1:
        raise ValueError(
            f"cosine over {steps} steps down to {floor}: "
            "give 1 step or more, and a floor from 0 to 1"
        )

    def factor(step: int) -> float:
        wave = (1 + math.cos(math.pi * min(step, steps) / steps)) / 2
        return floor + (1 - floor) * wave

    return factor


def warmed_up(then: Factor, steps: int) -> Factor:
    """`then`, delayed by `steps` that climb in a straight line to where it begins."""
    if steps < 0:
        raise ValueError(f"warm-up takes {steps} steps; give 0 or more")
    return lambda step: then(0) * (step + 1) / steps if step < steps else then(step - steps)


def learning_rates(
    kind: str,
    *,
    steps: int | None = None,
    factor: float | None = None,
    every: int | None = None,
    floor: float | None = None,
    warm_up: int = 0,
) -> Factor:
    """A schedule by name: "constant", "step" (`factor`, `every` so many steps), "cosine" (`steps`
    of the whole run, `floor`), each after `warm_up` steps, which are part of `steps`.

        LambdaLR(optimizer, learning_rates("step", factor=0.1, every=30 * steps_per_epoch))
    """
    given = {"steps": steps, "factor": factor, "every": every, "floor": floor}
    given = {name: value for name, value in given.items() if value is not None}
    if kind not in KINDS:
        raise ValueError(f"learning rates are {', '.join(KINDS)}, not {kind!r}")
    make, needs, may = KINDS[kind]
    missing, useless = sorted(needs - set(given)), sorted(set(given) - needs - may)
    problems = [
        *([f"needs {', '.join(missing)}"] if missing else []),
        *([f"has no {', '.join(useless)}"] if useless else []),
    ]
    if problems:
        raise ValueError(f"the learning rate {kind!r} {' and '.join(problems)}")
    if "steps" in given:
        if given["steps"] <= warm_up:
            raise ValueError(
                f"a run of {given['steps']} steps has no more than the {warm_up} of its warm-up"
            )
        given["steps"] -= warm_up
    return warmed_up(make(**given), warm_up)


# Name to function, what it needs, and what it may have.
KINDS: dict[str, tuple[Callable[..., Factor], set[str], set[str]]] = {
    "constant": (constant, set(), set()),
    "step": (step_decay, {"factor", "every"}, set()),
    "cosine": (cosine, {"steps"}, {"floor"}),
}
