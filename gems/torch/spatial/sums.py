"""Calls that look at the whole image: sums, means, maxima, adaptive pooling, and losses.

Each rank does its own cells, one exchange puts the parts together, and every rank has the result.
From there on all of them compute the same; a gradient that comes back is a part on each rank, and
the adjoint of the exchange adds the parts up.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from gems.geometry import Box
from gems.layout import Layout
from gems.torch.calls import Attr, Ref
from gems.torch.spatial.pointwise import part_of
from gems.torch.spatial.rule import OWN, Ask, NoCut, Rule, Run, Site, rule
from gems.torch.spatial.shapes import fetched
from gems.torch.spatial.team import Total

Tensor = torch.Tensor


def together(ask: Ask, bind: Callable[[Site], Run]) -> Rule:
    """Every rank brings its own cells of each cut input; the results are whole."""
    return Rule({}, dict.fromkeys(ask.cut, OWN), bind)


def _reduce(
    input: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None, axis: Any = None
) -> None: ...


@rule(("sum", "mean", "amax", "amin", "max", "min"))
def reduction(ask: Ask) -> Rule:
    a = ask.named(_reduce)
    x, layout = a["input"], ask.primary(a["input"])
    dim = a["dim"] if a["axis"] is None else a["axis"]
    rank = len(layout.shape)
    chosen = (dim,) if isinstance(dim, int) else tuple(dim or range(rank))
    dims = tuple(sorted(d % rank for d in chosen))
    hit = [d in dims for d in layout.dims]
    if not any(hit):
        keep = bool(a["keepdim"])
        return fetched(ask, x, [d - (0 if keep else sum(r < d for r in dims)) for d in layout.dims])
    if not all(hit):
        raise NoCut(f"reduces dims {dims}, of which only some are cut ({layout.dims})")
    if ask.name in ("max", "min") and len(ask.call.writes) > 1:
        raise NoCut("asks for positions along a dim that is cut")
    cells = prod(layout.shape[d] for d in dims)
    work = {"sum": _sum, "mean": _sum, "amax": _most, "max": _most, "amin": _least, "min": _least}
    share = 1 / cells if ask.name == "mean" else 1.0

    def bind(site: Site) -> Run:
        fetch = site.fetch(x, None)

        def run(a: dict[str, Any]) -> Tensor:
            t = fetch(a["input"])
            t = t if a["dtype"] is None else t.to(a["dtype"])
            y = work[ask.name](t, dims, bool(a["keepdim"]), site)
            return y * share if share != 1.0 else y

        return site.named(_reduce, run)

    return together(ask, bind)


def _sum(t: Tensor, dims: tuple[int, ...], keep: bool, site: Site) -> Tensor:
    return Total.apply(t.sum(dims, keepdim=keep), site.team)  # type: ignore[no-any-return]


def _most(t: Tensor, dims: tuple[int, ...], keep: bool, site: Site) -> Tensor:
    """The largest; like ATen's amax, all cells that are as large share its gradient."""
    with torch.no_grad():
        nothing = _kept(t.shape, dims)
        mine = t.amax(dims, keepdim=True) if t.numel() else t.new_full(nothing, -torch.inf)
        best = torch.stack(site.team.rows(mine.contiguous())).amax(0)
        equal = (t == best).to(t.dtype)
        equal /= site.team.total(equal.sum(dims, keepdim=True))
        best = best if keep else best.squeeze(dims)
    part = (t * equal).sum(dims, keepdim=keep)
    # The value itself exactly; the sum over equal shares only carries the gradient.
    found = Total.apply(part, site.team)
    return best + (found - found.detach())


def _least(t: Tensor, dims: tuple[int, ...], keep: bool, site: Site) -> Tensor:
    return -_most(-t, dims, keep, site)


def _kept(shape: Sequence[int], dims: Sequence[int]) -> list[int]:
    return [1 if d in dims else n for d, n in enumerate(shape)]


# --- adaptive pooling ---------------------------------------------------------------------------


def _adaptive(input: Any, output_size: Any, return_indices: bool = False) -> None: ...


def _window(o: int, outputs: int, length: int) -> range:
    return range(o * length // outputs, -(-(o + 1) * length // outputs))


ADAPTIVE = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}


