"""Calls that look at the whole image: sums, means, maxima, adaptive pooling, and losses.

Each rank does its own cells, one exchange puts the parts together, and every rank has the result.
From there on all of them compute the same; a gradient that comes back is a part on each rank, and
the adjoint of the exchange adds the parts up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

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
