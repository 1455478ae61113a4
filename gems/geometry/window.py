"""What a layer reads along one axis: outputs a..b need inputs lo..hi, whatever the layer.

`reads(a, b)` is the span of inputs that the outputs `a <= o < b` read, where cells outside of the
image are its border. `follow(c)` is where to split the output if the input is split at c. Any split
is exact; a good one keeps most of what is read on the same rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

Span = tuple[int, int]


class Window(Protocol):
    def reads(self, a: int, b: int) -> Span:
        """The inputs of the outputs a <= o < b, at least one; they may lie beyond the image."""
        ...

    def follow(self, c: int) -> int:
        """Where to split the output if the input is split at c; not yet limited to its length."""
        ...


@dataclass(frozen=True)
class Same:
    """Every output reads the input at its own place."""

    def reads(self, a: int, b: int) -> Span:
        return a, b

    def follow(self, c: int) -> int:
        return c


@dataclass(frozen=True)
class Slide:
    """A kernel slides over the input: convolution, pooling; also padding, cropping and steps.

    ::

        input    -1  0  1  2  3  4  5       kernel 3, stride 2, padding 1:
        output 0  └──┴──┘                   output o reads 2 o - 1 ... 2 o + 1
        output 1        └──┴──┘
    """

    kernel: int = 1
    stride: int = 1
    padding: int = 0  # before the first cell; negative where cells are cropped away
    dilation: int = 1

    @property
    def reach(self) -> int:
        return self.dilation * (self.kernel - 1)

    def reads(self, a: int, b: int) -> Span:
        return self.stride * a - self.padding, self.stride * (b - 1) - self.padding + self.reach + 1

    def follow(self, c: int) -> int:
        """The first output whose window's centre lies at or behind the split."""
        return -((1 - 2 * c - 2 * self.padding + self.reach) // (2 * self.stride))


@dataclass(frozen=True)
class Spread:
    """Transposed convolution: input i writes outputs s i - p ... s i - p + d (k - 1)."""

    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1

    @property
    def reach(self) -> int:
        return self.dilation * (self.kernel - 1)

    def reads(self, a: int, b: int) -> Span:
        low = -((self.reach - a - self.padding) // self.stride)
        return low, max(low, (b - 1 + self.padding) // self.stride + 1)

    def writes(self, lo: int, hi: int) -> Span:
        """The outputs that the inputs lo <= i < hi write to."""
        return self.stride * lo - self.padding, self.stride * (hi - 1) - self.padding + (
            self.reach + 1
        )

    def follow(self, c: int) -> int:
        return self.stride * c - self.padding + (self.reach + 1 - self.stride) // 2


@dataclass(frozen=True)
class Taps:
    """Each output lists its first and last input, both rising: resizing and adaptive pooling."""

    first: Sequence[int]
    last: Sequence[int]
    length: int  # of the input

    def reads(self, a: int, b: int) -> Span:
        return self.first[a], self.last[b - 1] + 1

    def follow(self, c: int) -> int:
        return (2 * c * len(self.first) + self.length) // (2 * self.length)


@dataclass(frozen=True)
class Grow:
    """Each input cell becomes `times` output cells: pixel shuffle."""

    times: int

    def reads(self, a: int, b: int) -> Span:
        return a // self.times, -(-b // self.times)

    def follow(self, c: int) -> int:
        return c * self.times


@dataclass(frozen=True)
class Shrink:
    """`times` input cells become one output cell: the inverse of pixel shuffle."""

    times: int

    def reads(self, a: int, b: int) -> Span:
        return a * self.times, b * self.times

    def follow(self, c: int) -> int:
        return (2 * c + self.times) // (2 * self.times)


@dataclass(frozen=True)
class Line:
    """Any window far from the border of the image, as four numbers: what output o reads begins at
    the largest whole number up to (o times + low) / per, and ends so many outputs on."""

    times: int
    low: int
    high: int
    per: int = 1

    def reads(self, a: int, b: int) -> Span:
        return (self.times * a + self.low) // self.per, -(-(self.times * b + self.high) // self.per)

    def follow(self, c: int) -> int:
        return (2 * c * self.per + self.times) // (2 * self.times) if self.times else c


MIDDLE = 64  # outputs that are looked at for a line


def line(window: Window, length: int, outputs: int) -> Line:
    """The line of a window over `length` inputs, from outputs in the middle."""
    times, per = _slope(window, length, outputs)
    at = range(max(outputs // 2 - MIDDLE, 0), max(min(outputs // 2 + MIDDLE, outputs), 1))
    spans = [(o, *window.reads(o, o + 1)) for o in at] if outputs else [(0, 0, 1)]
    low = min(a * per + per - 1 - times * o for o, a, _ in spans)
    high = max((b - 1) * per + 1 - times * (o + 1) for o, _, b in spans)
    return Line(times, low, high, per)


def _slope(window: Window, length: int, outputs: int) -> tuple[int, int]:
    """How many inputs on per output."""
    inner = getattr(window, "slide", window)
    if isinstance(inner, Slide):
        return inner.stride, 1
    if isinstance(inner, Spread):
        return 1, inner.stride
    if isinstance(inner, Grow):
        return 1, inner.times
    if isinstance(inner, Shrink):
        return inner.times, 1
    if isinstance(inner, Taps):
        return length, max(outputs, 1)
    return (1, 1) if isinstance(inner, Same) else (0, 1)
