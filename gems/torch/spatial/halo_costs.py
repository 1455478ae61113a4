"""Halos that each block would exchange if the image were tiled, found by laying out two tiles."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from gems.geometry.box import moves
from gems.geometry.layout import Layout, even
from gems.geometry.window import line
from gems.model.graph import ITEMSIZE, Flow, Graph
from gems.torch.spatial.partition import CallNotTileable, StageLayout, lay_out
from gems.torch.spatial.patch_layout import joined, unstreamable
from gems.torch.spatial.rule import OWN
from gems.torch.spatial.unread_calls import blind
from gems.torch.tensors.rng import Draws
from gems.torch.tracing.calls import Call
from gems.torch.tracing.trace import Trace

NUMBER = 4  # bytes of a number in a sum of statistics


def with_halos(traced: Trace, model: nn.Module) -> Graph:
    """The graph with `halos` and `sums` of every block, and `whole` where no tiling is exact.

    The image is divided into two tiles along one dim after the other. All blocks from the first one
    that cannot be tiled are `whole`: what follows it has no tiles to work on.
    """
    graph, block_of = traced.graph, _blocks(traced)
    shapes = [graph.value[name].shape for name in graph.inputs]
    dims = max((len(shape) - 2 for shape in shapes), default=0)
    halos: dict[int, list[int]] = defaultdict(lambda: [0] * dims)
    sums: dict[int, int] = {}
    exchanges: dict[int, int] = {}
    around: dict[int, list[float]] = defaultdict(lambda: [0.0] * dims)
    reach = streams = len(graph.blocks) if dims > 0 else 0
    tiled: set[int] = set()
    joins: dict[int, int] = {}
    layouts: list[StageLayout] = []
    for dim in range(dims):
        laid, stop = _two_tiles(traced, model, dim - dims)
        layouts.append(laid)
        reach = min(reach, reach if stop is None else block_of[stop])
        for at, (call, rule) in enumerate(zip(laid.calls, laid.rules, strict=True)):
            block = block_of[call.name]
            sent, read = _exchanged(laid, at)
            halos[block][dim] += sent
            exchanges[block] = max(exchanges.get(block, 0), int(sent > 0))
            around[block][dim] += read
            if rule is not None:
                tiled.add(block)
            joins[block] = max(joins.get(block, 0), joined(rule))
            if unstreamable(call, rule) is not None:
                streams = min(streams, block)
            sums[block] = max(sums.get(block, 0), NUMBER * rule.sums if rule else 0)
    flows = _flows(layouts, block_of)
    blocks = tuple(
        replace(
            b,
            halos=tuple(halos[i]),
            exchanges=exchanges.get(i, 0),
            sums=sums.get(i, 0),
            totals=int(sums.get(i, 0) > 0),
            whole=i >= reach,
            reach=tuple(around[i]),
            streams=i < min(streams, reach),
            tiled=i in tiled,
            joins=joins.get(i, 0),
            flows=tuple(flows[i]),
            blind=_blind(traced.calls(i), model),
        )
        for i, b in enumerate(graph.blocks)
    )
    return replace(graph, blocks=blocks)


def _flows(layouts: Sequence[StageLayout], block_of: Mapping[str, int]) -> dict[int, list[Flow]]:
    """How each block's calls on the image read it, of layouts over one dim each."""
    found: dict[int, list[Flow]] = defaultdict(list)
    for alike in zip(*(zip(x.calls, x.ops, x.rules, strict=True) for x in layouts), strict=False):
        (call, op, first), rules = alike[0], [rule for _, _, rule in alike]
        if first is None or any(rule is None for rule in rules):
            continue
        names = [n for n in first.windows if all(n in rule.windows for rule in rules if rule)]
        writes = tuple(n for n in first.outs if all(n in rule.outs for rule in rules if rule))
        lengths = {
            name: tuple(x.layouts[name].shape[x.layouts[name].dims[0]] for x in layouts)
            for name in (*names, *writes)
        }
        reads = []
        for name in names:
            windows = [rule.windows[name] for rule in rules if rule]
            if any(w == OWN for w in windows) or not writes:
                reads.append((name, None))
                continue
            pairs = zip(windows, lengths[name], lengths[writes[0]], strict=True)
            reads.append((name, tuple(line(w, n, m) for (w,), n, m in pairs)))
        sizes = tuple((name, n, op.values[name].bytes) for name, n in lengths.items())
        found[block_of[call.name]].append(Flow(tuple(reads), writes, sizes))
    return found


def _blind(calls: Sequence[Call], model: nn.Module) -> int:
    """Of a block, if it is one call."""
    return blind(calls[0], model) if len(calls) == 1 else 0


def _blocks(traced: Trace) -> dict[str, int]:
    """The block of every call, by name."""
    count = range(len(traced.graph.blocks))
    return {call.name: i for i in count for call in traced.calls(i)}


def _two_tiles(traced: Trace, model: nn.Module, dim: int) -> tuple[StageLayout, str | None]:
    """The calls laid out over two tiles, as far as they can be, and the first that cannot."""
    record, draws = traced.record, Draws(0, torch.device("cpu"))
    entering: dict[str, Layout] = {}
    for name in record.inputs:
        shape = record.values[name].shape
        if len(shape) - 2 >= -dim:
            entering[name] = even(shape, (len(shape) + dim,), (2,))
    calls, stop = record.calls, None
    while True:
        try:
            return lay_out(record, model, calls, entering, draws, gathers=False), stop
        except CallNotTileable as error:
            stop = error.call.name
            calls = calls[: calls.index(error.call)]


def _exchanged(laid: StageLayout, at: int) -> tuple[int, float]:
    """Bytes that two tiles send each other so that a call can run, and what it reads around its
    outputs, as a part of the image."""
    sent, around = 0, 0.0
    for name, (have, pieces) in laid.exchanges_of(at).items():
        moved = (m.box.size for want in pieces for m in moves(have, want) if m.source != m.target)
        cells = sum(moved)
        sent += cells * ITEMSIZE[laid.ops[at].values[name].dtype]
        around = max(around, cells / sum(box.size for box in have))
    return sent, around
