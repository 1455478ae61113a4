"""Give every block of a model to a stage of the plan."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import replace

from gems.errors import PlanError, problems
from gems.model.costs import Costs
from gems.model.graph import Graph, around, covering, crossings, members, tied_stages
from gems.planner.in_flight import in_flight, in_flight_alone
from gems.planner.levels import level_wise
from gems.planner.partition import by_weight
from gems.plans.plan import Plan
from gems.plans.residency import ADAM


def written(plan: Plan, graph: Graph, stage_of: Sequence[int]) -> Plan:
    """The plan with its blocks written out by name, and with the model's edges between stages."""
    names = tuple(tuple(graph.blocks[i].name for i in mine) for mine in members(stage_of))
    balance = plan.balance if isinstance(plan.balance, str) else "time"
    edges = tuple(crossings(graph, stage_of))
    if found := list(unknown_names(plan, graph)):
        raise PlanError(problems("this plan's recompute does not fit the model:", found))
    tied = tuple(tied_stages(graph, stage_of))
    return replace(plan, stages=names, balance=balance, edges=edges, tied=tied)


def stages(
    plan: Plan, graph: Graph, costs: Costs, limit: float | None = None, state: float = ADAM
) -> list[int]:
    """The stage of every block: by the names given, by counts of layers, or evened out, in a fold
    level by level if its placement is.

    With a `limit`, time is evened out among the partitions that give every rank at most so many
    bytes; `state` is the optimizer's, per byte of parameters.
    """
    if not isinstance(plan.stages, int):
        return stages_by_name(graph, plan.stages)
    if not isinstance(plan.balance, str):
        return _by_count(graph, plan.balance)
    if plan.balance == "layers":
        return _by_count(graph, _equal_counts(graph, plan.depth))
    counted = limit is not None or plan.balance == "memory"
    if plan.placement == "levels":
        return level_wise(
            graph, costs, plan.depth, plan.balance,
            in_flight=in_flight_alone(plan) if counted else None, limit=limit, state=state,
        )  # fmt: skip
    counts = in_flight(plan) if counted else None
    spatial = sum(bool(grid.tiles and grid.size > 1) for grid in plan.grids)
    streamed = len(plan.stream) if isinstance(plan.stream, tuple) else 0
    return by_weight(
        graph, costs, plan.depth, plan.balance, plan.sizes,
        spatial=spatial, streamed=streamed, in_flight=counts, limit=limit, state=state,
    )  # fmt: skip


def unknown_names(plan: Plan, graph: Graph) -> Iterator[str]:
    """The names of `recompute` that are no block's and no module's."""
    entries = (entry for entry in plan.recompute_by_stage if not isinstance(entry, str))
    names = dict.fromkeys(name for entry in entries for name in entry)
    if not names:
        return
    known = {name for block in graph.blocks for name in around(block.name)}
    yield from (_unknown(name, graph) for name in names if name not in known)


def stages_by_name(
    graph: Graph, names: Sequence[Sequence[str]], *, known: bool = True
) -> list[int]:
    """A name covers its module and all inside; what no name covers goes with the block before it.

    With `known`, each name must cover something. (Another input shape may lack a few blocks; in
    another mode a function may be called less often, and the second call have the first one's
    name: what reads a later stage's value and has no weights then goes there.)
    """
    listed = {name: stage for stage, group in enumerate(names) for name in group}
    found = [f"{n!r} is in two stages" for n in _twice(names)]
    used: set[str] = set()
    stage_of: list[int] = []
    for block in graph.blocks:
        name = covering(block.name, listed)
        if name is not None:
            used.add(name)
            stage_of.append(listed[name])
        else:
            stage_of.append(stage_of[-1] if stage_of else 0)
    if known:
        found += [_unknown(name, graph) for name in listed if name not in used]
    found += [
        f"stage {stage} has no blocks" for stage in range(len(names)) if stage not in stage_of
    ]
    if not known:
        _move_on(graph, stage_of)
    if not found:
        found = _backwards(graph, stage_of)
    if found:
        raise PlanError(problems("these stages do not fit the model:", found))
    return stage_of


def _move_on(graph: Graph, stage_of: list[int]) -> None:
    for i, block in enumerate(graph.blocks):
        if not block.parameters and not block.buffers:
            sources = (graph.producer.get(name) for name in block.reads)
            stage_of[i] = max((stage_of[i], *(stage_of[b] for b in sources if b is not None)))


def _twice(names: Sequence[Sequence[str]]) -> list[str]:
    flat = [name for group in names for name in group]
    return sorted({name for name in flat if flat.count(name) > 1}) if len(flat) < 5000 else []


def _unknown(name: str, graph: Graph) -> str:
    modules = dict.fromkeys(
        ".".join(b.name.split(".")[:depth]) for b in graph.blocks for depth in (1, 2, 3)
    )
    close = difflib.get_close_matches(name, modules, 3) or list(modules)[:5]
    return (
        f"no block of the model is called {name!r}; did you mean {', '.join(close)}? A module that "
        "computes nothing has no block: leave it out"
    )


def _backwards(graph: Graph, stage_of: list[int]) -> list[str]:
    """Data may only go on to later stages, and nothing may change in place while it is wanted."""
    found = []
    for i, block in enumerate(graph.blocks):
        for name in block.reads:
            source = graph.producer.get(name)
            if source is not None and stage_of[source] > stage_of[i]:
                found.append(
                    f"{block.name} of stage {stage_of[i]} reads {name} of stage "
                    f"{stage_of[source]}; list stages in the order that the data visits them"
                )
        for name in block.mutates:
            late = [
                b for b in range(i) if name in graph.blocks[b].reads and stage_of[b] > stage_of[i]
            ]
            found += [
                f"{block.name} changes {name} in place before {graph.blocks[b].name} "
                f"of stage {stage_of[b]} has read it"
                for b in late
            ]
    return found


def _equal_counts(graph: Graph, parts: int) -> tuple[int, ...]:
    """As many layers in every stage, or one more in the first ones, whatever they cost."""
    each, more = divmod(len(graph.layers), parts)
    if not each:
        raise PlanError(
            f"balance='layers' cannot divide {len(graph.layers)} layers among {parts} stages; use "
            "fewer stages, or balance='time', which divides smaller pieces"
        )
    return tuple(each + (s < more) for s in range(parts))


def _by_count(graph: Graph, counts: tuple[int, ...]) -> list[int]:
    layers = graph.layers
    if sum(counts) != len(layers):
        raise PlanError(
            f"balance {','.join(map(str, counts))} sums to {sum(counts)}, but the model has "
            f"{len(layers)} layers; `gems trace` lists them"
        )
    stage_of = [0] * len(graph.blocks)
    at = 0
    for stage, count in enumerate(counts):
        for layer in layers[at : at + count]:
            for block in layer:
                stage_of[block] = stage
        at += count
    return stage_of
