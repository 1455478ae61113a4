"""Every plan worth a try for so many ranks, family by family."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from gems.geometry.grid import square
from gems.model.graph import Graph
from gems.planner.levels import has_long_skips
from gems.planner.partition import streaming_blocks
from gems.plans.fields import ASYNCHRONOUS
from gems.plans.plan import Plan
from gems.plans.recompute import Recompute
from gems.predict.streaming_cost import overlaps, sweeps
from gems.schedule.build import BY_SAMPLE

UNITS = (4, 16)  # stages of one rank, to be unsharded one after the other
APART = (4, 16, 64, 128)  # the same, of which one or two are on the device at a time
LONG = 2048  # times that ranks run a stage in a step of a copy: it takes long to simulate more
STREAMED = (1, 2, 3, 5, 6, 16)  # stages over patches, on the same ranks
SOME_TIMES, MANY_TIMES = 3, 16  # of these, from how many on weights are stored too, or always
TWICE = 1.1  # of the work of patches that is done twice or more: from here on carrying may pay
SMALL = 512  # stages x micro-batches up to which the greedy generator tries all it knows


@dataclass(frozen=True)
class Choice:
    """A plan to try, and the family it belongs to."""

    family: str
    plan: Plan


def choices(graph: Graph, ranks: int, micro_batches: int, schedule: str = "") -> Iterator[Choice]:
    """Plans that take so many ranks and do so many micro-batches per step, over all copies.

    All of one schedule, or of all that train as one device does: 2BW must be asked for.
    """
    make = _asynchronous if schedule == ASYNCHRONOUS else _one_copy
    for copies in _divisors(ranks):
        if micro_batches % copies == 0:
            for choice in make(graph, ranks // copies, micro_batches // copies):
                if schedule and choice.plan.schedule != schedule:
                    continue
                if choice.plan.depth <= len(graph.blocks):
                    yield Choice(
                        choice.family + (", copies" if copies > 1 and ranks != copies else ""),
                        replace(choice.plan, data=copies),
                    )


def recomputing(choice: Choice) -> Iterator[Choice]:
    """The same with recomputation: of whole stages, or of blocks as the budget demands."""
    plan, family = choice.plan, f"{choice.family}, recomputing"
    if plan.depth > 1 and plan.schedule not in BY_SAMPLE:
        yield Choice(family, replace(plan, recompute=_every_stage(plan)))
    yield Choice(family, replace(plan, recompute="auto"))


def offloading(
    choice: Choice, blocks: int, place: str, *, state_only: bool = True
) -> Iterator[Choice]:
    """The same with offload to a `place`: of activations, all or inputs only; of weights of stages
    that do not run; of both. Ranks that have all of the model are given it in stages, even in
    memory, to have one or two of them on the device at a time; L2L loads each of them twice a step,
    however many micro-batches there are. Without `state_only`, no weights without activations.
    Plans that take long to simulate are left out: this is for a few ranks, or a few images."""
    plan, family = choice.plan, f"{choice.family}, offloaded"
    if plan.zero or plan.asynchronous:
        return
    for staged in _apart(plan, blocks) if plan.depth == 1 else (plan,):
        if staged.forwards > LONG:
            continue
        less = replace(staged, recompute=_every_stage(staged))
        yield Choice(family, replace(staged, offload=f"activations:{place}"))
        if plan.schedule not in BY_SAMPLE or staged.depth > 1:
            yield Choice(family, less)
            yield Choice(family, replace(less, offload=f"activations:{place}"))
        if any(len(on) > 1 for on in staged.stages_on):
            if state_only:
                yield Choice(family, replace(staged, offload=f"weights:{place}"))
            both = (f"activations:{place}", f"weights:{place}")
            yield Choice(family, replace(staged, offload=both))
            yield Choice(family, replace(less, offload=both))
        if len(staged.stages_in_copy) == 1 and state_only:
            one = replace(staged, schedule="l2l", offload=f"weights:{place}")
            yield Choice("layer to layer", one)


def _apart(plan: Plan, blocks: int) -> Iterator[Plan]:
    """A plan of one stage in several, on the same ranks."""
    group = plan.spatial_group_of(0, 0)
    counts = [n for n in APART if n <= blocks] or [blocks]
    if 1.5 * counts[-1] < blocks < APART[-1]:
        counts.append(blocks)  # each by itself
    for stages in counts:
        yield replace(
            plan,
            stages=stages,
            spatial=plan.spatial * stages,
            placement=(group,) * stages if plan.cut else "straight",
            balance="memory",
        )


def streaming(
    graph: Graph,
    ranks: int,
    micro_batches: int,
    place: str,
    schedule: str = "",
    *,
    finest: bool = False,
) -> Iterator[Choice]:
    """The first blocks of the model over patches of the image, one after the other: on every rank
    of its own, on tiles of all ranks, or along a pipeline. What stages on one rank each hand each
    other, and their sweeps, is in memory or in a store at a `place`, and so may their weights be.
    With the `finest` patches only, no others take less memory."""
    reach = streaming_blocks(graph)
    patches = list(_patches(graph, finest=finest)) if reach else []
    for copies in _divisors(ranks) if patches else ():
        p, m = ranks // copies, micro_batches // copies
        if micro_batches % copies:
            continue
        for parts, times in patches:
            if times <= reach:
                for choice in _streaming(graph, reach, p, m, parts, times, place):
                    if schedule in ("", choice.plan.schedule):
                        one = replace(choice, plan=replace(choice.plan, data=copies))
                        yield from _with_halos(graph, reach, parts, one)


def _streaming(
    graph: Graph, reach: int, p: int, m: int, patches: tuple[int, ...], times: int, place: str
) -> Iterator[Choice]:
    """For one copy on p ranks, with so many streamed stages where ranks have several."""
    rest = len(graph.blocks) - reach
    depth, stored = times + bool(rest), (f"values:{place}",)
    several = p - bool(rest)
    if p == 1:
        plan = Plan(
            stages=depth, ranks=1, schedule="sequential", micro_batches=m, stream=(patches,) * times
        )
        yield from _with_stores("streaming", plan, times, place)
        return
    if times == 1 and p - 1 <= rest:
        plan = Plan(stages=p, micro_batches=m, stream=(patches,))
        yield Choice("streaming, then pipeline", plan)
        yield Choice("streaming, then pipeline, values stored", replace(plan, offload=stored))
    if times == 1 and 1 < several <= reach:
        plan = Plan(stages=p, micro_batches=m, stream=(patches,) * several, offload=stored)
        yield Choice("streaming pipeline, values stored", plan)
    for tiles in _grids(graph, p) if any(b.halos for b in graph.blocks) else ():
        group = tuple(range(p))
        plan = Plan(
            stages=depth, schedule="sequential", micro_batches=m, spatial=(tiles,) * times,
            stream=(patches,) * times, placement=(group,) * times + (0,) * bool(rest),
        )  # fmt: skip
        yield from _with_stores("streaming on tiles", plan, times, place)


def _with_halos(
    graph: Graph, reach: int, patches: tuple[int, ...], choice: Choice
) -> Iterator[Choice]:
    """Patches that recompute their halos; and that carry them, if they compute much twice."""
    yield choice
    done = once = 0.0
    for row in sweeps(graph, range(reach)).blocks:
        overlap = overlaps(graph, row, patches)
        once += sum(graph.blocks[i].flops for i in row)
        done += sum(graph.blocks[i].flops * overlap[i].total for i in row)
    if done > TWICE * once:
        carried = replace(choice.plan, stream_halo="carry")
        yield Choice(f"{choice.family}, halos carried", carried)


def _with_stores(family: str, plan: Plan, times: int, place: str) -> Iterator[Choice]:
    """A plan that streams in so many stages of the same ranks, with less and less in memory."""
    stored = (f"values:{place}",)
    if times < MANY_TIMES:
        yield Choice(family, plan)
        yield Choice(f"{family}, values stored", replace(plan, offload=stored))
    if times >= SOME_TIMES:
        both = (*stored, f"weights:{place}")
        yield Choice(f"{family}, values and weights stored", replace(plan, offload=both))


def alike(graph: Graph, choice: Choice) -> Iterator[Choice]:
    """A choice for images of another size, in the patches that it has and in the finest."""
    yield choice
    streamed = [policy.patches for policy in choice.plan.activations if policy.patches]
    for parts, times in _patches(graph, finest=True):
        if times == 1 and streamed and set(streamed) != {parts}:
            finest = replace(choice.plan, stream=(parts,) * len(streamed))
            yield replace(choice, plan=finest)


def _patches(graph: Graph, *, finest: bool = False) -> Iterator[tuple[tuple[int, ...], int]]:
    """Square grids of patches, with no fewer than a few cells to a patch, and in how many stages:
    less overlaps in each of several, but what they send each other is whole."""
    shape = graph.value[graph.inputs[0]].shape[2:]
    found: dict[int, list[int]] = {}
    for parts in (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512):
        for times in STREAMED if parts in (4, 8, 16, 32, 64, 128, 256, 512) else (1,):
            if parts * 16 <= min(shape, default=0):
                found.setdefault(times, []).append(parts)
    for times, grids in found.items():
        for parts in grids[-1:] if finest else grids:
            yield (parts,) * len(shape), times


def sharding(choice: Choice, blocks: int) -> Iterator[Choice]:
    """The same with its state sharded over replica groups (ZeRO), as little as will do first. A
    copy on one rank gets several stages, to have one of them unsharded at a time."""
    plan, family = choice.plan, f"{choice.family}, sharded state"
    if plan.asynchronous or all(len(group) == 1 for group in plan.replica_groups):
        return
    for zero in (1, 2) if plan.bidirectional else (1, 2, 3):
        yield Choice(family, replace(plan, zero=zero))
    for stages in UNITS if plan.depth == 1 and not plan.cut else ():
        if stages <= blocks:
            yield Choice(family, replace(plan, stages=stages, ranks=1, zero=3))


def without(choice: Choice) -> Iterator[Choice]:
    """The same with one way to save memory less, or with less of it."""
    plan, family = choice.plan, choice.family
    for zero in range(plan.zero):
        less = family if zero else family.replace(", sharded state", "")
        yield Choice(less, replace(plan, zero=zero))
    for part in plan.offload if not plan.stage_by_stage else ():
        rest = tuple(other for other in plan.offload if other != part)
        less = family if rest else family.replace(", offloaded", "")
        yield Choice(less, replace(plan, offload=rest))
    if plan.recompute != "never" and not (plan.stage_by_stage or plan.partition_activations):
        yield Choice(family.replace(", recomputing", ""), replace(plan, recompute="never"))


def _every_stage(plan: Plan) -> Recompute:
    """In 1F1B the last stage's backward is right behind its forward: recomputing saves nothing."""
    return (
        (*("always",) * (plan.depth - 1), "never")
        if plan.schedule in ("1f1b", ASYNCHRONOUS)
        else "always"
    )


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _asynchronous(graph: Graph, ranks: int, m: int) -> Iterator[Choice]:
    if m >= ranks:
        yield Choice("two versions", Plan(stages=ranks, micro_batches=m, schedule=ASYNCHRONOUS))


