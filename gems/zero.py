"""Bytes that a rank has of a stage whose state is shared out over its holders (ZeRO).

With N holders, P bytes of trained weights, and an optimizer that keeps `state` times as much:

    zero   weights   gradients                          optimizer
    0      P         P                                  state P
    1      P         P                                  state P / N
    2      P         P until they are summed, then P/N  state P / N
    3      P/N, and  as with 2                          state P / N
           P while
           it runs

Parts are counted in cells of four bytes and padded to the same size; for weights of other types
that is a few bytes off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gems.costs import Cost

CELL = 4


@dataclass(frozen=True)
class Share:
    """Of one stage on one rank: bytes of what stands there, and of what comes and goes.

    weights     what is always there; with zero=3, `gathered` more while the stage runs
    gradients   from the first backward on, until they are summed, then `summed`
    optimizer   for each time the gradients that it keeps, what it keeps of this rank's part
    """

    weights: float
    gathered: float
    gradients: float
    summed: float
    optimizer: float


def needed(shares: Sequence[Share], state: float) -> float:
    """Bytes of all stages of a rank: of one of them weights and gradients as a whole."""
    standing = sum(s.weights + s.summed + state * s.optimizer for s in shares)
    return standing + max((s.gathered + s.gradients - s.summed for s in shares), default=0.0)


def share(cost: Cost, zero: int, holders: int, place: int = 0) -> Share:
    """What the holder at `place` has of a stage."""
    whole = cost.gradients
    if not zero or holders < 2:
        return Share(cost.weights, 0.0, whole, whole, whole)
    part = -(-whole // (CELL * holders)) * CELL
    padded = part * holders
    own = min(max(whole - place * part, 0.0), part)
    rest = cost.weights - whole
    return Share(
        weights=rest + (part if zero == 3 else padded),
        gathered=padded if zero == 3 else 0.0,
        gradients=padded,
        summed=part if zero > 1 else padded,
        optimizer=own,
    )
