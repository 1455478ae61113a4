"""Losses of cells: their sum over all ranks, or one number per cell."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from gems.geometry.box import Box
from gems.geometry.layout import Layout
from gems.torch.spatial.group import AllReduce
from gems.torch.spatial.op import NotTileable, Op, Run
from gems.torch.spatial.rule import Rule, Split, rule, same
from gems.torch.spatial.rules.elementwise import part_of, pointwise
from gems.torch.spatial.rules.reductions import all_reduced
from gems.torch.spatial.tile import Tile
from gems.torch.tracing.calls import Attr, Ref

Tensor = torch.Tensor


def _cross_entropy(
    input: Any, target: Any, weight: Any = None, size_average: Any = None,
    ignore_index: int = -100, reduce: Any = None, reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> None: ...  # fmt: skip


CROSS_ENTROPY = ("weight", "ignore_index", "reduction", "label_smoothing")


@rule(("cross_entropy", "nll_loss", "nll_loss_nd"), (nn.CrossEntropyLoss, nn.NLLLoss))
def cross_entropy(op: Op) -> Rule:
    """Sums over own cells, divided by the weight of all cells that count; or a map of losses."""
    a: dict[str, Any] = {"label_smoothing": 0.0, "size_average": None, "reduce": None}
    a |= op.named(_cross_entropy, CROSS_ENTROPY)
    x, target = a["input"], a["target"]
    layout = op.primary_of(x)
    if 1 in layout.dims:
        raise NotTileable("compares classes, which are tiled")
    if a["size_average"] is not None or a["reduce"] is not None:
        raise NotTileable("uses size_average or reduce; use reduction")
    soft = op.shape(target) == layout.shape
    _same_cells(op, target, layout, soft)
    if a["reduction"] == "none":
        return _each_pixel(op, x, target, layout)
    likely = op.name.startswith("nll") or isinstance(op.module, nn.NLLLoss)
    return _Entropy(op, x, target, a["reduction"], soft, likely).rule()


@dataclass(frozen=True)
class _Entropy:
    """A cross-entropy that gives one number."""

    op: Op
    x: Any
    target: Any
    reduction: str
    soft: bool
    likely: bool

    def rule(self) -> Rule:
        kind = self.op.values[self.op.out].dtype
        split = Split((((), kind), ((), "float64")), self._part, self._finish, early=self._early)
        return all_reduced(self.op, self._bind, split=split)

    def _bind(self, tile: Tile) -> Run:
        sums = self._sums(tile)

        def work(a: dict[str, Any]) -> Tensor:
            part, heavy = sums(a)
            found = AllReduce.apply(part, tile.group)
            return self._of(found, heavy if heavy is None else tile.group.all_reduce(heavy))

        return tile.named(_cross_entropy, work, *CROSS_ENTROPY)

    def _part(self, tile: Tile) -> Run:
        sums = self._sums(tile)

        def summands(a: dict[str, Any]) -> tuple[Tensor, Tensor]:
            part, heavy = sums(a)
            return part, torch.zeros_like(part).double() if heavy is None else heavy

        return tile.named(_cross_entropy, summands, *CROSS_ENTROPY)

    def _early(self, tile: Tile) -> Run:
        target_with_halo = tile.with_halo(self.target)

        def count(a: dict[str, Any]) -> tuple[Tensor]:
            y = target_with_halo(a["target"])
            heavy = self._heavy(y, a)
            return (y.new_zeros((), dtype=torch.float64) if heavy is None else heavy,)

        return tile.named(_cross_entropy, count, *CROSS_ENTROPY)

    def _finish(self, sums: tuple[Tensor, Tensor], *args: Any, **kwargs: Any) -> Tensor:
        return self._of(*sums).to(sums[0].dtype)

    def _of(self, losses: Tensor, heavy: Tensor | None) -> Tensor:
        """The result, of the sums over all cells."""
        if self.reduction == "sum":
            return losses
        shape = self.op.shape(self.x)
        return losses / (shape[0] * prod(shape[2:]) if self.soft else heavy)  # type: ignore

    def _sums(self, tile: Tile) -> Callable[[dict[str, Any]], tuple[Tensor, Tensor | None]]:
        """Over own cells: the losses, and the weight of those that count if that is not known."""
        with_halo, target_with_halo = tile.with_halo(self.x), tile.with_halo(self.target)
        empty = tile.own(self.x.name).empty
        kind = getattr(torch, self.op.values[self.op.out].dtype)

        def sums(a: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
            t, y, weight = with_halo(a["input"]), target_with_halo(a["target"]), a["weight"]
            options = {"weight": weight, "ignore_index": a["ignore_index"], "reduction": "sum"}
            if empty:
                part = 0 * t.sum()
            elif self.likely:
                part = F.nll_loss(t, y, **options)
            else:
                smooth = a.get("label_smoothing", 0.0)
                part = F.cross_entropy(t, y, **options, label_smoothing=smooth)
            # A rank without cells has not been through autocast: all must send the same type.
            return part.to(kind), self._heavy(y, a)

        return sums

    def _heavy(self, y: Tensor, a: dict[str, Any]) -> Tensor | None:
        """The weight of the cells that count."""
        if self.soft or self.reduction == "sum":
            return None
        counted, weight = y != a["ignore_index"], a["weight"]
        if weight is None:
            heavy = counted.sum()
        else:
            heavy = torch.where(counted, weight[torch.where(counted, y, 0)], 0.0).sum()
        # Counted exactly: bfloat16 knows no 257.
        return heavy.detach().to(torch.float64)


def _each_pixel(op: Op, x: Ref, target: Ref, layout: Layout) -> Rule:
    """A loss for each pixel, cut like the pixels."""
    windows = same(layout)

    def bind(tile: Tile) -> Run:
        return tile.mapped(tile.original, tile.with_halo)

    out = layout.follow(op.shape(op.out), [d - (d > 1) for d in layout.dims], windows)
    return Rule({op.out: out}, {x.name: windows, target.name: windows}, bind)


def _same_cells(op: Op, target: Any, layout: Layout, alike: bool) -> None:
    """A target must be cut like what it is compared with."""
    other = op.layout(target)
    wanted = layout.dims if alike else tuple(d - (d > 1) for d in layout.dims)
    if other is None or other.dims != wanted or other.own != layout.own:
        raise NotTileable(
            f"compares {layout.shape} with {op.shape(target)}, which does not have the same cells"
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
def elementwise(op: Op) -> Rule:
    """A loss per cell: summed over own cells, then over the ranks; or as it is."""
    how = getattr(op.module, "reduction", None) or op.call.kwargs.get("reduction", "mean")
    old = [op.call.kwargs.get(k) for k in ("size_average", "reduce")]
    if any(k is not None for k in old):
        raise NotTileable("uses size_average or reduce; use reduction")
    if how == "none":
        return pointwise(op, _each_cell)
    layout = op.layouts[op.tiled[0]]
    for name in op.tiled:
        other = op.layouts[name]
        if other.shape != layout.shape or other.own != layout.own or other.dims != layout.dims:
            raise NotTileable(
                f"compares {layout.shape} with {other.shape}, which is not tiled like it; use "
                "reduction='none', then take the mean"
            )
    share = {"mean": prod(layout.shape), "sum": 1, "batchmean": layout.shape[0]}[how]

    def bind(tile: Tile) -> Run:
        box = tile.own(op.tiled[0])

        def change(place: Ref | Attr | Tensor) -> Callable[[Tensor], Tensor]:
            if isinstance(place, Ref) and place.name in op.layouts:
                return tile.with_halo(place)
            return part_of(op.shape(place), box, layout.dims)

        def work(*args: Any, **kwargs: Any) -> Tensor:
            if op.module is not None:
                cells = _each(op.module, args, kwargs, box, layout.dims)
            else:
                assert op.call.function is not None
                cells = op.call.function(*args, **{**kwargs, "reduction": "none"})
            return AllReduce.apply(cells.sum(), tile.group) / share  # type: ignore[no-any-return]

        return tile.mapped(work, change)

    return all_reduced(op, bind, additive=True)


def _each_cell(tile: Tile) -> Run:
    module, box, dims = tile.op.module, tile.out(), tile.layouts[tile.op.out].dims
    if module is None:
        return tile.original
    return lambda *args, **kwargs: _each(module, args, kwargs, box, dims)


def _each(module: Any, args: Any, kwargs: Any, box: Box, dims: tuple[int, ...]) -> Tensor:
    """The loss of every cell, by a loss module with settings of its own. By a copy: ranks that are
    threads share the user's."""
    alone = copy(module)
    alone.reduction = "none"
    alone._buffers = {
        name: None if b is None else part_of(tuple(b.shape), box, dims)(b)
        for name, b in module._buffers.items()
    }
    return alone(*args, **kwargs)  # type: ignore[no-any-return]
