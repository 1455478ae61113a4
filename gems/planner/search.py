"""Choose a plan: try candidates, simulate each, keep the best that fits the memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import inf

from gems.errors import PlanError
from gems.hardware import Machine
from gems.model.costs import Costs
from gems.model.graph import Graph
from gems.planner.candidates import (
    Choice,
    choices,
    putting_away,
    recomputing,
    sharing,
    streaming,
)
from gems.planner.coarsen import coarse, finer
from gems.planner.lower_bounds import least_bytes, resident
from gems.planner.memo import Cuts
from gems.planner.request import Wish
from gems.planner.two_buffers import step_seconds
from gems.plans.fields import ASYNCHRONOUS
from gems.plans.plan import Plan
from gems.predict.simulate import simulate
from gems.predict.timeline import COLLECTIVES, KINDS, Memory
from gems.schedule.action import Kind
from gems.schedule.build import build
from gems.schedule.greedy import least
from gems.schedule.lower.passes import lower

PROMISING = 1  # plans of which variants are tried that say little before they are simulated
TIE = 1.05  # predictions that are closer than this say nothing
FEW = 256  # blocks that are cut in any way a search may want
MANY = 4 * FEW  # for one rank, which leaves little to look for


@dataclass(frozen=True)
class Candidate:
    """A plan, and what a step of it should take: seconds, bytes on its fullest rank, and why.

    `fullest` says what that rank's bytes are; `workspace` comes on top of them. `idle` is the share
    of time that ranks wait, `sums` the seconds that sums of gradients add at the end.
    """

    family: str
    plan: Plan
    seconds: float
    fullest: Memory
    workspace: int
    idle: float
    sums: float

    @property
    def bytes(self) -> int:
        return self.fullest.total + self.workspace

    @property
    def rate(self) -> float:
        """Micro-batches per second."""
        return self.plan.total / self.seconds


@dataclass(frozen=True)
class Pruned:
    """A plan that was not simulated, because the least it could take is already too much.

    `stash` is the part of its bytes that is kept for backward.
    """

    family: str
    plan: Plan
    seconds: float
    bytes: float
    activations: float


@dataclass(frozen=True)
class Found:
    """What a search came to: candidates in order of the objective, those that fit first."""

    wish: Wish
    fitting: tuple[Candidate, ...]
    rest: tuple[Candidate, ...]  # which would need more memory, leanest first
    pruned: tuple[Pruned, ...]
    rejected: tuple[tuple[str, str], ...]  # families that cannot be, and why

    @property
    def best(self) -> Candidate:
        """The first; but what is predicted to be as fast, as far as one can tell, and has fewer
        stages is preferred."""
        if self.wish.objective != "time":
            return self.fitting[0]
        close = [c for c in self.fitting if c.seconds <= TIE * self.fitting[0].seconds]
        return min(close, key=lambda c: (c.plan.depth, c.plan.cut, c.seconds))


def search(
    graph: Graph,
    costs: Costs,
    machine: Machine,
    wish: Wish,
    *,
    enough: bool = False,
    prune: bool = True,
) -> Found:
    """Simulate all candidates, the most promising first, but those that can neither win nor fit.

    What does not fit is tried again with its state shared out, then with less kept for backward,
    then with what waits put away, and if nothing fits then, one part of the image after the other;
    where memory is the objective, all of that is. If any plan that fits is `enough`, stop at the
    first. Without `prune`, none is left out.
    """
    fine = graph
    graph, costs = coarse(graph, costs, max(FEW, 4 * wish.ranks) if wish.ranks > 1 else MANY)
    fitting: list[Candidate] = []
    rest: list[Candidate] = []
    rejected: dict[str, str] = {}
    pruned: list[Pruned] = []
    by_time = wish.objective == "time"
    best, slack = inf, TIE if by_time else 1.0
    cuts = Cuts(graph, costs, machine, wish)

    def tried(options: Iterable[Choice]) -> dict[Choice, Pruned]:
        """Look at these; gives those that need too much, with the least that they take."""
        nonlocal best
        large: dict[Choice, Pruned] = {}
        for choice, least_of, predict in _bounded(options, cuts, rejected):
            reached = least_of.seconds if by_time else least_of.bytes
            hopeless = reached >= slack * best or least_of.bytes > wish.memory
            if least_of.bytes > wish.memory:
                large[choice] = least_of
            if (prune and hopeless) or (enough and fitting):
                pruned.append(least_of)
                continue
            try:
                found = predict()
            except PlanError as error:
                rejected.setdefault(least_of.family, str(error))
                continue
            candidate = replace(found, plan=finer(found.plan, fine, graph))
            if candidate.bytes <= wish.memory:
                fitting.append(candidate)
                best = min(best, candidate.seconds if by_time else candidate.bytes)
            else:
                rest.append(candidate)
                large[choice] = least_of
        return large

    def leaner(
        large: dict[Choice, Pruned],
        variants: Callable[[Choice], Iterable[Choice]],
        *,
        of_state: bool = False,
        most: int | None = None,
    ) -> dict[Choice, Pruned]:
        """Look at leaner variants, of so many of the fastest first, as long as one may win: being
        leaner makes no plan faster. Those that save state are no use where the stash alone is too
        much, but variants of those that save most may be."""
        found: dict[Choice, Pruned] = {}
        fastest = sorted(large.items(), key=lambda item: item[1].seconds)
        for choice, least_of in fastest[:most]:
            if prune and least_of.seconds >= slack * best:
                break
            more = list(variants(choice))
            if prune and of_state and least_of.activations > wish.memory:
                most_shared = max((c.plan.zero for c in more), default=0)
                found |= {c: least_of for c in more if c.plan.zero == most_shared}
            else:
                found |= tried(more)
        return found

    options = list(choices(graph, wish.ranks, wish.micro_batches, wish.schedule))
    if not options:
        rejected[wish.schedule or "any"] = (
            f"{wish.micro_batches} micro-batches a step cannot be shared out over copies of it"
            + ", each with one per stage or more" * (wish.schedule == ASYNCHRONOUS)
            + f"; ask for {wish.ranks}, or a multiple"
        )
    blocks, elsewhere = len(graph.blocks), machine.elsewhere

    def away(choice: Choice) -> Iterator[Choice]:
        """With what waits put away; of the state alone only if the stash fits."""
        fits = choice not in plain or plain[choice].activations <= wish.memory
        return putting_away(choice, blocks, elsewhere, state_only=fits)

    if by_time:
        plain = tried(options)
        large = plain | leaner(plain, lambda c: sharing(c, blocks), of_state=True)
        leaner(large, recomputing)
        # Bounds of their seconds are weak, so all would be simulated: a few, if any fits.
        most = PROMISING if prune and fitting else None
        leaner(plain, away, most=most)
    if not by_time or not fitting:  # all there is
        plain = {} if by_time else tried(options)
        shared = [more for choice in options for more in sharing(choice, blocks)]
        tried(shared)
        tried(less for choice in (*options, *shared) for less in recomputing(choice))
        if not (fitting and enough):
            tried(c for choice in options for c in away(choice))
    if not (fitting and (by_time or enough)):
        parts = streaming(graph, wish.ranks, wish.micro_batches)
        tried(c for c in parts if wish.schedule in ("", c.plan.schedule))
    return Found(
        wish,
        tuple(sorted(fitting, key=lambda c: (c.seconds, c.bytes)[:: 1 if by_time else -1])),
        tuple(sorted(rest, key=lambda c: c.bytes)),
        tuple(sorted(pruned, key=lambda p: (p.seconds, p.bytes)[:: 1 if by_time else -1])),
        tuple(rejected.items()),
    )


def _bounded(
    options: Iterable[Choice], cuts: Cuts, rejected: dict[str, str]
) -> Iterator[tuple[Choice, Pruned, Callable[[], Candidate]]]:
    """All candidates with the least that each could take, the most promising first."""
    machine, wish = cuts.machine, cuts.wish
    found: list[tuple[Choice, Pruned, Callable[[], Candidate]]] = []
    for choice in options:
        try:
            plan, staged = cuts.of(choice.plan)
        except PlanError as error:
            rejected.setdefault(choice.family, str(error))
            continue
        seconds = (
            step_seconds(plan, staged, machine)
            if plan.asynchronous
            else least(plan.one_copy(), staged)
        )
        sizes = least_bytes(plan, staged, wish)
        predict = _Predict(choice.family, plan, staged, machine, wish)
        found.append((choice, Pruned(choice.family, plan, seconds, *sizes), predict))
    by_time = wish.objective == "time"
    # Greedy orders take long to find, so they come last among those that promise the same.
    yield from sorted(
        found,
        key=lambda entry: (
            entry[1].seconds if by_time else entry[1].bytes,
            entry[1].plan.schedule == "auto",
        ),
    )


@dataclass(frozen=True)
class _Predict:
    """The simulation of a candidate, when it is called for."""

    family: str
    plan: Plan
    staged: Costs
    machine: Machine
    wish: Wish

    def __call__(self) -> Candidate:
        one, copies = self.plan.one_copy(), self.plan.data
        if one.depth == 1:  # all ranks of a team do the same, and sum like copies
            one, copies = one.lanes(), copies * one.ranks
        room = self.wish.memory - resident(self.plan, self.staged, self.wish)
        order = build(one, self.staged, room if self.plan.schedule == "auto" else None)
        lowered = lower(order, one, copies)
        if one.activations[0].offload and not any(a.kind is Kind.STORE for _, a in lowered):
            raise PlanError("nothing waits long enough for its backward to be put away")
        timeline = simulate(lowered, one, self.staged, self.machine, self.wish.state, copies)
        workspace = [max(self.staged[s].workspace for s in on) for on in one.stages_on]
        pairs = zip(timeline.peaks, workspace, strict=True)
        fullest, extra = max(pairs, key=lambda pair: pair[0].total + pair[1])
        work = max(e.stop for e in timeline.events if not e.action.endswith(COLLECTIVES))
        length = timeline.seconds
        if self.plan.asynchronous:
            length = max(length, step_seconds(self.plan, self.staged, self.machine))
        return Candidate(
            self.family,
            self.plan,
            length,
            fullest,
            round(extra),
            timeline.bubble,
            max(timeline.seconds - work, 0.0),
        )


def largest_kind(memory: Memory) -> str:
    """What most of the bytes are."""
    return max(KINDS, key=lambda kind: getattr(memory, kind))
