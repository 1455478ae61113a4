"""Which ranks run a stage, and which hold its weights.

stages=4, schedule="gems"     ranks   0    1    2    3
                   replica 0 stages   0    1    2    3
                   replica 1 stages   3    2    1    0
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

from gems.plans.fields import FOLDED, PlanFields

Group = tuple[int, ...]  # the ranks that run a stage, in row-major order of its grid


def as_written(group: int | Iterable[int]) -> int | Group:
    """The ranks of one stage as a placement writes them; a single one without brackets."""
    if isinstance(group, int):
        return group
    ranks = tuple(group)
    return ranks[0] if len(ranks) == 1 else ranks


def default_ranks(plan: PlanFields) -> int:
    if not isinstance(plan.placement, str):
        return max((rank for group in first_row(plan) for rank in group), default=0) + 1
    if plan.cut:
        return sum(plan.sizes)
    return (plan.depth + 1) // 2 if plan.placement in FOLDED else plan.depth


def first_row(plan: PlanFields) -> tuple[Group, ...]:
    """The spatial group of each stage in the first replica of the first copy."""
    if not isinstance(plan.placement, str):
        return tuple((group,) if isinstance(group, int) else group for group in plan.placement)
    if plan.placement in FOLDED:
        return tuple((min(s, plan.depth - 1 - s),) for s in range(plan.depth))
    if plan.cut:
        starts = accumulate(plan.sizes, initial=0)
        return tuple(tuple(range(a, b)) for a, b in pairwise(starts))
    return tuple((s % plan.ranks,) for s in range(plan.depth))


def spatial_groups(plan: PlanFields) -> tuple[tuple[Group, ...], ...]:
    """For each replica and stage the ranks that run it. A second direction lies over the first in
    reverse, so that the many ranks of its spatial stages are those of the other's last stages."""
    rows, row = [], first_row(plan)
    for first in range(0, plan.world, plan.ranks):
        last = first + plan.ranks - 1
        rows.append(tuple(tuple(first + rank for rank in group) for group in row))
        if plan.bidirectional:
            rows.append(tuple(tuple(last - rank for rank in group) for group in row))
    return tuple(rows)


def replica_groups(groups: Sequence[Sequence[Group]]) -> tuple[Group, ...]:
    """For each stage the ranks of all replicas, which hold its weights."""
    by_stage = zip(*groups, strict=True)
    return tuple(tuple(sorted({r for group in stage for r in group})) for stage in by_stage)


def stages_on(replica_groups: Sequence[Group], world: int) -> tuple[tuple[int, ...], ...]:
    """For each rank the stages whose weights it holds, each once."""
    found: list[list[int]] = [[] for _ in range(world)]
    for stage, ranks in enumerate(replica_groups):
        for rank in ranks:
            found[rank].append(stage)
    return tuple(map(tuple, found))
