"""A graph of fewer, larger blocks, so that a search over many plans stays quick."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from gems.model.costs import Costs, together
from gems.model.graph import Block, Graph, Weight
from gems.plans.plan import Plan
from gems.predict.recompute_cost import names_of, recomputed_blocks


def coarse(graph: Graph, costs: Costs, lumps: int) -> tuple[Graph, Costs]:
    """About so many lumps of blocks, and what they cost; a graph with no more stays as it is.

    Lumps end where least is sent. Each has the name of its first block, which stands for all of it
    in a plan: blocks that no stage names go with the one before.
    """
    if len(graph.blocks) <= 1.5 * lumps:
        return graph, costs
    runs = _runs(graph, costs, lumps)
    needed = _needed(graph, runs)
    blocks = tuple(_lump([graph.blocks[i] for i in run], needed) for run in runs)
    items = (together(costs[i] for i in run) for run in runs)
    kept = (
        replace(
            cost,
            activations=graph.activations(run),
            weights=graph.held(run),
            gradients=graph.trained(run),
        )
        for run, cost in zip(runs, items, strict=True)
    )
    small = _merged(replace(graph, blocks=blocks))
    return small, replace(costs, items=tuple(kept))


def _merged(graph: Graph) -> Graph:
    """Storages and weights that one lump alone has, as one: bytes are what a search asks for."""
    inside = (name for b in graph.blocks for name in (*b.reads, *b.writes))
    passed = {*inside, *graph.inputs, *graph.outputs}
    saved = Counter(storage for b in graph.blocks for storage, _ in b.saves)
    saved.update(value.storage for value in graph.values if value.name in passed)
    used = Counter(name for b in graph.blocks for name in (*b.parameters, *b.buffers))
    weights: dict[str, Weight] = {}

    def together(names: tuple[str, ...]) -> tuple[str, ...]:
        own = [name for name in names if used[name] == 1]
        if not own:
            return names
        size = sum(graph.weight[name].bytes for name in own)
        weights[own[0]] = Weight(own[0], (size,), "uint8")
        return (own[0], *(name for name in names if used[name] > 1))

    blocks = []
    for block in graph.blocks:
        own = [pair for pair in block.saves if saved[pair[0]] == 1]
        shared = [pair for pair in block.saves if saved[pair[0]] > 1]
        one = [(own[0][0], sum(size for _, size in own))] if own else []
        blocks.append(
            replace(
                block,
                saves=(*one, *shared),
                parameters=together(block.parameters),
                buffers=together(block.buffers),
            )
        )
    parameters, buffers = (
        tuple(weights.get(w.name, w) for w in group) for group in (graph.parameters, graph.buffers)
    )
    return replace(graph, blocks=tuple(blocks), parameters=parameters, buffers=buffers)


def finer(plan: Plan, graph: Graph, lumps: Graph) -> Plan:
    """A plan for lumps as one for the graph that they are of: `recompute` names all blocks of a
    lump."""
    if lumps is graph or all(isinstance(p.recompute, str) for p in plan.activations):
        return plan
    members: list[list[int]] = []
    for i, block in enumerate(graph.blocks):
        if block.name in lumps.index:
            members.append([])
        members[-1].append(i)
    entries = [policy.recompute for policy in plan.activations]
    for stage, entry in enumerate(entries):
        within = [lumps.index[name] for name in plan.stages[stage]]  # type: ignore[index]
        if (chosen := recomputed_blocks(entry, lumps, within)) is not None:
            blocks = [i for lump in within for i in members[lump]]
            recomputed = {i for lump in chosen for i in members[lump]}
            entries[stage] = names_of(graph, recomputed, blocks)
    return replace(plan, recompute=tuple(entries))


def _runs(graph: Graph, costs: Costs, lumps: int) -> list[range]:
    """Runs with a share of the time or of the activations, ended at the next good boundary."""
    crossing = [*graph.crossing, 0]
    activations = [sum(n for _, n in b.saves) for b in graph.blocks]
    seconds = [c.seconds for c in costs.items]
    most = [2 * sum(row) / lumps or 1.0 for row in (seconds, activations)]
    runs, start = [], 0
    filled = [0.0, 0.0]
    for i in range(len(graph.blocks)):
        filled = [filled[0] + seconds[i], filled[1] + activations[i]]
        near = crossing[max(i - 2, 0) : i + 4]  # the ends of blocks around this one
        last = i + 1 == len(graph.blocks)
        turns = not last and any(
            getattr(graph.blocks[i], way) != getattr(graph.blocks[i + 1], way)
            for way in ("whole", "streams", "tiled")
        )
        good = crossing[i + 1] <= min(near) and any(
            a >= b for a, b in zip(filled, most, strict=True)
        )
        if last or turns or good:
            runs.append(range(start, i + 1))
            start, filled = i + 1, [0.0, 0.0]
    return runs


def _needed(graph: Graph, runs: Sequence[range]) -> set[str]:
    """The values that leave their lump."""
    lump_of = {i: number for number, run in enumerate(runs) for i in run}
    found = set(graph.outputs)
    for i, block in enumerate(graph.blocks):
        for name in block.reads:
            source = graph.producer.get(name)
            if source is not None and lump_of[source] != lump_of[i]:
                found.add(name)
    return found


def _lump(blocks: Sequence[Block], needed: set[str]) -> Block:
    made = {name for b in blocks for name in b.writes}
    halos = zip(*(b.halos for b in blocks), strict=False)
    reach = zip(*(b.reach for b in blocks), strict=False)
    writes = [name for b in blocks for name in b.writes if name in needed]
    return Block(
        name=blocks[0].name,
        layer=blocks[0].layer,
        reads=tuple(dict.fromkeys(n for b in blocks for n in b.reads if n not in made)),
        writes=tuple(writes) or blocks[-1].writes,
        parameters=tuple(dict.fromkeys(n for b in blocks for n in b.parameters)),
        buffers=tuple(dict.fromkeys(n for b in blocks for n in b.buffers)),
        mutates=tuple(dict.fromkeys(n for b in blocks for n in b.mutates if n not in made)),
        saves=tuple(sorted(dict(pair for b in blocks for pair in b.saves).items())),
        flops=sum(b.flops for b in blocks),
        moved=sum(b.moved for b in blocks),
        halos=tuple(map(sum, halos)),
        sums=sum(b.sums for b in blocks),
        exchanges=sum(b.exchanges for b in blocks),
        totals=sum(b.totals for b in blocks),
        whole=blocks[0].whole,
        reach=tuple(map(sum, reach)),
        streams=blocks[-1].streams,
        tiled=any(b.tiled for b in blocks),
        joins=max(b.joins for b in blocks),
        flows=tuple(flow for b in blocks for flow in b.flows),
    )
