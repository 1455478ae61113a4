"""Where to cut a run of blocks: even pieces first, then the least to send between them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate

from gems.costs import Costs
from gems.errors import PlanError
from gems.graph import Graph

SLACK = 1.02  # a piece may be this much above the best possible if that saves messages


def cut(
    weights: Sequence[float],
    crossing: Sequence[float],
    parts: int,
    speeds: Sequence[int] | None = None,
    whole: Sequence[float] | None = None,
) -> list[int]:
    """Starts of `parts` runs with the smallest largest load; ties go to the least crossing.

    `crossing[i]` is the price of a cut before item i. Every run has at least one item. A team of
    `speeds[k]` ranks shares the weights of run k; of `whole`, each of them bears all.
    """
    n = len(weights)
    if n < parts:
        raise PlanError(
            f"{n} blocks cannot fill {parts} stages; use fewer stages, or a model that is recorded "
            "in smaller pieces"
        )
    speeds, whole = speeds or (1,) * parts, whole or (0.0,) * n
    items = list(zip(weights, whole, strict=True))
    loads = [[weight / speed + held for weight, held in items] for speed in speeds]
    sums = [[0.0, *accumulate(load)] for load in loads]
    even = len(set(speeds)) == 1
    least = _smallest_largest(loads[0], parts) if even else _smallest_of_teams(sums)
    starts = _cheapest(sums, crossing, SLACK * least)
    assert starts is not None, "the smallest bound is one that can be kept"
    return starts


def _smallest_largest(weights: Sequence[float], parts: int) -> float:
    """The smallest bound under which the items fit into so many runs."""
    low, high = max(weights), sum(weights)
    for _ in range(60):
        middle = (low + high) / 2
        runs, filled = 1, 0.0
        for w in weights:
            if filled + w > middle:
                runs, filled = runs + 1, 0.0
            filled += w
        low, high = (low, middle) if runs <= parts else (middle, high)
    return high


def _smallest_of_teams(sums: Sequence[Sequence[float]]) -> float:
    """The smallest bound where an item weighs less in some runs than in others.

    A piece of a run may weigh more in the next one, so filling up one after the other is not best.
    """
    low, high = 0.0, max(row[-1] for row in sums)
    free = [0.0] * len(sums[0])
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        fits = _cheapest(sums, free, middle) is not None
        low, high = (low, middle) if fits else (middle, high)
    return high


def _cheapest(
    sums: Sequence[Sequence[float]], crossing: Sequence[float], limit: float
) -> list[int] | None:
    """Dynamic programming over (runs, items) so far; a window slides over where a run began.

    `sums[k]` adds up what items weigh in run k. None if some run must be above the limit.
    """
    n = len(sums[0]) - 1
    infinity = float("inf")
    best = [0.0] + [infinity] * n
    came: list[list[int]] = []
    for part, load in enumerate(sums):
        row, origin = [infinity] * (n + 1), [0] * (n + 1)
        window: deque[int] = deque()
        for stop in range(part + 1, n + 1):
            start = stop - 1
            while window and best[window[-1]] >= best[start]:
                window.pop()
            window.append(start)
            while window and load[stop] - load[window[0]] > limit * (1 + 1e-12):
                window.popleft()
            if window and best[window[0]] < infinity:
                price = crossing[stop] if stop < n else 0.0
                row[stop], origin[stop] = best[window[0]] + price, window[0]
        best = row
        came.append(origin)
    starts, at = [], n
    for origin in reversed(came):
        at = origin[at]
        starts.append(at)
    return starts[::-1] if best[n] < infinity else None


def crossing_bytes(graph: Graph) -> list[int]:
    """For each block, the bytes that a cut right before it would send."""
    last_read: dict[str, int] = dict.fromkeys(graph.outputs, len(graph.blocks))
    for i, block in enumerate(graph.blocks):
        for name in block.reads:
            last_read[name] = max(last_read.get(name, 0), i)
    change = [0] * (len(graph.blocks) + 2)
    for name, producer in graph.producer.items():
        if last_read.get(name, -1) > producer:
            change[producer + 1] += graph.value[name].bytes
            change[min(last_read[name], len(graph.blocks)) + 1] -= graph.value[name].bytes
    return list(accumulate(change))[: len(graph.blocks)]


def by_weight(
    graph: Graph, costs: Costs, parts: int, what: str, speeds: Sequence[int] | None = None
) -> list[int]:
    """The stage of every block, with even `time` or `memory` on the ranks of all stages.

    `speeds` says how many ranks run each stage together.
    """
    if what == "time":
        weights, whole = [cost.seconds for cost in costs.items], None
    else:
        # Weights, their gradients and two moments of an optimizer are held beside the stash, and
        # by every rank of a team.
        weights, whole = _stash(graph), [4 * cost.weights for cost in costs.items]
    starts = cut(weights, crossing_bytes(graph), parts, speeds, whole)
    return [sum(i >= start for start in starts) - 1 for i in range(len(graph.blocks))]


def _stash(graph: Graph) -> list[float]:
    """Bytes that each block adds: a storage saved twice counts where it is saved first."""
    seen: set[int] = set()
    found = []
    for block in graph.blocks:
        fresh = {storage: size for storage, size in block.saves if storage not in seen}
        seen.update(fresh)
        found.append(sum(fresh.values()))
    return found
