"""Numbers over the steps of a run, in one small picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, floor, isfinite, log10

from gems.draw.shapes import BOLD, SOFT, STAGES, caption, legend, line, page, rect, steps

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 520.0, 220.0, 64.0, 16.0, 34.0, 28.0


def curves(title: str, series: Mapping[str, Points]) -> str:
    """An SVG of one or several curves over one axis; what is not finite is left out."""
    shown = {name: [(x, y) for x, y in points if isfinite(y)] for name, points in series.items()}
    shown = {name: points for name, points in shown.items() if points}
    body = [caption(LEFT, 20, title, more=BOLD)]
    if not shown:
        return page(WIDTH, HEIGHT, title, [*body, caption(LEFT, HEIGHT / 2, "nothing", fill=SOFT)])
    xs, ys = zip(*(point for points in shown.values() for point in points), strict=True)
    marks, first, last = ticks(min(ys), max(ys)), min(xs), max(xs)
    across = (WIDTH - LEFT - RIGHT) / ((last - first) or 1)
    up = (HEIGHT - TOP - BOTTOM) / (marks[-1] - marks[0])

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + (x - first) * across, HEIGHT - BOTTOM - (y - marks[0]) * up

    for tick in marks:
        _, y = place(first, tick)
        body.append(line(LEFT, y, WIDTH - RIGHT, y))
        body.append(caption(LEFT - 6, y + 4, f"{tick:.4g}", 11, SOFT, "end"))
    for x in dict.fromkeys((first, last)):
        body.append(caption(place(x, marks[0])[0], HEIGHT - 8, f"{x:g}", 11, SOFT, "middle"))
    for points, colour in zip(shown.values(), STAGES, strict=False):
        spots = [place(*point) for point in points]
        body.append(steps(spots, colour))
        if len(spots) == 1:
            body.append(rect(spots[0][0] - 2, spots[0][1] - 2, 4, 4, colour))
    if len(shown) > 1:
        body += legend(LEFT + 8.0 * len(title) + 24, 20, list(zip(STAGES, shown, strict=False)))
    return page(WIDTH, HEIGHT, title, body)


def ticks(low: float, high: float) -> list[float]:
    """Three to six round numbers that hold the values between them."""
    if low == high:
        low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
    rough = (high - low) / 4
    ten = 10.0 ** floor(log10(rough))
    step = next(n * ten for n in (1, 2, 2.5, 5, 10) if n * ten >= rough * (1 - 1e-9))
    first, last = floor(low / step + 1e-9), ceil(high / step - 1e-9)
    return [n * step for n in range(first, last + 1)]
