"""Choose a plan: try candidates, simulate each, keep the best that fits the memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import inf

from gems.errors import PlanError
from gems.hardware import Machine
from gems.model.costs import Costs
from gems.model.graph import Graph
from gems.planner.candidates import (
    Choice,
    alike,
    choices,
    offloading,
    recomputing,
    sharding,
    streaming,
    without,
)
from gems.planner.coarsen import coarse, finer
from gems.planner.compile import CompiledPlan, Prediction, compile_plan
from gems.planner.memo import Memo
from gems.planner.request import Request
from gems.plans.describe import recomputes
from gems.plans.fields import ASYNCHRONOUS
from gems.plans.plan import Plan
from gems.predict.timeline import KINDS, Memory

PROMISING = 1  # plans of which variants are tried whose bounds tell little
TIE = 1.05  # predictions that are closer than this count as equal
NOTICEABLE = 1.01  # what is better by less is no reason to shard, recompute or offload
FEW = 256  # blocks, which a search may assign to stages in any way
MANY = 4 * FEW  # for one rank, which leaves little to look for


@dataclass(frozen=True)
class Candidate:
    """A plan that was simulated, with its stages written out. `choice` is what was tried."""

    family: str
    plan: Plan
    prediction: Prediction
    choice: Choice | None = None

    @property
    def seconds(self) -> float:
        return self.prediction.seconds

    @property
    def bytes(self) -> int:
        """On its fullest rank."""
        return self.prediction.bytes

    def fits(self, request: Request) -> bool:
        """In memory, and what it offloads in the store."""
        return self.bytes <= request.memory and self.prediction.offloaded <= request.store

    @property
    def rate(self) -> float:
        """Micro-batches per second."""
        return self.plan.total / self.seconds


@dataclass(frozen=True)
class Pruned:
    """A plan that was not simulated, because the least it could take is already too much.

    `activations` is the part of its bytes that is not state, `reserved` the part of both that holds
    no tensors; `offloaded` is what its fullest store has.
    """

    family: str
    plan: Plan
    seconds: float
    bytes: float
    activations: float
    reserved: int = 0
    offloaded: float = 0.0

    def fits(self, request: Request) -> bool:
        return self.bytes <= request.memory and self.offloaded <= request.store


@dataclass(frozen=True)
class SearchResult:
    """Candidates in order of the objective, those that fit first."""

    request: Request
    fitting: tuple[Candidate, ...]
    rest: tuple[Candidate, ...]  # which would need more memory, leanest first
    pruned: tuple[Pruned, ...]
    rejected: tuple[tuple[str, str], ...]  # families that cannot be, and why

    @cached_property
    def best(self) -> Candidate:
        """Of those that no other is better than, the simplest that is as good as the first: as
        fast, as far as one can tell, or as lean."""
        front = [c for c in self.fitting if not any(dominates(other, c) for other in self.fitting)]
        if self.request.objective == "time":
            close = [c for c in front if c.seconds <= TIE * self.fitting[0].seconds]
        else:
            close = [c for c in front if c.bytes == self.fitting[0].bytes]
        return min(close, key=lambda c: (*_parts(c.plan), c.seconds))


def dominates(one: Candidate, other: Candidate) -> bool:
    """Whether a plan is as fast and as lean as another, and noticeably faster or leaner."""
    if one.seconds > other.seconds * (1 + 1e-9) or one.bytes > other.bytes:
        return False
    return NOTICEABLE * one.seconds < other.seconds or NOTICEABLE * one.bytes < other.bytes


def _parts(plan: Plan) -> tuple[int, ...]:
    """What a plan consists of, to prefer those with less: stages, tiles, ways to save memory."""
    return (plan.depth, plan.cut, len(plan.offload), recomputes(plan), plan.zero)


def search(
    graph: Graph,
    costs: Costs,
    machine: Machine,
    request: Request,
    *,
    enough: bool = False,
    prune: bool = True,
    offered: Offered | None = None,
    first: Choice | None = None,
) -> SearchResult:
    """Simulate all candidates, the most promising first, but those that can neither win nor fit.

    What does not fit is tried again with its state sharded, then with recomputation, then with
    state or activations offloaded, and if nothing fits then, one patch of the image after the
    other; where memory is the objective, all of that is. If any plan that fits is `enough`, stop at
    the first, and try plans like `first` before all others; else they are the last resort. Without
    `prune`, none is left out. What is not `offered` is rejected.
    """
    blocks = max(FEW, 4 * request.ranks) if request.ranks > 1 else MANY
    small, lumped = coarse(graph, costs, blocks)
    memo = Memo(small, lumped, machine, request, partial(_reject_whole, small))
    return Search(graph, memo, enough, prune, offered or _anything).run(first)


Bounds = dict[Choice, Pruned]  # choices that need too much memory, with the least that they take
Variants = Callable[[Choice], Iterable[Choice]]
Offered = Callable[[Plan], None]  # raises PlanError for what a front end does not run


def _anything(plan: Plan) -> None:
    return None


@dataclass
class Search:
    """What a search has found so far. `fine` is the graph whose lumps the memo is of."""

    fine: Graph
    memo: Memo
    enough: bool
    prune: bool
    offered: Offered = _anything
    fitting: list[Candidate] = field(default_factory=list)
    rest: list[Candidate] = field(default_factory=list)
    pruned: list[Pruned] = field(default_factory=list)
    rejected: dict[str, str] = field(default_factory=dict)
    tried: set[Plan] = field(default_factory=set)
    best: float = inf  # seconds, or bytes, of the best so far

    @property
    def request(self) -> Request:
        return self.memo.request

    @property
    def by_time(self) -> bool:
        return self.request.objective == "time"

    @property
    def hopeless(self) -> float:
        """Seconds, or bytes, from which on a plan cannot win."""
        return (TIE if self.by_time else 1.0) * self.best

    def run(self, first: Choice | None = None) -> SearchResult:
        graph, request = self.memo.graph, self.request
        if self.enough and first is not None:
            self.try_all(alike(graph, first))
            if self.fitting:
                return self.result
        options = list(choices(graph, request.ranks, request.micro_batches, request.schedule))
        if not options:
            self.rejected[request.schedule or "any"] = _no_options(request)
        if self.by_time:
            self._try_until_it_fits(options)
        if not self.by_time or not self.fitting:
            self._try_everything(options)
        if not (self.fitting and (self.by_time or self.enough)):
            place, finest = self.memo.machine.elsewhere, self.enough
            m, schedule = request.micro_batches, request.schedule
            self.try_all(streaming(graph, request.ranks, m, place, schedule, finest=finest))
        if first is not None and not self.fitting:
            self.try_all(alike(graph, first))
        if not self.enough:
            self._leave_out()
        return self.result

    @property
    def result(self) -> SearchResult:
        order = slice(None, None, 1 if self.by_time else -1)
        return SearchResult(
            self.request,
            tuple(sorted(self.fitting, key=lambda c: (c.seconds, c.bytes)[order])),
            tuple(sorted(self.rest, key=lambda c: c.bytes)),
            tuple(sorted(self.pruned, key=lambda p: (p.seconds, p.bytes)[order])),
            tuple(self.rejected.items()),
        )

    def _try_until_it_fits(self, options: Sequence[Choice]) -> None:
        """Leaner variants only of what is too large."""
        plain = self.try_all(options)
        large = plain | self.leaner(plain, self._sharding, of_state=True)
        self.leaner(large, recomputing)
        # Bounds of their seconds are weak, so all would be simulated: a few, if any fits.
        most = PROMISING if self.prune and self.fitting else None
        self.leaner(plain, partial(self._offloading, plain), most=most)

    def _try_everything(self, options: Sequence[Choice]) -> None:
        """Leaner variants of all."""
        plain = {} if self.by_time else self.try_all(options)
        sharded = [more for choice in options for more in self._sharding(choice)]
        self.try_all(sharded)
        self.try_all(less for choice in (*options, *sharded) for less in recomputing(choice))
        if not (self.fitting and self.enough):
            self.try_all(c for choice in options for c in self._offloading(plain, choice))

    def _leave_out(self) -> None:
        """Try the best with one way to save memory less, as long as there is another such plan."""
        while self.fitting and (choice := self.result.best.choice):
            options = [less for less in without(choice) if less.plan not in self.tried]
            if not options:
                return
            self.try_all(options)

    def _sharding(self, choice: Choice) -> Iterator[Choice]:
        return sharding(choice, len(self.memo.graph.blocks))

    def _offloading(self, plain: Bounds, choice: Choice) -> Iterator[Choice]:
        """Of the state alone only if the activations fit."""
        fits = choice not in plain or plain[choice].activations <= self.request.memory
        blocks, place = len(self.memo.graph.blocks), self.memo.machine.elsewhere
        return offloading(choice, blocks, place, state_only=fits)

    def try_all(self, options: Iterable[Choice]) -> Bounds:
        """Simulate those that may win and fit; gives those that need too much memory."""
        large: Bounds = {}
        for choice, bound, compiled in self.bounded(options):
            reached = bound.seconds if self.by_time else bound.bytes
            too_large = not bound.fits(self.request)
            if too_large:
                large[choice] = bound
            hopeless = too_large or reached >= self.hopeless
            if (self.prune and hopeless) or (self.enough and self.fitting):
                self.pruned.append(bound)
            elif (found := self._simulated(choice, compiled)) is None:
                continue
            elif found.fits(self.request):
                self.fitting.append(found)
                self.best = min(self.best, found.seconds if self.by_time else found.bytes)
            else:
                self.rest.append(found)
                large[choice] = bound
        return large

    def leaner(
        self, large: Bounds, variants: Variants, *, of_state: bool = False, most: int | None = None
    ) -> Bounds:
        """Try leaner variants, of so many of the fastest first, as long as one may win: being
        leaner makes no plan faster. Those that save state are no use where the activations alone
        are too much, but variants of those that save most may be."""
        found: Bounds = {}
        fastest = sorted(large.items(), key=lambda item: item[1].seconds)
        for choice, bound in fastest[:most]:
            if self.prune and bound.seconds >= self.hopeless:
                break
            more = list(variants(choice))
            if self.prune and of_state and bound.activations > self.request.memory:
                most_sharded = max((c.plan.zero for c in more), default=0)
                found |= {c: bound for c in more if c.plan.zero == most_sharded}
            else:
                found |= self.try_all(more)
        return found

    def bounded(self, options: Iterable[Choice]) -> list[tuple[Choice, Pruned, CompiledPlan]]:
        """All candidates with the least that each could take, the most promising first."""
        memo, found = self.memo, []
        for choice in options:
            self.tried.add(choice.plan)
            if not self.request.allows(choice.plan):
                continue
            try:
                self.offered(choice.plan)
                compiled = compile_plan(
                    choice.plan, memo.graph, memo.costs, memo.machine, memo.request, memo=memo
                )
                sizes = compiled.least_bytes
            except PlanError as error:
                self.rejected.setdefault(choice.family, str(error))
                continue
            least = (compiled.least_seconds, *sizes, compiled.reserved, compiled.least_offloaded)
            bound = Pruned(choice.family, compiled.plan, *least)
            found.append((choice, bound, compiled))

        def order(entry: tuple[Choice, Pruned, CompiledPlan]) -> tuple[float, bool]:
            """Greedy orders take long to find, so they are last of those with the same bound."""
            _, bound, _ = entry
            return bound.seconds if self.by_time else bound.bytes, bound.plan.greedy

        return sorted(found, key=order)

    def _simulated(self, choice: Choice, compiled: CompiledPlan) -> Candidate | None:
        try:
            prediction = compiled.prediction
        except PlanError as error:
            self.rejected.setdefault(choice.family, str(error))
            return None
        plan = finer(compiled.plan, self.fine, self.memo.graph)
        return Candidate(choice.family, plan, prediction, choice)


def _no_options(request: Request) -> str:
    return (
        f"{request.micro_batches} micro-batches a step cannot be split evenly over replicas"
        + ", each with one per stage or more" * (request.schedule == ASYNCHRONOUS)
        + f"; ask for {request.ranks}, or a multiple"
    )


def _reject_whole(graph: Graph, plan: Plan, stage_of: Sequence[int]) -> None:
    """Stages with blocks that tiles, or patches, cannot run."""
    for block, stage in zip(graph.blocks, stage_of, strict=True):
        grid = plan.grids[stage]
        if block.whole and grid.tiles and grid.size > 1:
            raise PlanError(f"{block.name} cannot be tiled, and stage {stage} would be")
        if plan.activations[stage].patches and not block.streams:
            raise PlanError(f"{block.name} needs the whole image, and stage {stage} would stream")


def largest_kind(memory: Memory) -> str:
    """What most of the bytes are."""
    return max(KINDS, key=lambda kind: getattr(memory, kind))
