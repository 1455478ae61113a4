"""Partition a sequence of blocks: even runs within a budget first, then the least to send."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf

from gems.errors import PlanError
from gems.model.costs import Costs
from gems.model.graph import Graph
from gems.plans.residency import ADAM

SLACK = 1.02  # a run may be this much above the best possible if that saves messages


def partition(
    weights: Sequence[float],
    crossing: Sequence[float],
    parts: int,
    speeds: Sequence[int] | None = None,
    whole: Sequence[float] | None = None,
    budget: Budget | None = None,
) -> list[int]:
    """Starts of `parts` runs with the smallest largest load; ties go to the least crossing.

    `crossing[i]` is the price of a boundary before item i. Every run has at least one item. A group
    of `speeds[k]` ranks shares the weights of run k; of `whole`, each of them bears all. With a
    `budget`, every run must be within it; if there is no such partition, bytes are evened out.
    """
    n = len(weights)
    speeds, whole = speeds or (1,) * parts, whole or (0.0,) * n
    items = list(zip(weights, whole, strict=True))
    of_speed = {
        speed: [0.0, *accumulate(weight / speed + held for weight, held in items)]
        for speed in set(speeds)
    }
    sums = [of_speed[speed] for speed in speeds]
    held = [[0.0, *accumulate(row)] for row in budget.bytes] if budget else None
    fitting = Runs(sums, held, budget.limit).cheapest(crossing) if budget else None
    return fitting or evened(held or sums, crossing)


def evened(sums: Sequence[Sequence[float]], crossing: Sequence[float]) -> list[int]:
    """Starts of runs with the smallest largest load; `sums[k]` adds up the weights in run k."""
    n, parts = len(sums[0]) - 1, len(sums)
    if n < parts:
        raise PlanError(
            f"{n} blocks cannot fill {parts} stages; use fewer stages, or a model that is recorded "
            "in smaller pieces"
        )
    starts = Runs(sums).cheapest(crossing)
    assert starts is not None, "without a limit there is one, for there are items enough"
    return starts


@dataclass(frozen=True)
class Budget:
    """What each item takes in each run, `bytes[run][item]`, and how much a run may take."""

    bytes: Sequence[Sequence[float]]
    limit: float


@dataclass(frozen=True)
class Runs:
    """Items in a row, to be split into runs: `sums[k]` adds up what they weigh in run k, and
    `held[k]` the bytes that they take there, of which a run may have `most`."""

    sums: Sequence[Sequence[float]]
    held: Sequence[Sequence[float]] | None = None
    most: float = inf

    @property
    def items(self) -> int:
        return len(self.sums[0]) - 1

    def _stop(self, run: int, start: int, limit: float) -> int:
        """How far a run can go from here."""
        found = _last(self.sums[run], start, limit * (1 + 1e-12))
        return min(found, _last(self.held[run], start, self.most)) if self.held else found

    def _start(self, run: int, stop: int, limit: float) -> int:
        """How far back a run that ends here can begin."""
        found = _first(self.sums[run], stop, limit * (1 + 1e-12))
        return max(found, _first(self.held[run], stop, self.most)) if self.held else found

    def fit(self, limit: float) -> bool:
        """Whether the runs can hold all items: filling up one after the other gets furthest."""
        at = 0
        for run in range(len(self.sums)):
            at = self._stop(run, at, limit)
        return at == self.items

    def smallest(self) -> float:
        """The smallest limit that can be kept."""
        low, high = 0.0, max(row[-1] for row in self.sums)
        while high - low > 1e-6 * high:
            middle = (low + high) / 2
            low, high = (low, middle) if self.fit(middle) else (middle, high)
        return high

    def cheapest(self, crossing: Sequence[float]) -> list[int] | None:
        """Starts of runs with the least crossing among the even ones; None if none fits.

        Every run has an item: where the smallest limit would leave one without, it is raised.
        """
        most = max(row[-1] for row in self.sums)
        limit = SLACK * self.smallest()
        while (found := self._cheapest(crossing, limit)) is None and limit < most:
            limit = min(SLACK * limit, most) or most
        return found

    def _cheapest(self, crossing: Sequence[float], limit: float) -> list[int] | None:
        """Dynamic programming over (runs, items) so far; a window slides over where a run began.

        Only places are looked at that the runs before can reach and the runs behind can do with.
        """
        n, count = self.items, len(self.sums)
        highs, lows = [0], [n]
        for run in range(count):
            highs.append(min(self._stop(run, highs[-1], limit), n - (count - 1 - run)))
        for run in reversed(range(count)):
            lows.append(max(self._start(run, lows[-1], limit), run))
        lows.reverse()
        if any(low > high for low, high in zip(lows, highs, strict=True)):
            return None
        best, came = {0: 0.0}, []
        for run in range(count):
            best, origin = self._advance(run, best, lows[run + 1], highs[run + 1], crossing, limit)
            came.append(origin)
        if n not in best:
            return None
        starts, at = [], n
        for origin in reversed(came):
            at = origin[at]
            starts.append(at)
        return starts[::-1]

    def _advance(
        self,
        run: int,
        best: dict[int, float],
        low: int,
        high: int,
        crossing: Sequence[float],
        limit: float,
    ) -> tuple[dict[int, float], dict[int, int]]:
        """The least crossing for every place where this run may stop, and where it began."""
        waiting = deque(sorted(best))
        window: deque[int] = deque()
        found, origin = {}, {}
        for stop in range(low, high + 1):
            while waiting and waiting[0] < stop:
                start = waiting.popleft()
                while window and best[window[-1]] >= best[start]:
                    window.pop()
                window.append(start)
            while window and self._stop(run, window[0], limit) < stop:
                window.popleft()
            if window:
                price = crossing[stop] if stop < self.items else 0.0
                found[stop], origin[stop] = best[window[0]] + price, window[0]
        return found, origin


def _last(sums: Sequence[float], start: int, limit: float) -> int:
    return bisect_right(sums, sums[start] + limit) - 1


def _first(sums: Sequence[float], stop: int, limit: float) -> int:
    return bisect_left(sums, sums[stop] - limit)


def by_weight(
    graph: Graph,
    costs: Costs,
    parts: int,
    what: str,
    speeds: Sequence[int] | None = None,
    *,
    spatial: int = 0,
    streamed: int = 0,
    in_flight: Sequence[float] | None = None,
    limit: float | None = None,
    state: float = ADAM,
) -> list[int]:
    """The stage of every block, with even `time` or `memory` on the ranks of all stages.

    `speeds` is how many ranks run each stage together. The first `spatial` stages end before the
    first block that cannot be tiled, if they can; the first `streamed` ones right before the first
    block that patches of the image cannot pass one after the other, or that comes when the image is
    gone. If a stage has `in_flight[s]`
    micro-batches in flight, and at most `limit` bytes, time is evened out within that. `state` is
    the optimizer's, per byte of parameters.
    """
    blocks = len(graph.blocks)
    whole = next((i for i, b in enumerate(graph.blocks) if b.whole), blocks)
    if streamed:
        spatial = streamed
        whole = streaming_blocks(graph)
        split = spatial <= whole and parts - spatial <= blocks - whole and parts > spatial
        stage_of = (
            []
            if split
            else _even(graph, costs, range(blocks), parts, what, speeds, in_flight, None, state)
        )
    else:
        stage_of = _even(graph, costs, range(blocks), parts, what, speeds, in_flight, limit, state)
        inside = all(stage >= spatial for stage in stage_of[whole:])
        split = spatial and not inside and whole >= spatial and parts > spatial
    if not split:
        return stage_of  # if it cannot be, whoever tiles the stages rejects it, and knows why
    sizes = list(speeds or (1,) * parts)
    counts = list(in_flight or (1.0,) * parts)
    first_limit = None if streamed else limit  # a streamed stage saves next to nothing
    first = _even(
        graph, costs, range(whole), spatial, what, sizes[:spatial], counts[:spatial],
        first_limit, state,
    )  # fmt: skip
    rest = _even(
        graph, costs, range(whole, blocks), parts - spatial, what, sizes[spatial:],
        counts[spatial:], limit, state,
    )  # fmt: skip
    return first + [spatial + stage for stage in rest]


def streaming_blocks(graph: Graph) -> int:
    """How many of the first blocks work on an image that may run in patches."""
    reach = next((i for i, b in enumerate(graph.blocks) if not b.streams), len(graph.blocks))
    return next((i + 1 for i in reversed(range(reach)) if graph.blocks[i].tiled), 0)


def _even(
    graph: Graph,
    costs: Costs,
    blocks: range,
    parts: int,
    what: str,
    speeds: Sequence[int] | None,
    in_flight: Sequence[float] | None,
    limit: float | None,
    state: float,
) -> list[int]:
    """The same for a run of blocks, counting its stages from 0."""
    items = costs.items[blocks.start : blocks.stop]
    pairs = list(zip(in_flight or (1.0,) * parts, speeds or (1,) * parts, strict=True))
    distinct = {(k, n): held_bytes(graph, costs, blocks, k, n, state) for k, n in set(pairs)}
    rows = [distinct[pair] for pair in pairs]
    crossing = graph.crossing[blocks.start : blocks.stop]
    if what == "memory":
        starts = evened([[0.0, *accumulate(row)] for row in rows], crossing)
    else:
        budget = Budget(rows, limit) if limit is not None else None
        seconds = [cost.seconds for cost in items]
        starts = partition(seconds, crossing, parts, speeds, budget=budget)
    return [bisect_right(starts, i) - 1 for i in range(len(blocks))]


def held_bytes(
    graph: Graph, costs: Costs, blocks: range, in_flight: float, ranks: int, state: float
) -> list[float]:
    """Bytes of each block on one of so many ranks. Weights, their gradients and the optimizer's
    state are held beside the activations, by every rank of a spatial group; as if all were trained
    and none sharded."""
    return [
        in_flight * graph.first_saved[i] / ranks + (2 + state) * costs[i].weights for i in blocks
    ]
