"""Reductions along tiled dims: sums, means, variances, maxima.

Each rank reduces its own cells, an all-reduce joins the parts, and every rank has the whole result,
also where only some of the tiled dims are gone: what is left is small beside the image. From there
on all ranks compute the same. Each rank has a part of the gradient, and the adjoint of the
all-reduce sums the parts.
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
from gems.torch.spatial.group import AllReduce, SpatialGroup
from gems.torch.spatial.moments import Moments
from gems.torch.spatial.op import NotTileable, Op, Run
from gems.torch.spatial.rule import OWN, Rule, Split, rule, unchanged
from gems.torch.spatial.rules.elementwise import pointwise
from gems.torch.spatial.tile import Tile

Tensor = torch.Tensor


def all_reduced(
    op: Op, bind: Callable[[Tile], Run], *, additive: bool = False, split: Split | None = None
) -> Rule:
    """Every rank brings its own cells of each tiled input; the results are whole."""
    whole = sum(prod(op.shape(name)) for name in op.call.writes)
    windows = dict.fromkeys(op.tiled, OWN)
    return Rule({}, windows, bind, sums=whole, additive=additive, split=split)


@dataclass(frozen=True)
class PartialReduction:
    """A tiled tensor reduced along `dims`, and this rank's part of it.

    ::

        ┌───┬───┐                 ┌─┐ here: the rows of tile 0, and of
        │ 0 │ 1 │   sum along W   │▒│       tile 1 as well; below them
        ├───┼───┤  ────────────>  ├─┤       zeros, until all parts are
        │ 2 │ 3 │                 │0│       summed
        └───┴───┘                 └─┘
    """

    group: SpatialGroup
    own: Box
    dims: tuple[int, ...]
    pads: list[int]  # around this rank's part, as F.pad has them
    here: tuple[slice, ...]

    def padded(self, part: Tensor, fill: float = 0.0) -> Tensor:
        return F.pad(part, self.pads, value=fill) if any(self.pads) else part.contiguous()

    def all_gather(self, part: Tensor, fill: float) -> Tensor:
        """The parts of all ranks, stacked."""
        return torch.stack(self.group.all_gather(self.padded(part, fill)))

    def sum(self, x: Tensor) -> Tensor:
        """Over `dims` of all ranks' cells; the dims stay, of length 1."""
        part = self.padded(x.sum(self.dims, keepdim=True))
        return AllReduce.apply(part, self.group)  # type: ignore[no-any-return]

    def count(self, x: Tensor) -> Tensor:
        """The same, without a gradient."""
        return self.group.all_reduce(self.padded(x.sum(self.dims, keepdim=True)))


def partial_reduction(
    tile: Tile, name: str, layout: Layout, dims: tuple[int, ...]
) -> PartialReduction:
    own, pads, here = tile.own(name), list[int](), list[slice]()
    for dim in range(len(layout.shape)):
        low, high = (0, 1) if dim in dims else (own.start[dim], own.stop[dim])
        pads = [low, (1 if dim in dims else layout.shape[dim]) - high, *pads]
        here.append(slice(low, high))
    return PartialReduction(tile.group, own, dims, pads, tuple(here))


Work = Callable[[Tensor, PartialReduction, dict[str, Any]], Any]


@dataclass(frozen=True)
class InTwo:
    """A reduction in two parts (rule.py, `Split`): `work` gives the summand of a tile's own cells,
    with all dims, and `finish` makes the results of their sum."""

    work: Callable[[Tensor, PartialReduction, Tensor | None], Tensor]
    finish: Callable[[Tensor], Any]
    dtype: str
    moments: bool = False


