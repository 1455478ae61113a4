"""Adaptive pooling: a few windows over the whole image, which every rank has in the end."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from gems.geometry.box import Box
from gems.torch.spatial.group import AllReduce
from gems.torch.spatial.op import NotTileable, Op, Run
from gems.torch.spatial.rule import Rule, rule, unchanged
from gems.torch.spatial.rules.reductions import all_reduced
from gems.torch.spatial.tile import Tile

Tensor = torch.Tensor


def _adaptive(input: Any, output_size: Any, return_indices: bool = False) -> None: ...


def _window(o: int, outputs: int, length: int) -> range:
    return range(o * length // outputs, -(-(o + 1) * length // outputs))


ADAPTIVE = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}


@rule(
    [f"adaptive_avg_pool{n}d" for n in (1, 2, 3)],
    (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
)
def adaptive_average(op: Op) -> Rule:
    """Each rank adds what its cells give to every window; the mean of all is the sum of parts."""
    a = op.named(_adaptive, ("output_size",))
    x, layout = a["input"], op.primary(a["input"])
    shape = op.shape(op.out)
    if 0 in layout.dims:
        return unchanged(op, x)
    if 1 in layout.dims or len(shape) < 3:
        raise NotTileable("takes an input without samples or channels")
    return averaged(op, x, lambda work: lambda tile: tile.named(_adaptive, work, "output_size"))


Work = Callable[[dict[str, Any]], Tensor]


def averaged(op: Op, x: Any, called: Callable[[Work], Callable[[Tile], Run]]) -> Rule:
    """The means of windows that cover the image, as many as the result has cells; `called` makes
    what to call of a function of the arguments by name."""
    layout, shape = op.primary(x), op.shape(op.out)
    if 0 in layout.dims:
        return unchanged(op, x)
    count = len(shape) - 2

    def bind(tile: Tile) -> Run:
        with_halo, own = tile.with_halo(x), tile.own(x.name)
        shares = {d: _shares(layout.shape[d], shape[d], own, d) for d in layout.dims}
        rest = [None if 2 + d in layout.dims else shape[2 + d] for d in range(count)]
        native = any(n is not None and n != layout.shape[2 + d] for d, n in enumerate(rest))

        def work(a: dict[str, Any]) -> Tensor:
            t = with_halo(a["input"])
            for dim, share in shares.items():
                if shape[dim] == 1:
                    t = t.sum(dim, keepdim=True) / layout.shape[dim]
                else:
                    t = (t.movedim(dim, -1) @ share.to(t)).movedim(-1, dim)
            if native:
                kept = [t.shape[2 + d] if n is None else n for d, n in enumerate(rest)]
                t = ADAPTIVE[count](t, kept)
            return AllReduce.apply(t, tile.group)  # type: ignore[no-any-return]

        return called(work)(tile)

    return all_reduced(op, bind, additive=True)


def _shares(length: int, outputs: int, own: Box, dim: int) -> Tensor:
    """What each own cell along a dim gives to each window: (cells, windows)."""
    found = torch.zeros(own.shape[dim], outputs, dtype=torch.float64)
    for o in range(outputs):
        window = _window(o, outputs, length)
        low, high = max(window.start, own.start[dim]), min(window.stop, own.stop[dim])
        if low < high:
            found[low - own.start[dim] : high - own.start[dim], o] = 1 / len(window)
    return found


MAXIMA = {1: F.adaptive_max_pool1d, 2: F.adaptive_max_pool2d, 3: F.adaptive_max_pool3d}


@rule(
    [f"adaptive_max_pool{n}d{kind}" for n in (1, 2, 3) for kind in ("", "_with_indices")],
    (nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
)
def adaptive_maximum(op: Op) -> Rule:
    """The largest cell of each window; of equal ones the first of the image, as ATen has it."""
    a = op.named(_adaptive, ("output_size", "return_indices"))
    x, layout = a["input"], op.primary(a["input"])
    shape = op.shape(op.call.writes[0])
    if 0 in layout.dims:
        return unchanged(op, x)
    lengths = layout.shape[2:]
    indices = len(op.call.writes) > 1

    def bind(tile: Tile) -> Run:
        with_halo, own = tile.with_halo(x), tile.own(x.name)

        def work(a: dict[str, Any]) -> Any:
            t = with_halo(a["input"])
            values, places = [], []
            for cell in itertools.product(*map(range, shape[2:])):
                v, p = _first_most(t, own, cell, shape[2:], lengths)
                values.append(v)
                places.append(p)
            value, at = torch.stack(values, -1), torch.stack(places, -1)
            y, where = _winner(value, at, tile)
            y, where = y.view(shape), where.view(shape)
            return (y, where) if indices else y

        return tile.named(_adaptive, work, "output_size", "return_indices")

    return all_reduced(op, bind)


def _first_most(
    t: Tensor, own: Box, cell: Sequence[int], outputs: Sequence[int], lengths: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """The largest of a rank's cells in one window, and where in the image it is."""
    windows = [_window(o, m, n) for o, m, n in zip(cell, outputs, lengths, strict=True)]
    low = [max(w.start, a) for w, a in zip(windows, own.start[2:], strict=True)]
    high = [min(w.stop, b) for w, b in zip(windows, own.stop[2:], strict=True)]
    if any(a >= b for a, b in zip(low, high, strict=True)):
        nowhere = torch.full(t.shape[:2], prod(lengths), device=t.device)
        return t.new_full(t.shape[:2], -torch.inf) + 0 * t.sum(), nowhere
    inner = [slice(a - s, b - s) for a, b, s in zip(low, high, own.start[2:], strict=True)]
    part = t[(slice(None), slice(None), *inner)]
    value, index = MAXIMA[len(lengths)](part, 1, return_indices=True)
    at = torch.zeros_like(index)
    for d, n in enumerate(lengths):
        at = at * n + index // prod(part.shape[3 + d :]) % part.shape[2 + d] + low[d]
    return value.flatten(1), at.flatten(1)


def _winner(value: Tensor, at: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        values = torch.stack(tile.group.all_gather(value.detach().contiguous()))
        places = torch.stack(tile.group.all_gather(at.contiguous()))
        best = values.amax(0)
        last = torch.iinfo(places.dtype).max
        where = torch.where(values == best, places, last).amin(0)
        mine = (value == best) & (at == where)
    return AllReduce.apply(torch.where(mine, value, 0.0), tile.group), where
