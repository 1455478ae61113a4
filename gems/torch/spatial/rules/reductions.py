"""Calls that look along cut dims: sums, means, variances, maxima.

Each rank does its own cells, one exchange puts the parts together, and every rank has the result,
also where only some of the cut dims are gone: what is left is small beside the image. From there on
all of them compute the same; a gradient that comes back is a part on each rank, and the adjoint of
the exchange adds the parts up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F

from gems.geometry.box import Box
from gems.geometry.layout import Layout
from gems.torch.spatial.group import SpatialGroup, Total
from gems.torch.spatial.rule import OWN, Ask, NotTileable, Rule, Run, Site, rule
from gems.torch.spatial.rules.elementwise import pointwise
from gems.torch.spatial.rules.reshape import fetched

Tensor = torch.Tensor


def together(ask: Ask, bind: Callable[[Site], Run], *, adds: bool = False) -> Rule:
    """Every rank brings its own cells of each cut input; the results are whole."""
    whole = sum(prod(ask.shape(name)) for name in ask.call.writes)
    return Rule({}, dict.fromkeys(ask.cut, OWN), bind, sums=whole, adds=adds)


@dataclass(frozen=True)
class Strip:
    """What is left of a cut tensor without `dims`, and this rank's part of it.

    ::

        ┌───┬───┐                 ┌─┐ here: the rows of tile 0, and of
        │ 0 │ 1 │   sum along W   │▒│       tile 1 as well; below them
        ├───┼───┤  ────────────>  ├─┤       zeros, until all parts are
        │ 2 │ 3 │                 │0│       added up
        └───┴───┘                 └─┘
    """

    team: SpatialGroup
    own: Box
    dims: tuple[int, ...]
    pads: list[int]  # around this rank's part, as F.pad has them
    here: tuple[slice, ...]

    def padded(self, part: Tensor, fill: float = 0.0) -> Tensor:
        return F.pad(part, self.pads, value=fill) if any(self.pads) else part.contiguous()

    def rows(self, part: Tensor, fill: float) -> Tensor:
        """Everybody's part, stacked."""
        return torch.stack(self.team.rows(self.padded(part, fill)))

    def sum(self, x: Tensor) -> Tensor:
        """Over `dims` of all ranks' cells; the dims stay, of length 1."""
        part = self.padded(x.sum(self.dims, keepdim=True))
        return Total.apply(part, self.team)  # type: ignore[no-any-return]

    def count(self, x: Tensor) -> Tensor:
        """The same, without a gradient."""
        return self.team.total(self.padded(x.sum(self.dims, keepdim=True)))


def strip(site: Site, name: str, layout: Layout, dims: tuple[int, ...]) -> Strip:
    own, pads, here = site.own(name), list[int](), list[slice]()
    for dim in range(len(layout.shape)):
        low, high = (0, 1) if dim in dims else (own.start[dim], own.stop[dim])
        pads = [low, (1 if dim in dims else layout.shape[dim]) - high, *pads]
        here.append(slice(low, high))
    return Strip(site.team, own, dims, pads, tuple(here))


Work = Callable[[Tensor, Strip, dict[str, Any]], Any]


def along(
    ask: Ask, stub: Run, a: dict[str, Any], dim: Any, work: Work, *, adds: bool = False
) -> Rule:
    """`work` on a rank's own cells if a cut dim is among `dim`; what it gives has kept them all."""
    x, layout = a["input"], ask.primary(a["input"])
    rank, keep = len(layout.shape), bool(a["keepdim"])
    chosen = (dim,) if isinstance(dim, int) else tuple(dim or range(rank))
    dims = tuple(sorted(d % rank for d in chosen))
    if not set(dims) & set(layout.dims):
        return fetched(ask, x, [d - (0 if keep else sum(r < d for r in dims)) for d in layout.dims])

    def shaped(found: Any) -> Any:
        if isinstance(found, tuple):
            return tuple(map(shaped, found))
        return found if keep else found.squeeze(dims)

    def bind(site: Site) -> Run:
        fetch, left = site.fetch(x, None), strip(site, x.name, layout, dims)
        return site.named(stub, lambda a: shaped(work(fetch(a["input"]), left, a)))

    return together(ask, bind, adds=adds)


# --- sums and means -------------------------------------------------------------------------------


def _reduce(
    input: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None, axis: Any = None
) -> None: ...


def _cells(ask: Ask, x: Any, left: Strip) -> int:
    return prod(ask.shape(x)[d] for d in left.dims)


@rule(("sum", "mean"))
def total(ask: Ask) -> Rule:
    a = ask.named(_reduce)
    x = a["input"]

    def work(t: Tensor, left: Strip, a: dict[str, Any]) -> Tensor:
        y = left.sum(t if a["dtype"] is None else t.to(a["dtype"]))
        return y / _cells(ask, x, left) if ask.name == "mean" else y

    dim = a["dim"] if a["axis"] is None else a["axis"]
    return along(ask, _reduce, a, dim, work, adds=ask.values[ask.out].grad)


def _variance(
    input: Any, dim: Any = None, unbiased: Any = None, keepdim: bool = False,
    correction: Any = None,
) -> None: ...  # fmt: skip


