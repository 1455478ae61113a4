"""Halos that each block would exchange if the image were tiled, found by laying out two tiles."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gems.geometry.layout import even
from gems.keras.spatial.partition import CannotRun, StageLayout, halo_cells, lay_out
from gems.keras.spatial.stage_layouts import Dims, image_dims
from gems.keras.tracing.record import Recording
from gems.model.graph import ITEMSIZE, Graph


def with_halos(r: Recording) -> Graph:
    """The graph with `halos` and `sums` of every block, `whole` where no tiling is exact, and the
    dims of the image in each value.

    The image is divided into two tiles along one dim after the other. All blocks from the first one
    that cannot be tiled are `whole`: what follows it has no tiles to work on.
    """
    graph, dims = r.graph, image_dims(r)
    axes = max((len(dims.get(name, ())) for name in graph.inputs), default=0)
    block_of = {op.name: i for i, ops in enumerate(r.ops) for op in ops}
    halos: dict[int, list[int]] = defaultdict(lambda: [0] * axes)
    sums: dict[int, int] = defaultdict(int)
    totals: dict[int, int] = defaultdict(int)
    exchanges: dict[int, int] = defaultdict(int)
    reach = len(graph.blocks) if axes else 0
    for axis in range(axes):
        laid, stop = _two_tiles(r, dims, axis - axes)
        reach = min(reach, len(graph.blocks) if stop is None else block_of[stop])
        own: dict[str, dict[int, int]] = {"sums": defaultdict(int), "sent": defaultdict(int)}
        totals_here: dict[int, int] = defaultdict(int)
        for op in laid.ops:
            block, rule = block_of[op.name], laid.rules.get(op.name)
            for sent in _exchanged(laid, op).values():
                halos[block][axis] += sent
                own["sent"][block] += 1
            if rule is not None:
                own["sums"][block] += rule.sums * ITEMSIZE[op.outputs[0].dtype.name]
                totals_here[block] += rule.totals
        _highest(sums, own["sums"])
        _highest(exchanges, own["sent"])
        _highest(totals, totals_here)
    blocks = tuple(
        replace(
            b,
            halos=tuple(halos[i]),
            exchanges=exchanges[i],
            sums=sums[i],
            totals=totals[i],
            whole=i >= reach,
        )
        for i, b in enumerate(graph.blocks)
    )
    values = tuple(replace(v, image=dims.get(v.name, ())) for v in graph.values)
    return replace(graph, blocks=blocks, values=values)


def _highest(found: dict[int, int], more: Mapping[int, int]) -> None:
    for block, n in more.items():
        found[block] = max(found[block], n)


def _two_tiles(r: Recording, dims: Dims, axis: int) -> tuple[StageLayout, str | None]:
    """The ops laid out over two tiles, as far as they can be, and the first that cannot."""
    entering = {}
    for t in r.inputs:
        if len(mine := dims.get(t.name, ())) >= -axis:
            entering[t.name] = even(tuple(t.shape.as_list()), (mine[axis],), (2,))
    ops: list[Any] = [op for block in r.ops for op in block]
    stop = None
    while True:
        try:
            return lay_out(ops, entering, (2,), r.forward, gathers=False), stop
        except CannotRun as error:
            stop = error.op
            ops = ops[: [op.name for op in ops].index(stop)]


def _exchanged(laid: StageLayout, op: Any) -> dict[str, int]:
    """Bytes that two tiles send each other so that an op can run, by the value that is read."""
    sizes = {t.name: t.dtype.size for t in op.inputs}
    exchanges = laid.exchanges_of(op).items()
    return {name: halo_cells(have, want) * sizes[name] for name, (have, want) in exchanges}
