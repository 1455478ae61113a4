"""The largest side that fits under a cap, in few trials: bytes grow with the side's square."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt


@dataclass(frozen=True)
class Trial:
    """One step that was taken, or why it was not. `peak` is of the fullest rank, and None then."""

    side: int
    peak: int | None
    seconds: float
    note: str = ""

    def fits(self, cap: float) -> bool:
        return self.peak is not None and self.peak <= cap


@dataclass(frozen=True)
class Largest:
    """The largest side that a step was taken on, under the cap; 0 if none.

    `first` is the smallest that failed. `stopped`: the next side would have taken too long.
    """

    trial: Trial | None
    first: Trial | None
    stopped: bool = False

    @property
    def side(self) -> int:
        return self.trial.side if self.trial else 0


def largest(
    tried: Callable[[int], Trial],
    cap: float,
    multiple: int,
    *,
    start: int = 128,
    longest: float = 240.0,
    stride: float = 4.0,
) -> Largest:
    """Try sides, each a `multiple`, until one fits and the next does not.

    From two trials the next guess is where the cap is reached if bytes are a + b side²; it is at
    most `stride` times the largest side so far. A step should take no more than `longest` seconds,
    by those of the last that fits.
    """
    low: Trial | None = None
    high: Trial | None = None
    seen: list[Trial] = []
    side = max(multiple, start // multiple * multiple)
    while True:
        trial = tried(side)
        seen.append(trial)
        if trial.fits(cap):
            low = trial if low is None or trial.side > low.side else low
        else:
            high = trial if high is None or trial.side < high.side else high
        floor, ceiling = low.side if low else 0, high.side if high else None
        if ceiling is not None and ceiling - floor <= multiple:
            return Largest(low, high)
        guess = _guess(seen, cap, floor, ceiling)
        if ceiling is not None:
            guess = min(guess, ceiling - multiple)
        elif low:
            guess = min(guess, stride * low.side)
        side = max(int(guess) // multiple * multiple, floor + multiple)
        if low and low.seconds * (side / low.side) ** 2 > longest:
            side = int(low.side * sqrt(longest / low.seconds)) // multiple * multiple
            if side < 1.1 * floor:
                return Largest(low, high, stopped=True)


def _guess(seen: list[Trial], cap: float, floor: int, ceiling: int | None) -> float:
    """Where bytes reach the cap, by the two trials nearest to it that were counted."""
    counted = [(t.side**2, t.peak) for t in seen if t.peak is not None]
    counted.sort(key=lambda pair: abs(pair[1] - cap))
    if len(counted) > 1 and counted[0][0] != counted[1][0]:
        (x, y), (u, v) = counted[:2]
        slope = (y - v) / (x - u)
        if slope > 0:
            return sqrt(max(x + (cap - y) / slope, 0))
    if counted and (ceiling is None or seen[-1].peak is not None):
        x, y = counted[0]
        return sqrt(x * cap / y)
    return (floor + ceiling) / 2 if ceiling is not None else 2.0 * floor