def _one_copy(graph: Graph, ranks: int, m: int) -> Iterator[Choice]:
    if ranks == 1:
        yield Choice("data parallel", Plan(stages=1, schedule="sequential", micro_batches=m))
        return
    yield from _pipelines(graph, ranks, m)
    yield from _both_ways(ranks, m)
    if any(b.halos for b in graph.blocks):
        yield from _spatial(graph, ranks, m)


def _pipelines(graph: Graph, p: int, m: int) -> Iterator[Choice]:
    for schedule in ("1f1b", "zero-bubble", "gpipe"):
        yield Choice("pipeline", Plan(stages=p, micro_batches=m, schedule=schedule))
    if m % p == 0:
        yield Choice(
            "pipeline", Plan(stages=2 * p, ranks=p, micro_batches=m, schedule="interleaved")
        )
    if p * m <= SMALL:
        yield Choice("pipeline", Plan(stages=p, micro_batches=m, schedule="auto"))
        folded = Plan(stages=2 * p, placement="fold", micro_batches=m, schedule="auto")
        yield Choice("fold", folded)
        if has_long_skips(graph, p):
            yield Choice("levels", replace(folded, stages=2 * p - 1, placement="levels"))


def _both_ways(p: int, m: int) -> Iterator[Choice]:
    if m < 2:
        return
    for schedule in ("gems", "gems-zb"):
        yield Choice("both ways", Plan(stages=p, micro_batches=m, schedule=schedule))
    if p * m <= SMALL:
        auto = Plan(stages=p, micro_batches=m, schedule="auto", bidirectional=True)
        yield Choice("both ways", auto)


