"""Which blocks to recompute under a memory budget: `recompute="auto"` written out by name.

A stage that does not fit recomputes some of its blocks: those with the fewest seconds per byte
first, until the rest fits. The activations of a run exist while it is recomputed, so long runs are
broken where least is saved: with n blocks alike, about sqrt(n) runs need least.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from gems.model.costs import Costs
from gems.model.graph import Graph, members
from gems.planner.in_flight import in_flight
from gems.plans.plan import Plan
from gems.plans.recompute import StageRecompute
from gems.plans.residency import resident_bytes
from gems.predict.recompute_cost import Footprint, footprint, names_of, recompute_seconds, runs

PIECES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # runs that all of a stage may be broken into


def fitted(
    plan: Plan,
    graph: Graph,
    costs: Costs,
    stage_of: Sequence[int],
    memory: float,
    state: float,
    known: Footprints | None = None,
) -> Plan:
    """The plan with `auto` written out: the least recomputation that the bytes per rank allow.

    `state` is the optimizer's, per byte of trained parameters. Where nothing fits, a stage gets
    what needs least. `known` has footprints for the next plan.
    """
    if all(policy.recompute != "auto" for policy in plan.activations):
        return plan
    blocks, known = members(stage_of), {} if known is None else known
    resident = []
    for stage, mine in enumerate(blocks):
        mine_state = plan.residency[stage].bytes(graph.held(mine), graph.trained(mine))
        resident.append(resident_bytes([mine_state], state) + _boundary(graph, mine))
    workspace = [max((costs[i].workspace for i in mine), default=0.0) for mine in blocks]
    counts, entries = in_flight(plan), [policy.recompute for policy in plan.activations]
    for stage, policy in enumerate(plan.activations):
        if policy.recompute != "auto":
            continue
        if policy.patches:  # which saves its inputs only, whatever the budget
            entries[stage] = "always"
            continue
        on, ranks = plan.stages_on[plan.rank_of(stage, 0)], plan.sizes[stage]
        budget = memory - sum(resident[s] for s in on) - max(workspace[s] for s in on)
        divided = 1 if plan.alternates else len(on)  # of two that alternate, none
        choice = _Stage(graph, costs, blocks[stage], counts[stage] / divided, known)
        entries[stage] = choice.best(budget / divided * ranks)
    return replace(plan, recompute=tuple(entries))


def _boundary(graph: Graph, blocks: Sequence[int]) -> int:
    """Bytes of what blocks are sent and send, once as they are and once as gradients."""
    made = {n for i in blocks for n in graph.blocks[i].writes}
    read = {n for i in blocks for n in graph.blocks[i].reads} - made
    others = set(range(len(graph.blocks))) - set(blocks)
    sent = made & {n for i in others for n in graph.blocks[i].reads}
    return 2 * sum(graph.value[n].bytes for n in read | sent)


Blocks = frozenset[int]
Footprints = dict[tuple[int, int, Blocks], Footprint]  # by first block, count, and recomputed


@dataclass(frozen=True)
class _Stage:
    """The blocks of a stage with so many micro-batches in flight."""

    graph: Graph
    costs: Costs
    blocks: list[int]
    count: float
    known: Footprints

    def best(self, budget: float) -> StageRecompute:
        if self.needs(frozenset()) <= budget:
            return "never"
        found = []
        for pieces in PIECES:
            if pieces <= max(len(self.blocks) // 2, 1):
                chosen = self._fewest(budget, self._breaks(pieces))
                needed = self.needs(chosen)
                found.append((max(needed - budget, 0.0), self.seconds(chosen), needed, chosen))
        over, *_, chosen = min(found, key=lambda entry: entry[:3])
        return names_of(self.graph, chosen if over else self._refined(chosen, budget), self.blocks)

    def _refined(self, recomputed: Blocks, budget: float) -> Blocks:
        """Without what the budget can save after all: whole runs first, the longest first."""
        apart = ([i] for i in self.blocks if i in recomputed)
        groups = [
            *sorted(runs(self.blocks, recomputed), key=self._seconds, reverse=True),
            *sorted(apart, key=self._seconds, reverse=True),
        ]
        for group in groups:
            fewer = recomputed.difference(group)
            if fewer != recomputed and self.needs(fewer) <= budget:
                recomputed = fewer
        return recomputed

    def _seconds(self, blocks: list[int]) -> float:
        return sum(self.costs[i].f for i in blocks)

    def needs(self, recomputed: Blocks) -> float:
        """Bytes of all micro-batches in flight if these blocks are recomputed."""
        key = (self.blocks[0], len(self.blocks), recomputed)
        if key not in self.known:
            self.known[key] = footprint(self.graph, self.blocks, recomputed)
        found = self.known[key]
        return self.count * found.activations + found.temporary

    def seconds(self, recomputed: Blocks) -> float:
        return recompute_seconds(self.costs, self.blocks, recomputed)

    def _fewest(self, budget: float, breaks: set[int]) -> Blocks:
        """As few as must be recomputed, the cheapest per byte first; never the `breaks`."""
        order = sorted((i for i in self.blocks if i not in breaks), key=self._price)
        counts = range(1, len(order) + 1)

        def fits(count: int) -> bool:
            return self.needs(frozenset(order[:count])) <= budget

        if not order or not fits(len(order)):
            return frozenset(order)
        return frozenset(order[: counts[bisect_left(counts, True, key=fits)]])

    def _price(self, block: int) -> float:
        """Seconds per byte; what saves nothing is no reason to end a run."""
        saved = self._activations[block]
        return self.costs[block].f / saved if saved else 0.0

    @cached_property
    def _activations(self) -> dict[int, int]:
        return {i: self.graph.activations([i]) for i in self.blocks}

    def _breaks(self, pieces: int) -> set[int]:
        """Blocks that end runs of about even bytes: near each place the one that saves least."""
        activations = [self._activations[i] for i in self.blocks]
        sums, found = list(accumulate(activations)), set()
        reach = max(len(self.blocks) // (4 * pieces), 1)
        for piece in range(1, pieces):
            at = bisect_left(sums, sums[-1] * piece / pieces)
            near = range(max(at - reach, 0), min(at + reach + 1, len(self.blocks)))
            found.add(self.blocks[min(near, key=lambda k: (activations[k], abs(k - at)))])
        return found
