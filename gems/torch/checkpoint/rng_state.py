"""The random generators of a process, noted and put back: torch's, Python's, numpy's, the GPU's.

What the model draws is keyed (rng.py) and needs none of them; the user's own code may.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def noted(device: torch.device) -> dict[str, Any]:
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


def put_back(states: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(states["torch"])
    python = states["python"]
    numbers = tuple(python["numbers"].tolist())
    random.setstate((python["version"], numbers, python["gauss"]))
    if "numpy" in states:
        import numpy

        numpy.random.set_state(states["numpy"])
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
