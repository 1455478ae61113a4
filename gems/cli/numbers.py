"""Numbers on the command line: finite, and of a size that somebody can mean."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

from gems.errors import short

MOST = 10**12


def whole(most: int = MOST) -> Callable[[str], int]:
    """The type of an option that takes a whole number; below what it can be, options tell."""

    def parsed(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"invalid whole number {short(text, 40)!r}; write one like 8"
            ) from None
        if not -most <= number <= most:
            raise argparse.ArgumentTypeError(f"{short(text, 40)} is too large; give {most} at most")
        return number

    return parsed


def number(text: str) -> float:
    """The type of an option that takes any number, but not nan or inf."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise argparse.ArgumentTypeError(
            f"invalid number {short(text, 40)!r}; write a finite one like 0.05"
        )
    return found


# How large an option can be that somebody means; others are bounded by MOST.
SIZES: dict[str, int] = {
    **dict.fromkeys(("batch_size", "samples", "num_classes", "max_in_flight"), 10**9),
    **dict.fromkeys(("image_size", "num_filters", "stride"), 10**7),
    **dict.fromkeys(("stages", "parts", "times", "data", "ranks", "local_dp", "auto"), 2**20),
    **dict.fromkeys(("micro_batches", "spatial_size", "fused_layers"), 2**20),
    **dict.fromkeys(("num_layers", "width"), 10**5),
    **dict.fromkeys(("num_workers", "level"), 10**4),
    "seed": 2**63 - 1,
}


def bound(parser: Any) -> None:
    """Have every option of a parser that takes numbers take only such."""
    for action in parser._actions:
        if action.type is int:
            action.type = whole(SIZES.get(action.dest, MOST))
        elif action.type is float:
            action.type = number
