"""Loss scaling for fp16: keeps small gradients from vanishing, the same on every rank."""

from __future__ import annotations

import math


class LossScale:
    """Halve when a gradient overflows, double after so many good steps."""

    def __init__(self, start: float = 2.0**16, patience: int = 2000) -> None:
        self.value, self.patience, self.good = start, patience, 0

    def accepts(self, norm: float) -> bool:
        """Whether gradients of this norm did not overflow; the scale follows."""
        self.update(not math.isfinite(norm))
        return math.isfinite(norm)

    def update(self, overflowed: bool) -> None:
        if overflowed:
            self.value, self.good = max(self.value / 2, 1.0), 0
            return
        self.good += 1
        if self.good == self.patience:
            self.value, self.good = self.value * 2, 0
