"""Norms of a tiled tensor: statistics over all tiles, each cell counted once.

BatchNorm, GroupNorm and InstanceNorm are one computation here. They differ in which channels of
which samples share a mean and a variance (`Sharing`). Forward all-gathers each rank's mean and sum
of squares once; backward all-reduces two sums per statistic.

[Note: overlapping tiles] Statistics count a rank's own cells only, which are disjoint. What a rank
computes beside them (d2 halos) is normalised as well. Each copy of a cell gets the gradient of what
its rank made of it, so sums over all cells of a rank, summed over the ranks, are right. The
gradient of the statistics themselves enters at own cells only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from gems.geometry.box import Box
from gems.torch.spatial.group import AllReduce
from gems.torch.spatial.moments import (
    Moments,
    NormTile,
    SharedMoments,
    Sharing,
    Standardise,
    every,
    rows,
    statistics,
)
from gems.torch.spatial.op import NotTileable, Op, Run, named
from gems.torch.spatial.rule import Rule, Split, one_input, rule, unchanged
from gems.torch.spatial.tile import Tile
from gems.torch.tensors.memory_format import formatted_like
from gems.torch.tensors.strides import packed

Tensor = torch.Tensor


class Normalise(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps) * weight + bias, the statistics being functions of x."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor,
        variance: Tensor, eps: float, tile: NormTile,
    ) -> Tensor:  # fmt: skip
        ctx.tile, ctx.eps, ctx.biased = tile, eps, bias is not None
        ctx.set_materialize_grads(False)  # [Note: no gradient on tiles]
        ctx.save_for_backward(x, weight, mean, variance)
        sharing = tile.sharing
        if not x.numel():
            return torch.empty_like(x)
        y = F.batch_norm(
            rows(x), sharing.spread(mean), sharing.spread(variance), every(weight, sharing),
            every(bias, sharing), False, 0.0, eps,
        )  # fmt: skip
        y = y.resize_(x.shape)  # not a view, so that it may be changed in place
        return formatted_like(y, x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # type: ignore[override]
        if gradients[0] is None:
            return (None,) * 7
        x, weight, mean, variance = ctx.saved_tensors
        tile, g, sharing = ctx.tile, gradients[0], ctx.tile.sharing
        if not x.numel():  # nothing to add, but the others wait
            tile.group.all_reduce(torch.zeros_like(torch.stack((mean, mean))))
            none = None if weight is None else torch.zeros_like(weight)
            return torch.zeros_like(x), none, none if ctx.biased else None, None, None, None, None
        w = every(weight, sharing)
        if w is None:
            w = sharing.spread(torch.ones_like(mean))
        # Per (sample, channel): dw = sum of g (x - mean) / deviation, db = sum of g.
        _, dw, db = torch.ops.aten.native_batch_norm_backward(
            rows(g), rows(x), w, sharing.spread(mean), sharing.spread(variance), None, None,
            False, ctx.eps, [False, True, True],
        )  # fmt: skip
        grad_weight = None if weight is None else dw.view(sharing.samples, -1).sum(0)
        grad_bias = db.view(sharing.samples, -1).sum(0) if ctx.biased else None
        sums = tile.group.all_reduce(torch.stack((sharing.gather(dw * w), sharing.gather(db * w))))
        invert = torch.rsqrt(variance + ctx.eps)
        slope = -invert * invert * sums[0] / tile.cells
        shift = -invert * sums[1] / tile.cells - slope * mean
        dx = _combined(x, g, sharing.spread(invert) * w, slope, shift, tile)
        return formatted_like(dx, x), grad_weight, grad_bias, None, None, None, None


def _combined(
    x: Tensor, g: Tensor, scale: Tensor, slope: Tensor, shift: Tensor, tile: NormTile
) -> Tensor:
    """scale g + slope x + shift; the last two, which come from the statistics, at own cells."""
    spread = tile.sharing.spread
    here = tile.inner is None
    zero, one = torch.zeros_like(scale), torch.ones_like(scale)
    bias = spread(shift) if here else zero
    dx = F.batch_norm(rows(g), zero, one, scale, bias, False, 0.0, 0.0)  # scale g + bias
    dx = dx.resize_(x.shape)
    columns = (*x.shape[:2], *(1,) * (x.dim() - 2))
    inner = ... if here else tile.inner
    own = dx[inner].addcmul_(x[inner], spread(slope).view(columns).to(x.dtype))
    if not here:
        own.add_(spread(shift).view(columns).to(x.dtype))
    return dx


# --- the rules ----------------------------------------------------------------------------------


def _batch_norm(
    input: Any, running_mean: Any = None, running_var: Any = None, weight: Any = None,
    bias: Any = None, training: bool = False, momentum: Any = 0.1, eps: float = 1e-5,
) -> None: ...  # fmt: skip


BATCH_NORM = ("running_mean", "running_var", "weight", "bias", "momentum", "eps")


@rule(("batch_norm",), (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d))
def batch_norm(op: Op) -> Rule:
    a = op.named(_batch_norm, BATCH_NORM)
    if isinstance(op.module, _BatchNorm):
        training = op.module.training or op.module.running_mean is None
    else:
        training = a["training"]
    if not training:
        return unchanged(op, a["input"])

    def remember(a: dict[str, Any], mean: Tensor, variance: Tensor, cells: int) -> None:
        if op.module is not None:
            _remember(op.module, mean, variance, cells)
        elif a["running_mean"] is not None:
            _average(a["running_mean"], a["running_var"], mean, variance, cells, a["momentum"])

    return normalised(op, a["input"], 0, _batch_norm, BATCH_NORM, remember)


def _remember(module: Any, mean: Tensor, variance: Tensor, cells: int) -> None:
    """Running averages, as BatchNorm keeps them; the same on every rank."""
    if not module.training or module.running_mean is None:
        return
    module.num_batches_tracked.add_(1)
    part = module.momentum
    if part is None:
        part = 1.0 / float(module.num_batches_tracked)
    _average(module.running_mean, module.running_var, mean, variance, cells, part)


def _average(
    means: Tensor, variances: Tensor, mean: Tensor, variance: Tensor, cells: int, part: float
) -> None:
    """Running averages take a part of what was seen; of the variance, the unbiased one."""
    with torch.no_grad():
        unbiased = variance * (cells / max(cells - 1, 1))
        means.mul_(1 - part).add_(mean.to(means), alpha=part)
        variances.mul_(1 - part).add_(unbiased.to(variances), alpha=part)


def _group_norm(
    input: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> None: ...


GROUP_NORM = ("num_groups", "weight", "bias", "eps")


@rule(("group_norm",), (nn.GroupNorm,))
def group_norm(op: Op) -> Rule:
    a = op.named(_group_norm, GROUP_NORM)
    return normalised(op, a["input"], a["num_groups"], _group_norm, GROUP_NORM)


def _instance_norm(
    input: Any, running_mean: Any = None, running_var: Any = None, weight: Any = None,
    bias: Any = None, use_input_stats: bool = True, momentum: Any = 0.1, eps: float = 1e-5,
) -> None: ...  # fmt: skip


@rule(("instance_norm",), (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d))
def instance_norm(op: Op) -> Rule:
    a = op.named(_instance_norm, BATCH_NORM)
    module = op.module
    if isinstance(module, _InstanceNorm):
        if not module.training and module.track_running_stats:
            return unchanged(op, a["input"])
    elif not a["use_input_stats"]:
        return unchanged(op, a["input"])
    elif a["running_mean"] is not None:
        raise NotTileable("keeps running statistics by itself; use nn.InstanceNorm")
    channels = op.shape(a["input"])[1]

    def remember(a: dict[str, Any], mean: Tensor, variance: Tensor, cells: int) -> None:
        if isinstance(module, _InstanceNorm) and module.training and module.track_running_stats:
            _remember_instances(module, mean, variance, cells, channels)

    return normalised(op, a["input"], channels, _instance_norm, BATCH_NORM, remember)


def _remember_instances(
    module: Any, mean: Tensor, variance: Tensor, cells: int, channels: int
) -> None:
    """The running averages of instance norm take the mean over the samples."""
    if module.momentum is None or module.running_mean is None:
        return
    mean, variance = (t.view(-1, channels).mean(0) for t in (mean, variance))
    running = (module.running_mean, module.running_var)
    _average(*running, mean, variance, cells, module.momentum)


def _forget(a: dict[str, Any], mean: Tensor, variance: Tensor, cells: int) -> None:
    """Of most norms nothing is kept."""


Remember = Callable[[dict[str, Any], Tensor, Tensor, int], None]


def normalised(
    op: Op, x: Any, groups: int, stub: Run, attributes: Sequence[str], remember: Remember = _forget
) -> Rule:
    """A norm over samples or groups of channels. Whole samples on one rank need no exchange.
    `remember` is given the arguments, means, variances and the number of cells, once."""
    layout = op.primary(x)
    if groups and 0 in layout.dims and getattr(op.module, "track_running_stats", False):
        raise NotTileable("keeps running statistics of samples that several ranks have")
    if groups and layout.dims == (0,):
        return unchanged(op, x)  # every sample is whole

    def bind(tile: Tile) -> Run:
        with_halo = tile.with_halo(x)
        at = tile.wanted(x.name)
        here = _norm_tile(tile, x.name, at, groups)
        dtype = getattr(torch, op.values[op.out].dtype)

        def run(a: dict[str, Any]) -> Tensor:
            # Autocast takes some norms in float32, as the recording shows.
            t = packed(with_halo(a["input"]).to(dtype))
            with torch.no_grad():
                mean, variance = statistics(t, here)
            remember(a, mean, variance, here.cells)
            return Normalise.apply(  # type: ignore[no-any-return]
                t, a["weight"], a["bias"], mean, variance, a["eps"], here
            )

        return tile.named(stub, run, *attributes)

    samples, channels = layout.shape[:2]
    split = None if 0 in layout.dims else _split(op, x, groups, stub, attributes, remember)
    sums = 2 * (samples * groups or channels)
    return replace(one_input(op, x, bind), sums=sums, split=split)


def _split(
    op: Op, x: Any, groups: int, stub: Run, attributes: Sequence[str], remember: Remember
) -> Split:
    """Moments of each tile; running statistics; then each tile, given the moments of all."""
    dtype = getattr(torch, op.values[op.out].dtype)
    shape = op.shape(x)
    shared = SharedMoments(Sharing(shape[0], shape[1], groups))
    cells = prod(shape) // shared.size

    def part(tile: Tile) -> Run:
        with_halo, arguments = tile.with_halo(x), tile.named(stub, dict, *attributes)

        def run(*args: Any, **kwargs: Any) -> tuple[Tensor]:
            t, known = with_halo(arguments(*args, **kwargs)["input"]).to(dtype), tile.known_sums()
            return (Moments.apply(packed(t) if known is None else t, shared, known),)

        return run

    def finish(sums: tuple[Tensor], *args: Any, **kwargs: Any) -> Tensor:
        (moments,) = sums
        with torch.no_grad():
            a = named(stub, op.module, attributes, args, kwargs)
            remember(a, moments[1], moments[2] / cells, cells)
        return moments

    def rest(tile: Tile) -> Run:
        with_halo, arguments = tile.with_halo(x), tile.named(stub, dict, *attributes)

        def run(moments: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            a = arguments(*args, **kwargs)
            t = packed(with_halo(a["input"]).to(dtype))
            return Standardise.apply(  # type: ignore[no-any-return]
                t, moments, a["weight"], a["bias"], a["eps"], shared.sharing
            )

        return run

    sums = ((3, shared.size), "float64")
    return Split((sums,), part, finish, rest, moments=True, relative=True)


def _norm_tile(tile: Tile, name: str, at: Box, groups: int) -> NormTile:
    own = tile.layouts[name].own_boxes()
    mine = own[tile.group.me]
    inner = None
    if mine.empty:  # but it may compute cells for others
        inner = tuple(slice(0, n) for n in mine.shape)
    elif mine != at:
        inner = mine.relative_to(at).slices()
    samples, channels = at.shape[:2]
    counts = []
    for box in own:
        if groups:
            counts.append(box.size // max(box.shape[0] * box.shape[1], 1) * (channels // groups))
        else:
            counts.append(box.size // max(channels, 1))
    return NormTile(tile.group, Sharing(samples, channels, groups), inner, tuple(counts))


def _layer_norm(
    input: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> None: ...


LAYER_NORM = ("normalized_shape", "weight", "bias", "eps")


@rule(("layer_norm",), (nn.LayerNorm,))
def layer_norm(op: Op) -> Rule:
    """Over trailing dims: local if none is tiled; else sums, and weights cut like the cells."""
    a = op.named(_layer_norm, LAYER_NORM)
    x, layout = a["input"], op.primary(a["input"])
    trailing = len(a["normalized_shape"])
    first = len(layout.shape) - trailing
    if all(dim < first for dim in layout.dims):
        return unchanged(op, x)
    if any(dim < first for dim in layout.dims):
        raise NotTileable("normalises over some, but not all, of the dims that are tiled")
    dims = tuple(range(first, len(layout.shape)))
    cells = prod(layout.shape[first:])

    def bind(tile: Tile) -> Run:
        with_halo = tile.with_halo(x)
        at, own = tile.wanted(x.name), tile.own(x.name)
        inner = own.relative_to(at).slices() if not own.empty else None
        here = tuple(at.slices()[first:])

        def work(a: dict[str, Any]) -> Tensor:
            t = with_halo(a["input"])
            part = t[inner] if inner is not None else t[:, :0].sum() * 0 + t.new_zeros(own.shape)
            mean = AllReduce.apply(part.sum(dims, keepdim=True), tile.group) / cells
            square = ((part - mean) ** 2).sum(dims, keepdim=True)
            variance = AllReduce.apply(square, tile.group) / cells
            y = (t - mean) * torch.rsqrt(variance + a["eps"])
            y = y if a["weight"] is None else y * a["weight"][here]
            return y if a["bias"] is None else y + a["bias"][here]

        return tile.named(_layer_norm, work, *LAYER_NORM)

    made = replace(one_input(op, x, bind), sums=2 * prod(layout.shape[:first]))
    return replace(made, split=_split_layer_norm(op, x, first))


def _split_layer_norm(op: Op, x: Any, first: int) -> Split:
    """Each row of cells is normalised as a sample of one channel."""
    count = prod(op.shape(x)[:first])
    shared = SharedMoments(Sharing(count, 1, 1))
    dtype = getattr(torch, op.values[op.out].dtype)

    def part(tile: Tile) -> Run:
        with_halo, arguments = tile.with_halo(x), tile.named(_layer_norm, dict, *LAYER_NORM)

        def run(*args: Any, **kwargs: Any) -> tuple[Tensor]:
            t = with_halo(arguments(*args, **kwargs)["input"]).to(dtype)
            return (Moments.apply(t.reshape(count, 1, -1), shared, tile.known_sums()),)

        return run

    def rest(tile: Tile) -> Run:
        with_halo, arguments = tile.with_halo(x), tile.named(_layer_norm, dict, *LAYER_NORM)
        here = tuple(tile.wanted(x.name).slices()[first:])

        def run(moments: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            a = arguments(*args, **kwargs)
            t = with_halo(a["input"]).to(dtype)
            lines = t.reshape(count, 1, -1)
            y = Standardise.apply(lines, moments, None, None, a["eps"], shared.sharing)
            y = y.view(t.shape)
            y = y if a["weight"] is None else y * a["weight"][here]
            return y if a["bias"] is None else y + a["bias"][here]

        return run

    def finish(sums: tuple[Tensor], *args: Any, **kwargs: Any) -> Tensor:
        return sums[0]

    return Split((((3, count), "float64"),), part, finish, rest, moments=True)