def along(
    op: Op, stub: Run, a: dict[str, Any], dim: Any, work: Work, *, additive: bool = False,
    in_two: InTwo | None = None,
) -> Rule:  # fmt: skip
    """`work` on a rank's own cells if a tiled dim is among `dim`; its results have all dims."""
    x, layout = a["input"], op.primary(a["input"])
    rank, keep = len(layout.shape), bool(a["keepdim"])
    chosen = (dim,) if isinstance(dim, int) else tuple(dim or range(rank))
    dims = tuple(sorted(d % rank for d in chosen))
    if not set(dims) & set(layout.dims):
        return unchanged(
            op, x, [d - (0 if keep else sum(r < d for r in dims)) for d in layout.dims]
        )

    def shaped(found: Any) -> Any:
        if isinstance(found, tuple):
            return tuple(map(shaped, found))
        return found if keep else found.squeeze(dims)

    def bind(tile: Tile) -> Run:
        with_halo, left = tile.with_halo(x), partial_reduction(tile, x.name, layout, dims)
        return tile.named(stub, lambda a: shaped(work(with_halo(a["input"]), left, a)))

    def part(tile: Tile) -> Run:
        with_halo, left = tile.with_halo(x), partial_reduction(tile, x.name, layout, dims)

        def summand(a: dict[str, Any]) -> tuple[Tensor]:
            assert in_two is not None
            return (in_two.work(with_halo(a["input"]), left, tile.known_sums()),)

        return tile.named(stub, summand)

    def finish(sums: tuple[Tensor], *args: Any, **kwargs: Any) -> Any:
        assert in_two is not None
        return shaped(in_two.finish(sums[0]))

    split = None
    if in_two is not None:
        size = tuple(1 if d in dims else n for d, n in enumerate(layout.shape))
        size = (3, *size) if in_two.moments else size
        split = Split(((size, in_two.dtype),), part, finish, moments=in_two.moments)
    return all_reduced(op, bind, additive=additive, split=split)


# --- sums and means -------------------------------------------------------------------------------


def _reduce(
    input: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None, axis: Any = None
) -> None: ...


def _cells(op: Op, x: Any, left: PartialReduction) -> int:
    return prod(op.shape(x)[d] for d in left.dims)


@rule(("sum", "mean"))
def total(op: Op) -> Rule:
    a = op.named(_reduce)
    x = a["input"]

    def work(t: Tensor, left: PartialReduction, a: dict[str, Any]) -> Tensor:
        y = left.sum(t if a["dtype"] is None else t.to(a["dtype"]))
        return y / _cells(op, x, left) if op.name == "mean" else y

    dim = a["dim"] if a["axis"] is None else a["axis"]
    return along(op, _reduce, a, dim, work, additive=True)


def _variance(
    input: Any, dim: Any = None, unbiased: Any = None, keepdim: bool = False,
    correction: Any = None,
) -> None: ...  # fmt: skip


@rule(("var", "std", "var_mean", "std_mean"))
def variance(op: Op) -> Rule:
    """The mean first, then the squares of what differs from it."""
    a = op.named(_variance)
    x, dim, unbiased = a["input"], a["dim"], a["unbiased"]
    if isinstance(dim, bool):  # x.var(False): not a dim
        dim, unbiased = None, dim
    less = 1 if a["correction"] is None else a["correction"]
    less = less if unbiased is None else int(unbiased)

    def work(t: Tensor, left: PartialReduction, a: dict[str, Any]) -> Any:
        cells = _cells(op, x, left)
        mean = left.sum(t) / cells
        return finished(left.sum((t - mean[left.here]) ** 2), mean, cells)

    def finished(square: Tensor, mean: Tensor, cells: int) -> Any:
        y = square / max(cells - less, 0)
        y = _root(y) if op.name.startswith("std") else y
        return (y, mean) if op.name.endswith("mean") else y

    def part(t: Tensor, left: PartialReduction, known: Tensor | None) -> Tensor:
        return Moments.apply(t, ReducedMoments(left), known)  # type: ignore[no-any-return]

    def finish(moments: Tensor) -> Any:
        kind, rank = getattr(torch, op.values[op.call.writes[0]].dtype), len(op.shape(x))
        chosen = range(rank) if dim is None else (dim,) if isinstance(dim, int) else dim
        cells = prod(op.shape(x)[d] for d in {d % rank for d in chosen} or range(rank))
        return finished(moments[2].to(kind), moments[1].to(kind), cells)

    in_two = InTwo(part, finish, "float64", moments=True)
    return along(op, _variance, a, dim, work, in_two=in_two)


@dataclass(frozen=True)
class ReducedMoments:
    """The moments of a tile along some dims; where the tile has no cells, of nothing."""

    left: PartialReduction

    def measure(self, x: Tensor) -> Tensor:
        dims = self.left.dims
        wide = x.double()
        count = max(prod(x.shape[d] for d in dims), 1)
        mean = wide.sum(dims, keepdim=True) / count
        square = ((wide - mean) ** 2).sum(dims, keepdim=True)
        cells = torch.full_like(mean, prod(x.shape[d] for d in dims))
        return torch.stack([self.left.padded(t) for t in (cells, mean, square)])

    def spread(self, numbers: Tensor, x: Tensor) -> Tensor:
        return numbers[self.left.here].to(x.dtype)


