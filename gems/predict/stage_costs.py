"""What the stages of a plan cost each of their ranks on a machine: shares, halos and sums."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import ceil, prod

from gems.geometry.grid import Grid
from gems.hardware import Link, Machine
from gems.model.costs import Cost, Costs, Edge, StoredBytes, of_stages, together
from gems.model.graph import Block, Graph, Value, crossings, members
from gems.plans.plan import Plan
from gems.predict.recompute_cost import recomputed_blocks, recomputing
from gems.predict.streaming_cost import (
    inner_stored,
    stored_values,
    streamed,
    sweeps,
    tile_bytes,
)


def price(
    blocks: Costs,
    graph: Graph,
    stage_of: Sequence[int],
    plan: Plan,
    machine: Machine,
    stages: Costs | None = None,
) -> Costs:
    """Costs per stage, as a rank in the middle of each group bears them; messages over `machine`.

    `stages` are the costs of the stages as one rank bears them, if those are known.
    """
    whole = (stages or of_stages(blocks, graph, stage_of)).over(machine.link)
    items = []
    stored = stored_values(graph, stage_of, plan)
    inner: list[StoredBytes] = []
    groups = zip(whole.items, plan.grids, members(stage_of), strict=True)
    for stage, (alone, grid, mine) in enumerate(groups):
        cost = alone
        if grid.size > 1:
            link = machine.slowest(plan.spatial_group_of(stage, 0))
            pairs = [(graph.blocks[i], blocks[i]) for i in mine]
            cost = _divided(alone, pairs, graph, grid, link, machine.device.call)
        recomputed = recomputed_blocks(plan.activations[stage].recompute, graph, mine)
        if recomputed is not None:
            cost = recomputing(cost, alone, graph, blocks, mine, recomputed)
        if plan.activations[stage].patches:
            call, policy = machine.device.call, plan.activations[stage]
            link = machine.way_to(policy.values) if policy.values else None
            cost = streamed(
                alone, graph, blocks, mine, policy.patches, call, grid.tiles, stored, link,
                carries=policy.carries,
            )  # fmt: skip
            if policy.values:
                inner += inner_stored(
                    graph, stage, mine, policy.patches, grid.tiles, carries=policy.carries
                )
        items.append(_counted(cost, alone, graph, mine))
    crossing = crossings(graph, stage_of) if stored else {}
    messages = tuple(
        _stored(_kept(edge, graph, stage_of, plan), graph, crossing, stored)
        for edge in whole.messages
    )
    kept = tuple(_between(n, readers, graph, stage_of, plan) for n, readers in stored.items())
    return replace(
        whole,
        items=tuple(items),
        messages=messages,
        group_sizes=plan.sizes,
        stored=(*kept, *inner),
    )


def _between(
    name: str, readers: tuple[int, ...], graph: Graph, stage_of: Sequence[int], plan: Plan
) -> StoredBytes:
    """What a stage puts in a store for others; of tiles a rank has its own, with halos."""
    source, blocks = stage_of[graph.producer[name]], members(stage_of)
    rows = [row for stage in readers for row in sweeps(graph, blocks[stage]).blocks]
    size = round(tile_bytes(graph, name, plan.grids[source].tiles, rows))
    return StoredBytes(source, readers, size, graph.value[name].grad)


def _stored(
    edge: Edge,
    graph: Graph,
    crossing: Mapping[tuple[int, int], Sequence[str]],
    stored: Collection[str],
) -> Edge:
    """What a stage is sent, with the part of it that goes from store to store."""
    if not stored:
        return edge
    values = [graph.value[n] for n in crossing[edge.source, edge.target] if n in stored]
    back = sum(v.bytes for v in values if v.grad)
    return replace(edge, stored_output=sum(v.bytes for v in values), stored_gradient=back)


def _counted(cost: Cost, whole: Cost, graph: Graph, blocks: Sequence[int]) -> Cost:
    """A stage with the numbers of its parameters and of the tensors that it saves: as many of them
    as of their bytes."""
    trained = {name for i in blocks for name in graph.blocks[i].parameters}
    all_of_them = len({storage for i in blocks for storage, _ in graph.blocks[i].saves})
    saved = min(1.0, cost.activations / whole.activations) if whole.activations else 0.0
    return replace(cost, tensors=ceil(all_of_them * saved), trained=len(trained))


def _kept(edge: Edge, graph: Graph, stage_of: Sequence[int], plan: Plan) -> Edge:
    """What a stage is sent, with what each of its ranks saves of it if it is recomputed."""
    grid, size = plan.grids[edge.target], 0.0
    if grid.size == 1:
        return edge
    stays = grid == plan.grids[edge.source] and (
        plan.spatial_group_of(edge.source, 0) == plan.spatial_group_of(edge.target, 0)
    )
    for name in crossings(graph, stage_of)[edge.source, edge.target]:
        value = graph.value[name]
        part = 1.0 if graph.blocks[graph.producer[name]].whole else _part(value, grid)
        shared = plan.activations[edge.target].partitioned and part == 1
        size += ceil(value.bytes / grid.size if shared else value.bytes * part)
    return replace(edge, kept=round(size), stays=stays)


def _divided(
    stage: Cost,
    blocks: Sequence[tuple[Block, Cost]],
    graph: Graph,
    grid: Grid,
    link: Link,
    call: float,
) -> Cost:
    """A stage on one of the tiles, or slices, of a grid; Python takes `call` for each block on a
    tile."""
    parts, kept = [], 0.0
    for block, cost in blocks:
        messages, halo = _halo(block, grid)
        sent = halo + block.sums * (grid.size - 1)
        messages += (grid.size - 1) * block.totals
        seconds = messages * link.latency + sent / link.bandwidth
        parts.append(cost.part(_share(block, graph, grid), sent, seconds))
        kept += halo * bool(block.saves)
    found = together(parts)
    # A storage that two blocks keep counts once, as in the whole stage.
    alone = sum(cost.activations for _, cost in blocks)
    once = stage.activations / alone if alone else 1.0
    return replace(
        found,
        f=found.f + call * len(blocks) * bool(grid.tiles),
        activations=found.activations * once + kept,
        weights=stage.weights,
        gradients=stage.gradients,
    )


def _share(block: Block, graph: Graph, grid: Grid) -> float:
    """The part of a block that the largest of the tiles has; 1 for what cannot be tiled."""
    if block.whole and grid.tiles:
        return 1.0
    return _part(graph.value[block.writes[0]], grid) if block.writes else 1.0


def _part(value: Value, grid: Grid) -> float:
    """The part of a value that the largest of the tiles, or slices, has."""
    shape = value.shape
    if not grid.tiles:
        return ceil(shape[0] / grid.batch) / shape[0] if shape and shape[0] else 1.0
    axes = len(grid.tiles)
    if value.image is not None:
        dims = value.image
    else:
        dims = tuple(range(2, len(shape)))
    if len(dims) < axes:
        return 1.0
    lengths = [shape[d] for d in dims[-axes:]]
    return prod(ceil(n / g) / n for n, g in zip(lengths, grid.tiles, strict=True) if n)


def _halo(block: Block, grid: Grid) -> tuple[int, float]:
    """Messages and bytes that a rank with neighbours on all sides sends for a layer's halo."""
    messages, size = 0, 0.0
    for sent, tiles in zip(reversed(block.halos), reversed(grid.tiles), strict=False):
        if sent and tiles > 1:
            sides = min(2, tiles - 1)
            messages += sides * block.exchanges
            size += sent / 2 * sides / (grid.size / tiles)
    return messages, size
