"""What each way costs in two currencies, such as bytes and seconds, and which ways nothing beats.
Twice as much is as far everywhere.

s │ 3                        The numbers name the points in a list beside the chart. The line
  │ └──2                     is the front: to the left of and under it there is no point.
  │    └──────1              A hollow point is what was predicted for the one it is tied to.
  └───────────── MiB
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import floor, isfinite, log, log10

from gems.draw.curves import ticks
from gems.draw.shapes import BOLD, INK, PAPER, SOFT, STAGES, caption, dot, legend, line, page, steps

Place = Callable[[float, float], tuple[float, float]]

WIDTH, LEFT, TOP, BOTTOM, CHART = 940.0, 64.0, 76.0, 48.0, 560.0
ROW, LEAST = 16.0, 320.0  # of the list, and of the chart


@dataclass(frozen=True)
class Point:
    """A way of a family, at (x, y); `predicted` is the predicted place."""

    name: str
    family: str
    x: float
    y: float
    predicted: tuple[float, float] | None = None


def front(points: Sequence[Point]) -> list[Point]:
    """The points that no other beats in one currency without losing in the other, by x."""
    found: list[Point] = []
    for point in sorted(points, key=lambda p: (p.x, p.y)):
        if not found or point.y < found[-1].y:
            found.append(point)
    return found


def scatter(title: str, points: Sequence[Point], across: str, up: str) -> str:
    """An SVG; `across` and `up` say what the axes are. What is not finite is left out."""
    points = [p for p in points if isfinite(p.x) and isfinite(p.y)]
    height = TOP + BOTTOM + max(LEAST, ROW * (len(points) + 1))
    body = [caption(LEFT, 22, title, 14, more=BOLD)]
    if not points:
        return page(WIDTH, height, title, [*body, caption(LEFT, height / 2, "nothing", fill=SOFT)])
    spots = [(p.x, p.y) for p in points] + [p.predicted for p in points if p.predicted]
    xs, ys = zip(*spots, strict=True)
    (columns, along), (rows, above) = _scale(xs), _scale(ys)
    bottom = height - BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + CHART * along(x), bottom - (bottom - TOP) * above(y)

    colours: dict[str, str] = dict(
        zip(dict.fromkeys(p.family for p in points), STAGES * 4, strict=False)
    )
    body += legend(LEFT, 44, [(colour, family) for family, colour in colours.items()])
    body += _axes(columns, rows, place, across, up, bottom)
    best = front(points)
    body.append(_stairs([place(p.x, p.y) for p in best]))
    for point in points:
        body += _drawn(point, colours[point.family], place)
    body += _numbers([place(p.x, p.y) for p in points])
    body += _listed(points, best, colours)
    return page(WIDTH, height, title, body)


def _scale(values: Sequence[float]) -> tuple[list[float], Callable[[float], float]]:
    """Ticks around some values, and where between the first and the last of them a value is: by its
    ratio to them, for twice as much is as far everywhere; evenly if there is a 0."""
    low, high = min(values), max(values)
    if low <= 0:
        even = ticks(0.0, high)
        return even, lambda x: x / even[-1]
    decades = range(floor(log10(low)), floor(log10(high)) + 2)
    steps = [digit * 10.0**power for power in decades for digit in (1, 2, 5)]
    first = max(i for i, step in enumerate(steps) if step <= low * (1 + 1e-9))
    last = min(i for i, step in enumerate(steps) if step >= high and i > first)
    found = steps[first : last + 1]
    return found, lambda x: log(x / found[0]) / log(found[-1] / found[0])


def _axes(
    columns: list[float], rows: list[float], place: Place, across: str, up: str, bottom: float
) -> list[str]:
    drawn = []
    for tick in rows:
        _, y = place(columns[0], tick)
        drawn.append(line(LEFT, y, LEFT + CHART, y))
        drawn.append(caption(LEFT - 8, y + 4, f"{tick:g}", 11, SOFT, "end"))
    for tick in columns:
        x, _ = place(tick, rows[0])
        drawn += [line(x, TOP, x, bottom), caption(x, bottom + 16, f"{tick:g}", 11, SOFT, "middle")]
    drawn.append(caption(LEFT + CHART, bottom + 34, across, 11, INK, "end"))
    drawn.append(caption(LEFT - 8, TOP - 8, up, 11, INK, "start"))
    return drawn


def _stairs(spots: list[tuple[float, float]]) -> str:
    """Across at the height of a point until the next one is as narrow."""
    path = spots[:1]
    for x, y in spots[1:]:
        path += [(x, path[-1][1]), (x, y)]
    return steps(path, SOFT)


def _drawn(point: Point, colour: str, place: Place) -> list[str]:
    x, y = place(point.x, point.y)
    drawn = []
    if point.predicted:
        u, v = place(*point.predicted)
        drawn.append(line(u, v, x, y, colour))
        tip = f"{point.name}, predicted: {point.predicted[0]:.4g}, {point.predicted[1]:.4g}"
        drawn.append(dot(u, v, 4, PAPER, tip, f'stroke="{colour}"'))
    drawn.append(dot(x, y, 5, colour, f"{point.name}: {point.x:.4g}, {point.y:.4g}"))
    return drawn


def _numbers(spots: list[tuple[float, float]]) -> list[str]:
    """Each at the corner of its disc that is furthest from other discs and the numbers so far."""
    drawn, taken = [], [(x, y) for x, y in spots]
    for number, (x, y) in enumerate(spots, 1):
        corners = [(x + dx, y + dy) for dx in (10, -10) for dy in (-9, 9)]
        others = [spot for spot in taken if spot != (x, y)]

        def distance(corner: tuple[float, float], others=others) -> float:
            return min((abs(corner[0] - u) + abs(corner[1] - v) for u, v in others), default=99.0)

        u, v = max(corners, key=lambda corner: min(distance(corner), 24.0))
        taken.append((u, v))
        drawn.append(caption(u, v + 3.5, str(number), 10, INK, "middle"))
    return drawn


def _listed(points: Sequence[Point], best: list[Point], colours: dict[str, str]) -> list[str]:
    left = LEFT + CHART + 28
    drawn = [caption(left, TOP, "bold: on the front; hollow: predicted", 10, SOFT)]
    for number, point in enumerate(points, 1):
        y = TOP + ROW * number + 4
        drawn.append(dot(left + 4, y - 4, 4, colours[point.family], point.family))
        label = f"{number}  {point.name}: {point.x:.4g}, {point.y:.3g}"
        drawn.append(caption(left + 14, y, label, 11, INK, more=BOLD if point in best else ""))
    return drawn
