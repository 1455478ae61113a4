"""What stages may keep under a memory cap: `keep="auto"` written out by name.

A stage that does not fit computes some of its blocks again. Those that take the fewest seconds per
byte go first, until the rest fits. What is computed again is live once more in its turn, so long
runs are broken where least is saved: with n blocks alike, about sqrt(n) runs need least.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, islice

from gems.model.costs import Cost, Costs
from gems.model.graph import Graph, around, members
from gems.planner.in_flight import kept
from gems.plans.plan import ASYNCHRONOUS, BIDIRECTIONAL, Plan
from gems.plans.recompute import Kept
from gems.predict.recompute_cost import Footprint, again, footprint, kept_of, runs
from gems.predict.state_bytes import needed, share

PIECES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # runs that all of a stage may be broken into


def fitted(
    plan: Plan,
    graph: Graph,
    costs: Costs,
    stage_of: Sequence[int],
    memory: float,
    state: float = 2.0,
    known: Footprints | None = None,
) -> Plan:
    """The plan with `auto` written out: as few seconds again as so many bytes per rank allow.

    `state` is what the optimizer keeps, in units of the gradients. Where nothing fits, a stage gets
    what needs least. `known` keeps footprints for the next plan.
    """
    if "auto" not in plan.keeps:
        return plan
    blocks, known = members(stage_of), {} if known is None else known
    resident = []
    for stage, mine in enumerate(blocks):
        cost = Cost(weights=graph.held(mine), gradients=graph.trained(mine))
        shares = [share(cost, plan.zero, plan.shard_count(stage), away=plan.offloaded_state)]
        twice = cost.gradients if plan.schedule == ASYNCHRONOUS else 0.0  # in two versions
        resident.append(needed(shares, state) + twice + _boundary(graph, mine))
    workspace = [max((costs[i].workspace for i in mine), default=0.0) for mine in blocks]
    counts, keeps = kept(plan), list(plan.keeps)
    for stage, keep in enumerate(plan.keeps):
        if keep != "auto":
            continue
        if plan.streams[stage]:  # which keeps no more, whatever room there is
            keeps[stage] = "inputs"
            continue
        on, team = plan.stages_on[plan.rank_of(stage, 0)], plan.sizes[stage]
        room = memory - sum(resident[s] for s in on) - max(workspace[s] for s in on)
        divided = 1 if plan.schedule in BIDIRECTIONAL else len(on)  # of two that take turns, none
        choice = _Stage(graph, costs, blocks[stage], counts[stage] / divided, known)
        keeps[stage] = choice.best(room / divided * team)
    return replace(plan, keep=tuple(keeps))


def _boundary(graph: Graph, blocks: Sequence[int]) -> int:
    """Bytes of what blocks are sent and send, once as they are and once as gradients."""
    made = {n for i in blocks for n in graph.blocks[i].writes}
    read = {n for i in blocks for n in graph.blocks[i].reads} - made
    others = set(range(len(graph.blocks))) - set(blocks)
    sent = made & {n for i in others for n in graph.blocks[i].reads}
    return 2 * sum(graph.value[n].bytes for n in read | sent)


Blocks = frozenset[int]
Footprints = dict[tuple[int, int, Blocks], Footprint]  # of the blocks from and to, by what is kept


@dataclass(frozen=True)
class _Stage:
    """The blocks of a stage, of which so many micro-batches are under way."""

    graph: Graph
    costs: Costs
    blocks: list[int]
    count: float
    known: Footprints

    def best(self, room: float) -> Kept:
        if self.needs(frozenset(self.blocks)) <= room:
            return "all"
        found = []
        for pieces in PIECES:
            if pieces <= max(len(self.blocks) // 2, 1):
                kept = self._fewest(room, self._breaks(pieces))
                needed = self.needs(kept)
                over = max(needed - room, 0.0)
                found.append((over, self.seconds(kept), needed, self._names(kept)))
        over, *_, names = min(found)
        return names if over else self._refined(names, room)

    def _refined(self, names: tuple[str, ...], room: float) -> tuple[str, ...]:
        """With all kept after all that leaves enough room: whole runs first, the longest first."""
        kept = self._kept(names)
        apart = ([i] for i in self.blocks if i not in kept)
        groups = [
            *sorted(runs(self.blocks, kept), key=self._seconds, reverse=True),
            *sorted(apart, key=self._seconds, reverse=True),
        ]
        for group in groups:
            if not kept.issuperset(group) and self.needs(more := kept.union(group)) <= room:
                kept = more
        return self._names(kept)

    def _seconds(self, blocks: list[int]) -> float:
        return sum(self.costs[i].f for i in blocks)

    def needs(self, kept: Blocks) -> float:
        """Bytes of all micro-batches under way, if these keep what they save."""
        key = (self.blocks[0], len(self.blocks), kept)
        if key not in self.known:
            self.known[key] = footprint(self.graph, self.blocks, self._with_inner(kept))
        found = self.known[key]
        return self.count * found.activations + found.temporary

    def seconds(self, kept: Blocks) -> float:
        return again(self.costs, self.blocks, self._with_inner(kept))

    def _kept(self, names: tuple[str, ...]) -> Blocks:
        return frozenset(kept_of(names, self.graph, self.blocks) or ())

    def _names(self, blocks: Blocks) -> tuple[str, ...]:
        return tuple(self.graph.blocks[i].name for i in self.blocks if i in blocks)

    def _with_inner(self, kept: Blocks) -> Blocks:
        """With those that are kept by name because a block of that name is around them."""
        inner = self._inner
        return kept.union(i for outer in kept & inner.keys() for i in inner[outer])

    @cached_property
    def _inner(self) -> dict[int, list[int]]:
        """For each block the others whose names lie inside its own; most have none."""
        names = {self.graph.blocks[i].name: i for i in self.blocks}
        found: dict[int, list[int]] = {}
        for i in self.blocks:
            for name in islice(around(self.graph.blocks[i].name), 1, None):
                if name in names and names[name] != i:
                    found.setdefault(names[name], []).append(i)
        return found

    def _fewest(self, room: float, breaks: set[int]) -> Blocks:
        """All but as few as must be computed again, the cheapest per byte first."""
        order = sorted((i for i in self.blocks if i not in breaks), key=self._price)

        def left(count: int) -> Blocks:
            return frozenset(self.blocks).difference(order[:count])

        counts = range(1, len(order) + 1)
        if not order or self.needs(left(len(order))) > room:
            return left(len(order))
        return left(counts[bisect_left(counts, True, key=lambda n: self.needs(left(n)) <= room)])

    def _price(self, block: int) -> float:
        """Seconds per byte; what saves nothing is no reason to end a run."""
        saved = self._activations[block]
        return self.costs[block].f / saved if saved else 0.0

    @cached_property
    def _activations(self) -> dict[int, int]:
        return {i: self.graph.activations([i]) for i in self.blocks}

    def _breaks(self, pieces: int) -> set[int]:
        """Blocks that end runs of about even stash: near each place the one that saves least."""
        activations = [self._activations[i] for i in self.blocks]
        sums, found = list(accumulate(activations)), set()
        reach = max(len(self.blocks) // (4 * pieces), 1)
        for piece in range(1, pieces):
            at = bisect_left(sums, sums[-1] * piece / pieces)
            near = range(max(at - reach, 0), min(at + reach + 1, len(self.blocks)))
            found.add(self.blocks[min(near, key=lambda k: (activations[k], abs(k - at)))])
        return found
