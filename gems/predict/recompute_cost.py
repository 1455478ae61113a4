"""What a stage computes again inside backward if only some of its blocks keep what they save.

    blocks     a   b   c   d   e   f        kept: a, d
    runs           b   c       e   f        each keeps what it reads from outside, and runs again

Backward comes to run (e f) first: it is computed again from its inputs, and what it saves is live
until it is done. Then d, then (b c). So beside all that is kept, no more than one run is live.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from gems.model.costs import Cost, Costs
from gems.model.graph import Graph, covering
from gems.plans.recompute import Kept


@dataclass(frozen=True)
class Footprint:
    """Bytes of one micro-batch on one stage: what it keeps, and the most that backward has more."""

    activations: int
    temporary: int


def kept_of(keep: Kept, graph: Graph, blocks: Iterable[int]) -> set[int] | None:
    """The blocks of a stage that keep what they save; None if names have no say in it."""
    if isinstance(keep, str):
        return None
    listed = dict.fromkeys(keep, 0)
    return {i for i in blocks if covering(graph.blocks[i].name, listed) is not None}


def runs(blocks: Sequence[int], kept: Collection[int]) -> list[list[int]]:
    """The runs of blocks between those that are kept."""
    found: list[list[int]] = []
    for before, block in zip((None, *blocks), blocks, strict=False):
        if block in kept:
            continue
        if before is None or before in kept:
            found.append([])
        found[-1].append(block)
    return found


def entering(graph: Graph, run: Iterable[int]) -> list[str]:
    """The values that a run reads from outside."""
    run = list(run)
    made = {name for i in run for name in graph.blocks[i].writes}
    read = (name for i in run for name in graph.blocks[i].reads if name not in made)
    return list(dict.fromkeys(read))


def footprint(graph: Graph, blocks: Sequence[int], kept: Collection[int]) -> Footprint:
    """Bytes that are kept, each storage once, and what the largest run adds in its turn."""
    found: set[int | str] = set()  # what is kept of the blocks so far
    activations = most = 0
    run: list[int] = []

    def end_run() -> None:
        """A run is over: it keeps what it reads, and what it saves is there in its turn. What later
        blocks keep is gone by then."""
        nonlocal activations, most
        values = (graph.value[name] for name in entering(graph, run))
        activations += _more(
            ((v.name if v.storage < 0 else v.storage, v.bytes) for v in values), found
        )
        saves = (pair for i in run for pair in graph.blocks[i].saves)
        most = max(most, activations + _more(saves, set(), found))
        run.clear()

    for block in blocks:
        if block not in kept:
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


def again(costs: Costs, blocks: Sequence[int], kept: Collection[int]) -> float:
    """Seconds of all that is computed again: the runs that backward comes to."""
    back = (run for run in runs(blocks, kept) if any(costs[i].b for i in run))
    return sum(costs[i].f for run in back for i in run)


def recomputing(
    cost: Cost,
    whole: Cost,
    graph: Graph,
    costs: Costs,
    blocks: Sequence[int],
    kept: Collection[int],
) -> Cost:
    """A stage's cost if only some blocks keep what they save. A rank that has a part of the `whole`
    stage keeps, and computes again, the same part of it."""
    found = footprint(graph, blocks, kept)
    bytes_part = cost.activations / whole.activations if whole.activations else 1.0
    time_part = cost.f / whole.f if whole.f else 1.0
    return replace(
        cost,
        i=cost.i + again(costs, blocks, kept) * time_part,
        activations=found.activations * bytes_part,
        temporary=found.temporary * bytes_part,
    )