def _spatial(graph: Graph, ranks: int, m: int) -> Iterator[Choice]:
    """All ranks on one image; or tiles first and whole stages, or slices, behind them."""
    for tiles in _grids(graph, ranks):
        if not any(b.whole for b in graph.blocks):
            plan = Plan(stages=1, schedule="sequential", micro_batches=m, spatial=(tiles,))
            yield Choice("spatial", plan)
    for count in (n for n in _divisors(ranks * 4) if 2 <= n < ranks):
        for tiles in _grids(graph, count):
            yield from _tiles_first(graph, (tiles,), ranks - count, m)
        half = count // 2
        if half >= 2 and count + half < ranks:
            shapes = (_grids(graph, count)[0], _grids(graph, half)[0])
            yield from _tiles_first(graph, shapes, ranks - count - half, m)


def _tiles_first(
    graph: Graph, spatial: tuple[tuple[int, ...], ...], rest: int, m: int
) -> Iterator[Choice]:
    depth = len(spatial) + rest
    samples = graph.value[graph.inputs[0]].shape[0]
    for schedule in ("1f1b", "gems", "gems-zb"):
        if schedule == "1f1b" or m > 1:
            plan = Plan(stages=depth, micro_batches=m, schedule=schedule, spatial=spatial)
            both = " both ways" if plan.bidirectional else ""
            yield Choice(f"spatial, then pipeline{both}", plan)
    if 1 < rest <= samples:
        sliced = Plan(
            stages=len(spatial) + 1,
            micro_batches=m,
            schedule="1f1b",
            spatial=spatial,
            local_dp=rest,
        )
        yield Choice("spatial, then slices", sliced)


def _grids(graph: Graph, count: int) -> list[tuple[int, ...]]:
    """Rows, and the most square grid; for volumes, depth is split first."""
    dims = len(graph.value[graph.inputs[0]].shape) - 2
    rows = (count, *(1,) * (dims - 1))
    if dims < 2:
        return [rows]
    flat = (*(1,) * (dims - 2), *square(count))
    return list(dict.fromkeys((flat, rows)))
