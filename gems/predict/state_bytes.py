"""Bytes that a rank has of a stage whose state is shared out over its holders (ZeRO), or put away.

With N holders, P bytes of trained weights, and an optimizer that keeps `state` times as much:

    zero   weights   gradients                          optimizer
    0      P         P                                  state P
    1      P         P                                  state P / N
    2      P         P until they are summed, then P/N  state P / N
    3      P/N, and  as with 2                          state P / N
           P while
           it runs

What is put away (offload) is not on the device: of weights nothing but P while the stage runs, of
gradients nothing once they are summed, of the optimizer's state nothing.

Parts are counted in cells of four bytes and padded to the same size; for weights of other types
that is a few bytes off.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from gems.model.costs import Cost

CELL = 4


@dataclass(frozen=True)
class Share:
    """Of one stage on one rank: bytes of what stands there, and of what comes and goes.

    weights     what is always there; with zero=3 or put away, `gathered` more while the stage runs
    gradients   from the first backward on, until they are summed, then `summed`
    optimizer   for each time the gradients that it keeps, what it keeps of this rank's part
    home        weights that are put away
    own         the part that this rank's optimizer steps
    """

    weights: float
    gathered: float
    gradients: float
    summed: float
    optimizer: float
    home: float = 0.0
    own: float = 0.0

    def away(self, state: float, *, summed: bool) -> float:
        """Bytes that are put away, before the gradients are `summed` or after."""
        kept = state * self.own if not self.optimizer else 0.0
        return self.home + kept + (self.own if self.home and summed else 0.0)

    def updating(self, state: float) -> float:
        """Bytes that an update brings back from disk, for as long as it takes."""
        if self.optimizer:
            return 0.0
        return self.home + (self.own if self.home else 0.0) + state * self.own


def needed(shares: Sequence[Share], state: float) -> float:
    """Bytes of all stages of a rank: of one of them weights and gradients as a whole."""
    resident = sum(s.weights + s.summed + state * s.optimizer for s in shares)
    return resident + max((s.gathered + s.gradients - s.summed for s in shares), default=0.0)


def share(cost: Cost, zero: int, holders: int, place: int = 0, away: Collection[str] = ()) -> Share:
    """What the holder at `place` has of a stage, of which so much is put `away`."""
    whole = cost.gradients
    if not zero or holders < 2:
        found = Share(cost.weights, 0.0, whole, whole, whole, own=whole)
        return _put_away(found, whole, whole, away)
    part = -(-whole // (CELL * holders)) * CELL
    padded = part * holders
    own = min(max(whole - place * part, 0.0), part)
    rest = cost.weights - whole
    found = Share(
        weights=rest + (part if zero == 3 else padded),
        gathered=padded if zero == 3 else 0.0,
        gradients=padded,
        summed=part if zero > 1 else padded,
        optimizer=own,
        own=own,
    )
    return _put_away(found, padded, part if zero == 3 else padded, away)


def _put_away(found: Share, whole: float, home: float, away: Collection[str]) -> Share:
    """The same without what is put away: of `whole` bytes of weights, those at `home`."""
    if "optimizer" in away:
        found = replace(found, optimizer=0.0)
    if "weights" in away:
        found = replace(found, weights=found.weights - home, gathered=whole, summed=0.0, home=home)
    return found