def _root(x: Tensor) -> Tensor:
    """The square root, with gradient 0 where it is 0, as in ATen."""
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
def norm(op: Op) -> Rule:
    """`torch.norm` and `Tensor.norm`, as in the global response norm of ConvNeXt V2."""
    a = op.named(_norm)
    order = 2 if a["p"] is None or a["p"] == "fro" else a["p"]
    return _p_norm(op, _norm, a, order)


@rule(("linalg_vector_norm", "vector_norm"))
def vector_norm(op: Op) -> Rule:
    a = op.named(_vector_norm)
    return _p_norm(op, _vector_norm, a, a["ord"])


def _p_norm(op: Op, stub: Run, a: dict[str, Any], order: Any) -> Rule:
    if order not in (1, 2) or a["out"] is not None or a["dtype"] is not None:
        raise NotTileable(f"takes a norm of order {order!r} along tiled dims")

    def work(t: Tensor, left: PartialReduction, a: dict[str, Any]) -> Tensor:
        return left.sum(t.abs()) if order == 1 else _root(left.sum(t * t))

    def part(t: Tensor, left: PartialReduction, known: Tensor | None) -> Tensor:
        powers = t.abs() if order == 1 else t * t
        return left.padded(powers.sum(left.dims, keepdim=True))

    def finish(total: Tensor) -> Tensor:
        return total if order == 1 else _root(total)

    in_two = InTwo(part, finish, op.values[op.out].dtype)
    return along(op, stub, a, a["dim"], work, in_two=in_two)


# --- maxima ---------------------------------------------------------------------------------------


@rule(("amax", "amin", "max", "min"))
def extreme(op: Op) -> Rule:
    if op.call.pointwise:  # of two tensors, cell by cell
        return pointwise(op)
    a = op.named(_reduce)
    sign = 1 if op.name.endswith("max") else -1
    most = _first_most if len(op.call.writes) > 1 else _most

    if op.values[a["input"].name].dtype == "bool":
        raise NotTileable("compares flags; take the sum of them")

    def work(t: Tensor, left: PartialReduction, a: dict[str, Any]) -> Any:
        signed = sign * (t if t.is_floating_point() else t.long())
        found = most(signed, left)
        if isinstance(found, tuple):
            return (sign * found[0]).to(t.dtype), found[1]
        return (sign * found).to(t.dtype)

    return along(op, _reduce, a, a["dim"] if a["axis"] is None else a["axis"], work)


NOWHERE = 1 << 40  # a place behind the end of any dim


def _lowest(t: Tensor) -> Any:
    return -torch.inf if t.is_floating_point() else torch.iinfo(t.dtype).min


def _length_one(t: Tensor, dims: tuple[int, ...]) -> list[int]:
    return [1 if d in dims else n for d, n in enumerate(t.shape)]


def _most(t: Tensor, left: PartialReduction) -> Tensor:
    """The largest; like ATen's amax, all cells that are as large share its gradient."""
    dims, low = left.dims, _lowest(t)
    with torch.no_grad():
        nothing = t.new_full(_length_one(t, dims), low)
        mine = t.amax(dims, keepdim=True) if t.numel() else nothing
        best = left.all_gather(mine, low).amax(0)
        if not t.is_floating_point():
            return best
        equal = t == best[left.here]
        share = 1 / left.count(equal.to(t.dtype))[left.here]
    # The value itself exactly; the sum over equal shares only carries the gradient.
    found = left.sum(torch.where(equal, t, 0.0) * share)
    return torch.where(best.isinf(), best, best + (found - found.detach()))


def _first_most(t: Tensor, left: PartialReduction) -> tuple[Tensor, Tensor]:
    """The largest along one dim and where it is; of equal ones the first."""
    (dim,), low = left.dims, _lowest(t)
    if t.shape[dim]:
        value, at = t.max(dim, keepdim=True)
    else:
        value = t.new_full(_length_one(t, left.dims), low) + 0 * t.sum()
        at = torch.full(value.shape, NOWHERE, device=t.device)
    at = at + left.own.start[dim]
    with torch.no_grad():
        values, places = left.all_gather(value.detach(), low), left.all_gather(at, NOWHERE)
        best = values.amax(0)
        first = torch.where(values == best, places, NOWHERE).amin(0)
        mine = (value == best[left.here]) & (at == first[left.here])
    return left.sum(torch.where(mine, value, 0)), first
