"""The largest side that fits under a cap, in few trials: bytes grow with the side's square."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
    square: bool = True,
    known: Iterable[Trial] = (),
) -> Largest:
    """Try sides, each a `multiple`, until one fits and the next does not.

    If bytes are a + b side² (`square`), the next guess is where two trials say that the cap is
    reached. Otherwise it is a quarter more, and half-way once a side has failed. A step should
    take no more than `longest` seconds, by those of the last that fits. `known` were tried before;
    without any, `start` is tried first.
    """
    seen = list(known)
    while True:
        low = max((t for t in seen if t.fits(cap)), key=lambda t: t.side, default=None)
        high = min((t for t in seen if not t.fits(cap)), key=lambda t: t.side, default=None)
        floor, ceiling = low.side if low else 0, high.side if high else None
        if ceiling is not None and ceiling - floor <= multiple:
            return Largest(low, high)
        guess = _reached(seen, cap) if square else None
        if guess is None:
            guess = (floor + ceiling) / 2 if ceiling is not None else 1.25 * floor or start
        if ceiling is not None:
            guess = min(guess, ceiling - multiple)
        side = max(int(guess) // multiple * multiple, floor + multiple)
        if low and low.seconds * (side / low.side) ** 2 > longest:
            side = int(low.side * sqrt(longest / low.seconds)) // multiple * multiple
            if side < 1.1 * floor:
                return Largest(low, high, stopped=True)
        seen.append(tried(side))


def _reached(seen: list[Trial], cap: float) -> float | None:
    """The side at which bytes reach the cap, by the two trials nearest to it that were counted."""
    counted = [(t.side**2, t.peak) for t in seen if t.peak is not None]
    counted.sort(key=lambda pair: abs(pair[1] - cap))
    if not counted:
        return None
    (x, y), slope = counted[0], counted[0][1] / counted[0][0]
    if len(counted) > 1:
        u, v = counted[1]
        slope = (y - v) / (x - u)
    return sqrt(max(x + (cap - y) / slope, 0)) if slope > 0 else None