@rule(
    [f"adaptive_avg_pool{n}d" for n in (1, 2, 3)],
    (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
)
def adaptive_average(ask: Ask) -> Rule:
    """Each rank adds what its cells give to every window; the mean of all is the sum of parts."""
    a = ask.named(_adaptive, ("output_size",))
    x, layout = a["input"], ask.primary(a["input"])
    shape = ask.shape(ask.out)
    if 0 in layout.dims:
        return fetched(ask, x, layout.dims)
    if 1 in layout.dims or len(shape) < 3:
        raise NoCut("takes an input without samples or channels")
    count = len(shape) - 2

    def bind(site: Site) -> Run:
        fetch, own = site.fetch(x, None), site.own(x.name)
        shares = {d: _shares(layout.shape[d], shape[d], own, d) for d in layout.dims}
        rest = [None if 2 + d in layout.dims else shape[2 + d] for d in range(count)]
        native = any(n is not None and n != layout.shape[2 + d] for d, n in enumerate(rest))

        def work(a: dict[str, Any]) -> Tensor:
            t = fetch(a["input"])
            for dim, share in shares.items():
                if shape[dim] == 1:
                    t = t.sum(dim, keepdim=True) / layout.shape[dim]
                else:
                    t = (t.movedim(dim, -1) @ share.to(t)).movedim(-1, dim)
            if native:
                kept = [t.shape[2 + d] if n is None else n for d, n in enumerate(rest)]
                t = ADAPTIVE[count](t, kept)
            return Total.apply(t, site.team)  # type: ignore[no-any-return]

        return site.named(_adaptive, work, "output_size")

    return together(ask, bind)


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
def adaptive_maximum(ask: Ask) -> Rule:
    """The largest cell of each window; of equal ones the first of the image, as ATen has it."""
    a = ask.named(_adaptive, ("output_size", "return_indices"))
    x, layout = a["input"], ask.primary(a["input"])
    shape = ask.shape(ask.call.writes[0])
    if 0 in layout.dims:
        return fetched(ask, x, layout.dims)
    lengths = layout.shape[2:]
    indices = len(ask.call.writes) > 1

    def bind(site: Site) -> Run:
        fetch, own = site.fetch(x, None), site.own(x.name)

        def work(a: dict[str, Any]) -> Any:
            t = fetch(a["input"])
            values, places = [], []
            for cell in itertools.product(*map(range, shape[2:])):
                v, p = _first_most(t, own, cell, shape[2:], lengths)
                values.append(v)
                places.append(p)
            value, at = torch.stack(values, -1), torch.stack(places, -1)
            y, where = _winner(value, at, site)
            y, where = y.view(shape), where.view(shape)
            return (y, where) if indices else y

        return site.named(_adaptive, work, "output_size", "return_indices")

    return together(ask, bind)


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


def _winner(value: Tensor, at: Tensor, site: Site) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        values = torch.stack(site.team.rows(value.detach().contiguous()))
        places = torch.stack(site.team.rows(at.contiguous()))
        best = values.amax(0)
        last = torch.iinfo(places.dtype).max
        where = torch.where(values == best, places, last).amin(0)
        mine = (value == best) & (at == where)
    return Total.apply(torch.where(mine, value, 0.0), site.team), where


# --- losses -------------------------------------------------------------------------------------


def _cross_entropy(
    input: Any, target: Any, weight: Any = None, size_average: Any = None,
    ignore_index: int = -100, reduce: Any = None, reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> None: ...  # fmt: skip


CROSS_ENTROPY = ("weight", "ignore_index", "reduction", "label_smoothing")


@rule(("cross_entropy", "nll_loss", "nll_loss_nd"), (nn.CrossEntropyLoss, nn.NLLLoss))
def cross_entropy(ask: Ask) -> Rule:
    """Sums over own cells, divided by the weight of all cells that count."""
    a: dict[str, Any] = {"label_smoothing": 0.0, "size_average": None, "reduce": None}
    a |= ask.named(_cross_entropy, CROSS_ENTROPY)
    x, target = a["input"], a["target"]
    layout = ask.primary_of(x)
    if 1 in layout.dims:
        raise NoCut("compares classes, which are cut")
    if a["size_average"] is not None or a["reduce"] is not None or a["reduction"] == "none":
        raise NoCut("has another reduction than 'mean' or 'sum'")
    soft = ask.shape(target) == layout.shape
    _same_cells(ask, target, layout, soft)
    likely = ask.name.startswith("nll") or isinstance(ask.module, nn.NLLLoss)

    def bind(site: Site) -> Run:
        fetch, fetch_target = site.fetch(x, None), site.fetch(target, None)
        empty = site.own(x.name).empty

        def work(a: dict[str, Any]) -> Tensor:
            t, y, weight = fetch(a["input"]), fetch_target(a["target"]), a["weight"]
            options = {"weight": weight, "ignore_index": a["ignore_index"], "reduction": "sum"}
            if empty:
                part = 0 * t.sum()
            elif likely:
                part = F.nll_loss(t, y, **options)
            else:
                smooth = a.get("label_smoothing", 0.0)
                part = F.cross_entropy(t, y, **options, label_smoothing=smooth)
            found = Total.apply(part, site.team)
            if a["reduction"] == "sum":
                return found
            if soft:
                return found / (layout.shape[0] * prod(layout.shape[2:]))
            counted = y != a["ignore_index"]
            if weight is None:
                heavy = counted.sum().to(t.dtype)
            else:
                heavy = torch.where(counted, weight[torch.where(counted, y, 0)], 0.0).sum()
            return found / site.team.total(heavy.detach())

        return site.named(_cross_entropy, work, *CROSS_ENTROPY)

    return together(ask, bind)


def _same_cells(ask: Ask, target: Any, layout: Layout, alike: bool) -> None:
    """A target must be cut like what it is compared with."""
    other = ask.layout(target)
    wanted = layout.dims if alike else tuple(d - (d > 1) for d in layout.dims)
    if other is None or other.dims != wanted or other.own != layout.own:
        raise NoCut(
            f"compares {layout.shape} with {ask.shape(target)}, which does not have the same cells"
        )


ELEMENTWISE = (
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "kl_div",
    "binary_cross_entropy_with_logits", "soft_margin_loss", "poisson_nll_loss",
    "gaussian_nll_loss",
)  # fmt: skip
LOSSES = (
    nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.KLDivLoss,
    nn.BCEWithLogitsLoss, nn.SoftMarginLoss,
)  # fmt: skip


@rule(ELEMENTWISE, LOSSES)
def elementwise(ask: Ask) -> Rule:
    """A loss per cell: summed over own cells, then over the ranks."""
    layout = ask.layouts[ask.cut[0]]
    for name in ask.cut:
        other = ask.layouts[name]
        if other.shape != layout.shape or other.own != layout.own or other.dims != layout.dims:
            raise NoCut(f"compares {layout.shape} with {other.shape}, which is not cut like it")
    how = getattr(ask.module, "reduction", None) or ask.call.kwargs.get("reduction", "mean")
    if how not in ("mean", "sum", "batchmean"):
        raise NoCut(f"has reduction {how!r}; use 'mean' or 'sum'")
    old = [ask.call.kwargs.get(k) for k in ("size_average", "reduce")]
    if any(k is not None for k in old):
        raise NoCut("uses size_average or reduce; use reduction")
    share = {"mean": prod(layout.shape), "sum": 1, "batchmean": layout.shape[0]}[how]

    def bind(site: Site) -> Run:
        box = site.own(ask.cut[0])

        def change(place: Ref | Attr | Tensor) -> Callable[[Tensor], Tensor]:
            if isinstance(place, Ref) and place.name in ask.layouts:
                return site.fetch(place, None)
            return part_of(ask.whole(place), box, layout.dims)

        def work(*args: Any, **kwargs: Any) -> Tensor:
            if ask.module is not None:
                cells = _each(ask.module, args, box, layout.dims)
            else:
                assert ask.call.function is not None
                cells = ask.call.function(*args, **{**kwargs, "reduction": "none"})
            return Total.apply(cells.sum(), site.team) / share  # type: ignore[no-any-return]

        return site.mapped(work, change)

    return together(ask, bind)


def _each(module: Any, args: Any, box: Box, dims: tuple[int, ...]) -> Tensor:
    """The loss of every cell, by a loss module with settings of its own."""
    held = module.reduction
    weights = {n: b for n, b in module.named_buffers() if b is not None}
    try:
        module.reduction = "none"
        for name, b in weights.items():
            module._buffers[name] = part_of(tuple(b.shape), box, dims)(b)
        return module(*args)
    finally:
        module.reduction = held
        module._buffers.update(weights)
