"""Partition a fold level by level: encoder level and decoder level on one rank, with their skips.

Boundaries of a fold come in pairs. Rank r has the blocks between its pair and the next one inside:

    blocks  [0, a)  [a, b)  [b, c)  [c, d)  [d, n)       pairs (a, d) and (b, c)
    rank       0       1       2       1       0

A skip is a read of a value that also arrives another way, through other blocks. It stays on its
rank if its writer and its reader are both inside, or both outside, of every pair.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import inf

from gems.errors import PlanError
from gems.model.costs import Costs
from gems.model.graph import Graph
from gems.planner.partition import SLACK, evened, held_bytes
from gems.plans.residency import ADAM

MANY = 4096  # pairs, from which on only some are considered
POINTS = 96  # moments of a step between which one boundary is enough then
SMALL = 1 / 16  # of what a pair sends: what all levels read, as an embedding, is no long skip

Pair = tuple[int, int]  # blocks from the first to before the second are inside


@dataclass(frozen=True)
class Skip:
    """A block reads what an earlier one wrote, and what others made of it."""

    writer: int
    reader: int
    bytes: int


def skips(graph: Graph) -> list[Skip]:
    """Every read of a value whose writer also reaches the reader through other blocks."""
    before: list[int] = []  # for each block, those that it depends on, as a set of bits
    found = []
    for reader, block in enumerate(graph.blocks):
        read = {n: graph.producer[n] for n in block.reads if n in graph.producer}
        through = 0
        for writer in read.values():
            through |= before[writer]
        found += [
            Skip(writer, reader, graph.value[name].bytes)
            for name, writer in read.items()
            if through >> writer & 1
        ]
        for writer in read.values():
            through |= 1 << writer
        before.append(through)
    return found


def has_long_skips(graph: Graph, ranks: int) -> bool:
    """Whether a skip spans more blocks than one of so many ranks gets."""
    return any(ranks * (s.reader - s.writer) > len(graph.blocks) for s in skips(graph))


def level_pairs(graph: Graph) -> Iterator[tuple[int, int, float]]:
    """The pairs of boundaries that no skip leaves, and the bytes that go in and out between."""
    n = len(graph.blocks)
    reads: dict[str, list[int]] = {}
    for i, block in enumerate(graph.blocks):
        for name in block.reads:
            reads.setdefault(name, []).append(i)
    for name in graph.outputs:
        reads.setdefault(name, []).append(n)
    skipped, sent = Passing(n), Passing(n)
    for skip in skips(graph):
        skipped.follow(skip.writer, [skip.reader], skip.bytes)
    for name, writer in graph.producer.items():
        if name in reads:
            sent.follow(writer, reads[name], graph.value[name].bytes)
    for first in range(1, n):
        rows = zip(skipped.beginning(first), sent.beginning(first), strict=True)
        for end, (leaving, total) in enumerate(rows):
            if first < end < n and leaving <= SMALL * total:
                yield first, end, float(total)


class Passing:
    """Bytes that pass the boundaries of a pair, for every end of it, as its beginning moves on.

    What is written inside goes out if its last reader is behind the end; what is written before
    goes in if its next reader is before the end.
    """

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.now = [0] * (blocks + 2)  # by how much each end has more than the one before
        self.passing: list[list[tuple[int, int, int]]] = [[] for _ in range(blocks + 1)]

    def follow(self, writer: int, readers: Sequence[int], size: int) -> None:
        """Count a value, which is read after it is written; readers in order."""
        block, ends = writer, (writer, readers[-1])
        self._add(*ends, size)
        for reader in readers:
            self.passing[block] += [(*ends, -size), (reader, self.blocks, size)]
            block, ends = reader, (reader, self.blocks)
        self.passing[block].append((*ends, -size))

    def _add(self, after: int, last: int, size: int) -> None:
        """For ends behind a block, up to the last."""
        self.now[after + 1] += size
        self.now[last + 1] -= size

    def beginning(self, first: int) -> Iterator[int]:
        """Bytes for each end of the pairs that begin here; to be asked for one after the other."""
        for change in self.passing[first - 1]:
            self._add(*change)
        return accumulate(self.now)


def level_wise(
    graph: Graph,
    costs: Costs,
    depth: int,
    what: str,
    *,
    in_flight: Sequence[float] | None = None,
    limit: float | None = None,
    state: float = ADAM,
) -> list[int]:
    """The stage of every block of a fold of `depth` stages, with even `time` or `memory` on all
    ranks, and then the least to send, among those whose long skips stay on their rank.

    `in_flight` is of each stage by itself; if a rank may have at most `limit` bytes, time is evened
    out within that, or else bytes are.
    """
    blocks = range(len(graph.blocks))
    seconds = [0.0, *accumulate(cost.seconds for cost in costs.items)]
    pairs = _thinned(level_pairs(graph), seconds)
    counts = in_flight or (1.0,) * depth
    of_count = {
        k: [0.0, *accumulate(held_bytes(graph, costs, blocks, k, 1, state))] for k in set(counts)
    }
    held, times = [of_count[k] for k in counts], [seconds] * depth
    found = None
    if what == "time":
        found = Fold(pairs, times, held, inf if limit is None else limit).cheapest()
    found = found or Fold(pairs, held, held, inf).cheapest()
    if found is None:
        raise PlanError(
            f"no partition of {len(graph.blocks)} blocks into {depth} stages keeps long skips on "
            f"their rank: placement='levels' needs {(depth - 1) // 2} pairs of boundaries, one "
            "inside the other, that no skip leaves; use fewer stages, or placement='fold'"
        )
    return [bisect_right(found, i) - 1 for i in blocks]


def _thinned(
    pairs: Iterator[tuple[int, int, float]], seconds: Sequence[float]
) -> list[list[tuple[int, float]]]:
    """The ends and prices of the pairs that begin at each block. Of many pairs, those that begin
    and end at about the same time leave one, with the least to send."""
    every = list(pairs)
    if len(every) > MANY:
        width = seconds[-1] / POINTS or 1.0
        best: dict[Pair, tuple[int, int, float]] = {}
        for first, end, sent in every:
            at = int(seconds[first] / width), int(seconds[end] / width)
            if at not in best or sent < best[at][2]:
                best[at] = first, end, sent
        every = sorted(best.values())
    found: list[list[tuple[int, float]]] = [[] for _ in seconds[1:]]
    for first, end, sent in every:
        found[first].append((end, sent))
    return found


@dataclass(frozen=True)
class Fold:
    """Items in a row, for ranks there and back again.

    `pairs[first]` has the end of each pair that begins there, in order, and its price; `sums[s]`
    adds up what items weigh in stage s, `held[s]` their bytes, of which a rank may have `most`.
    """

    pairs: Sequence[Sequence[tuple[int, float]]]
    sums: Sequence[Sequence[float]]
    held: Sequence[Sequence[float]]
    most: float

    @property
    def depth(self) -> int:
        return len(self.sums)

    @cached_property
    def _least(self) -> Sequence[float]:
        """Sums of the stage where all items weigh least."""
        return min(self.sums, key=lambda row: row[-1])

    def cheapest(self) -> list[int] | None:
        """Starts of the stages with the least price among the even ones; None if there are none."""
        total, least = max(row[-1] for row in self.sums), self._least
        largest = max(b - a for a, b in pairwise(least))  # which some rank must have
        limit = SLACK * max(least[-1] / ((self.depth + 1) // 2), largest)
        while (found := self._cheapest(limit)) is None and limit < total:
            limit = min(SLACK * limit, total) or total
        return found

    def _cheapest(self, limit: float) -> list[int] | None:
        """Dynamic programming from the outer pair to the inner one, over pairs within a limit."""
        limit *= 1 + 1e-12
        inner = (self.depth + 1) // 2 - 1
        best: dict[Pair, tuple[float, tuple[Pair, ...]]] = {(0, len(self.pairs)): (0.0, ())}
        for rank in range(inner):
            found: dict[Pair, tuple[float, tuple[Pair, ...]]] = {}
            for pair, (price, path) in best.items():
                for first, end, more in self._inside(rank, pair, limit):
                    if (first, end) not in found or price + more < found[first, end][0]:
                        found[first, end] = price + more, (*path, (first, end))
            best = found
        ends = [
            (price, path)
            for (a, b), (price, path) in best.items()
            if b - a >= 2 - self.depth % 2
            and self.sums[inner][b] - self.sums[inner][a] <= limit
            and self.held[inner][b] - self.held[inner][a] <= self.most
        ]
        return self._starts(min(ends)[1]) if ends else None

    def _inside(self, rank: int, pair: Pair, limit: float) -> Iterator[tuple[int, int, float]]:
        """Pairs right inside of one: what is between both is within the limits of a rank, and what
        is left for the ranks inside is not too much for them."""
        (a, b), ahead, back = pair, self.sums[rank], self.sums[self.depth - 1 - rank]
        rest = ((self.depth + 1) // 2 - 1 - rank) * limit
        for first in range(a + 1, b):
            if (left := limit - (ahead[first] - ahead[a])) < 0:
                return
            for end, price in self.pairs[first]:
                if end >= b:
                    break
                even = back[b] - back[end] <= left
                even = even and self._least[end] - self._least[first] <= rest
                if even and self._fits(rank, pair, (first, end)):
                    yield first, end, price

    def _fits(self, rank: int, pair: Pair, inside: Pair) -> bool:
        ahead, back = self.held[rank], self.held[self.depth - 1 - rank]
        (a, b), (first, end) = pair, inside
        return ahead[first] - ahead[a] + back[b] - back[end] <= self.most

    def _starts(self, path: Sequence[Pair]) -> list[int]:
        """Where each stage begins; two stages of the innermost rank are made even."""
        outer, inner = [0, *(a for a, _ in path)], [b for _, b in reversed(path)]
        if self.depth % 2:
            return outer + inner
        a, b = path[-1] if path else (0, len(self.pairs))
        row = self.sums[self.depth // 2][a : b + 1]
        return [*outer, a + evened([row, row], [0.0] * (b - a))[1], *inner]