@rule(("var", "std", "var_mean", "std_mean"))
def variance(ask: Ask) -> Rule:
    """The mean first, then the squares of what differs from it."""
    a = ask.named(_variance)
    x, dim, unbiased = a["input"], a["dim"], a["unbiased"]
    if isinstance(dim, bool):  # x.var(False): not a dim
        dim, unbiased = None, dim
    less = 1 if a["correction"] is None else a["correction"]
    less = less if unbiased is None else int(unbiased)

    def work(t: Tensor, left: Strip, a: dict[str, Any]) -> Any:
        cells = _cells(ask, x, left)
        mean = left.sum(t) / cells
        y = left.sum((t - mean[left.here]) ** 2) / max(cells - less, 0)
        y = _root(y) if ask.name.startswith("std") else y
        return (y, mean) if ask.name.endswith("mean") else y

    return along(ask, _variance, a, dim, work)


def _root(x: Tensor) -> Tensor:
    """Without a gradient where it is 0, as ATen has it for deviations."""
    none = x == 0
    return torch.where(none, 0.0, torch.where(none, 1.0, x).sqrt())


# --- norms ----------------------------------------------------------------------------------------


def _norm(
    input: Any, p: Any = 2, dim: Any = None, keepdim: bool = False, out: Any = None,
    dtype: Any = None,
) -> None: ...  # fmt: skip


def _vector_norm(
    input: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None,
    out: Any = None,
) -> None: ...  # fmt: skip


@rule(("norm",))
def norm(ask: Ask) -> Rule:
    """`torch.norm` and `Tensor.norm`, as in the global response norm of ConvNeXt V2."""
    a = ask.named(_norm)
    order = 2 if a["p"] is None or a["p"] == "fro" else a["p"]
    return _p_norm(ask, _norm, a, order)


@rule(("linalg_vector_norm", "vector_norm"))
def vector_norm(ask: Ask) -> Rule:
    a = ask.named(_vector_norm)
    return _p_norm(ask, _vector_norm, a, a["ord"])


def _p_norm(ask: Ask, stub: Run, a: dict[str, Any], order: Any) -> Rule:
    if order not in (1, 2) or a["out"] is not None or a["dtype"] is not None:
        raise NotTileable(f"takes a norm of order {order!r} along cut dims")

    def work(t: Tensor, left: Strip, a: dict[str, Any]) -> Tensor:
        return left.sum(t.abs()) if order == 1 else _root(left.sum(t * t))

    return along(ask, stub, a, a["dim"], work)


# --- maxima ---------------------------------------------------------------------------------------


@rule(("amax", "amin", "max", "min"))
def extreme(ask: Ask) -> Rule:
    if ask.call.pointwise:  # of two tensors, cell by cell
        return pointwise(ask)
    a = ask.named(_reduce)
    sign = 1 if ask.name.endswith("max") else -1
    most = _first_most if len(ask.call.writes) > 1 else _most

    if ask.values[a["input"].name].dtype == "bool":
        raise NotTileable("compares flags; take the sum of them")

    def work(t: Tensor, left: Strip, a: dict[str, Any]) -> Any:
        signed = sign * (t if t.is_floating_point() else t.long())
        found = most(signed, left)
        if isinstance(found, tuple):
            return (sign * found[0]).to(t.dtype), found[1]
        return (sign * found).to(t.dtype)

    return along(ask, _reduce, a, a["dim"] if a["axis"] is None else a["axis"], work)


NOWHERE = 1 << 40  # a place behind the end of any dim


def _lowest(t: Tensor) -> Any:
    return -torch.inf if t.is_floating_point() else torch.iinfo(t.dtype).min


def _length_one(t: Tensor, dims: tuple[int, ...]) -> list[int]:
    return [1 if d in dims else n for d, n in enumerate(t.shape)]


def _most(t: Tensor, left: Strip) -> Tensor:
    """The largest; like ATen's amax, all cells that are as large share its gradient."""
    dims, low = left.dims, _lowest(t)
    with torch.no_grad():
        nothing = t.new_full(_length_one(t, dims), low)
        mine = t.amax(dims, keepdim=True) if t.numel() else nothing
        best = left.rows(mine, low).amax(0)
        if not t.is_floating_point():
            return best
        equal = t == best[left.here]
        share = 1 / left.count(equal.to(t.dtype))[left.here]
    # The value itself exactly; the sum over equal shares only carries the gradient.
    found = left.sum(torch.where(equal, t, 0.0) * share)
    return torch.where(best.isinf(), best, best + (found - found.detach()))


def _first_most(t: Tensor, left: Strip) -> tuple[Tensor, Tensor]:
    """The largest along one dim and where it is; of equal ones the first."""
    (dim,), low = left.dims, _lowest(t)
    if t.shape[dim]:
        value, at = t.max(dim, keepdim=True)
    else:
        value = t.new_full(_length_one(t, left.dims), low) + 0 * t.sum()
        at = torch.full(value.shape, NOWHERE, device=t.device)
    at = at + left.own.start[dim]
    with torch.no_grad():
        values, places = left.rows(value.detach(), low), left.rows(at, NOWHERE)
        best = values.amax(0)
        first = torch.where(values == best, places, NOWHERE).amin(0)
        mine = (value == best[left.here]) & (at == first[left.here])
    return left.sum(torch.where(mine, value, 0)), first
