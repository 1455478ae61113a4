"""Bytes and seconds of a stage that recomputes some of its blocks inside backward.

    blocks     a   b   c   d   e   f        recomputed: b, c, e, f
    runs           b   c       e   f        each saves what it reads from outside

Backward comes to run (e f) first: it is recomputed from its inputs, and its activations exist until
its backward is done. Then d, then (b c). So the activations of one run at most are temporary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from gems.model.costs import Cost, Costs
from gems.model.graph import Graph, around, covering
from gems.plans.recompute import StageRecompute


@dataclass(frozen=True)
class Footprint:
    """Bytes of one micro-batch on one stage: what it saves, and the most that backward adds."""

    activations: int
    temporary: int


def recomputed_blocks(
    recompute: StageRecompute, graph: Graph, blocks: Iterable[int]
) -> set[int] | None:
    """The blocks of a stage that are recomputed inside backward; None if a policy decides it."""
    if isinstance(recompute, str):
        return None
    listed = dict.fromkeys(recompute, 0)
    return {i for i in blocks if covering(graph.blocks[i].name, listed) is not None}


def names_of(graph: Graph, recomputed: Collection[int], blocks: Iterable[int]) -> tuple[str, ...]:
    """Names that cover these of the blocks of a stage, and no others."""
    others = {name for i in blocks if i not in recomputed for name in around(graph.blocks[i].name)}
    names = (graph.blocks[i].name for i in blocks if i in recomputed)
    return tuple(f"{name}:1" if name in others else name for name in names)


def runs(blocks: Sequence[int], recomputed: Collection[int]) -> list[list[int]]:
    """The runs of adjacent recomputed blocks."""
    found: list[list[int]] = []
    for before, block in zip((None, *blocks), blocks, strict=False):
        if block not in recomputed:
            continue
        if before not in recomputed:
            found.append([])
        found[-1].append(block)
    return found


def entering(graph: Graph, run: Iterable[int]) -> list[str]:
    """The values that a run reads from outside."""
    run = list(run)
    made = {name for i in run for name in graph.blocks[i].writes}
    read = (name for i in run for name in graph.blocks[i].reads if name not in made)
    return list(dict.fromkeys(read))


def footprint(graph: Graph, blocks: Sequence[int], recomputed: Collection[int]) -> Footprint:
    """Bytes that are saved, each storage once, and what recomputing the largest run adds."""
    found: set[int | str] = set()  # what is saved of the blocks so far
    activations = most = 0
    run: list[int] = []

    def end_run() -> None:
        """A run saves what it reads; its activations exist while it is recomputed, when those of
        later blocks are freed."""
        nonlocal activations, most
        values = (graph.value[name] for name in entering(graph, run))
        activations += _more(
            ((v.name if v.storage < 0 else v.storage, v.bytes) for v in values), found
        )
        saves = (pair for i in run for pair in graph.blocks[i].saves)
        most = max(most, activations + _more(saves, set(), found))
        run.clear()

    for block in blocks:
        if block in recomputed:
            run.append(block)
            continue
        if run:
            end_run()
        activations += _more(graph.blocks[block].saves, found)
    if run:
        end_run()
    return Footprint(activations, max(most - activations, 0))


def _more(
    pairs: Iterable[tuple[int | str, int]],
    found: set[int | str],
    known: Collection[int | str] = (),
) -> int:
    """Bytes of storages that are neither found nor known yet; from now on they are found."""
    size = 0
    for storage, bytes_ in pairs:
        if storage not in found and storage not in known:
            found.add(storage)
            size += bytes_
    return size


def recompute_seconds(costs: Costs, blocks: Sequence[int], recomputed: Collection[int]) -> float:
    """Seconds of the runs that backward recomputes: those that backward comes to."""
    back = (run for run in runs(blocks, recomputed) if any(costs[i].b for i in run))
    return sum(costs[i].f for run in back for i in run)


def recomputing(
    cost: Cost,
    whole: Cost,
    graph: Graph,
    costs: Costs,
    blocks: Sequence[int],
    recomputed: Collection[int],
) -> Cost:
    """A stage's cost if some blocks are recomputed. A rank that has a part of the `whole` stage
    saves, and recomputes, the same part of it."""
    found = footprint(graph, blocks, recomputed)
    bytes_part = cost.activations / whole.activations if whole.activations else 1.0
    time_part = cost.f / whole.f if whole.f else 1.0
    return replace(
        cost,
        i=cost.i + recompute_seconds(costs, blocks, recomputed) * time_part,
        activations=found.activations * bytes_part,
        temporary=found.temporary * bytes_part,
    )
