"""A learning rate over time: a function from the step (0 is the first update) to a factor of it."""

from __future__ import annotations

import math
from collections.abc import Callable

Factor = Callable[[int], float]


def step_decay(factor: float, every: int) -> Factor:
    """Times `factor` after each `every` steps: 1, …, 1, factor, …, factor, factor², …"""
    if not 0 < factor <= 1:
        raise ValueError(f"learning-rate decay is {factor}; give a factor above 0, up to 1")
    return lambda step: factor ** (step // every)


def cosine(steps: int) -> Factor:
    """From 1 down to 0 in half a wave over `steps`, and 0 from then on."""
    return lambda step: (1 + math.cos(math.pi * min(step, steps) / steps)) / 2


def warmed_up(then: Factor, steps: int) -> Factor:
    """`then`, delayed by `steps` of linear warm-up."""
    return lambda step: then(0) * (step + 1) / steps if step < steps else then(step - steps)
