"""States of the random generators of a process: torch's, Python's, numpy's, the GPU's.

What the model draws is keyed (rng.py) and needs none of them; the user's own code may.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

PYTHON, NUMPY = 625, 624  # numbers in a state of Python's and numpy's Mersenne twister


def rng_states(device: torch.device) -> dict[str, Any]:
    """Their states, as values that a checkpoint can hold."""
    version, numbers, gauss = random.getstate()
    found: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": {"version": version, "numbers": torch.tensor(numbers), "gauss": gauss},
    }
    if (numpy := sys.modules.get("numpy")) is not None:
        state = numpy.random.get_state(legacy=False)
        if state["bit_generator"] == "MT19937":
            found["numpy"] = state
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    return found


def restore_rng(states: dict[str, Any], device: torch.device) -> None:
    _restore(states, device, torch.default_generator, random)


def validate_rng(states: Any, device: torch.device) -> None:
    """Raise whatever comes, unless generators of their own can have these states."""
    _restore(states, device, torch.Generator(), random.Random())


def _restore(states: Any, device: torch.device, cpu: torch.Generator, python: Any) -> None:
    own = python is not random
    cpu.set_state(states["torch"])
    saved = states["python"]
    if saved["numbers"].numel() != PYTHON:
        raise ValueError(f"{saved['numbers'].numel()} numbers of Python's generator")
    if saved["gauss"] is not None and type(saved["gauss"]) is not float:
        raise ValueError(f"gauss of Python's generator is {type(saved['gauss']).__name__}")
    python.setstate((saved["version"], tuple(saved["numbers"].tolist()), saved["gauss"]))
    if "numpy" in states:
        import numpy

        at = states["numpy"]["state"]["pos"]
        if type(at) is not int or not 0 <= at <= NUMPY:  # numpy would read beyond its state
            raise ValueError("the position in the state of numpy's generator")
        (numpy.random.RandomState() if own else numpy.random).set_state(states["numpy"])
    if "cuda" in states and device.type == "cuda":
        if own:
            torch.Generator(device).set_state(states["cuda"])
        else:
            torch.cuda.set_rng_state(states["cuda"], device)
