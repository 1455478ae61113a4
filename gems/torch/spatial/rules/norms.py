"""Normalisation over a cut tensor: statistics of all tiles, each cell counted once.

Every norm here is the same computation. Channels of samples fall into groups that share a mean and
a variance: BatchNorm groups a channel over all samples, GroupNorm some channels of one sample,
InstanceNorm every channel of every sample by itself. A rank merges its mean and its sum of squares
with the others' in one exchange; backward needs one more, of two sums per group.

[Note: overlapping tiles] Statistics count a rank's own cells only, which are disjoint. What a rank
computes beside them (d2 halos) is normalised all the same. Each copy of a cell gets the gradient of
what its own rank made of it, so sums over all that a rank has, added up over the ranks, are right;
the gradient of the statistics themselves enters at own cells only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from gems.geometry.box import Box
from gems.torch.spatial.group import SpatialGroup, Total
from gems.torch.spatial.rule import Ask, NotTileable, Rule, Run, Site, rule, same

Tensor = torch.Tensor


@dataclass(frozen=True)
class Groups:
    """Which channels of which samples share their statistics.

    `rows` is how many (sample, channel) pairs the local tensor has, as N x C; a group holds those
    that agree in `of`: "batch" (channel), "group" (sample and one of `count` groups).
    """

    samples: int
    channels: int
    count: int  # groups per sample, or 0: per channel over all samples

    def spread(self, x: Tensor) -> Tensor:
        """A number per group, for every (sample, channel): flat."""
        if not self.count:
            return x.repeat(self.samples)
        return x.repeat_interleave(self.channels // self.count)

    def gather(self, x: Tensor) -> Tensor:
        """Numbers per (sample, channel), summed over each group."""
        if not self.count:
            return x.view(self.samples, self.channels).sum(0)
        return x.view(self.samples * self.count, -1).sum(1)


@dataclass(frozen=True)
class Place:
    """Where a normalisation runs: the team, this rank's own cells, and everybody's counts."""

    team: SpatialGroup
    groups: Groups
    inner: tuple[slice, ...] | None  # own cells in the local tensor; None: all of it
    counts: tuple[int, ...]  # cells per group of each member

    @property
    def cells(self) -> int:
        return sum(self.counts)


def statistics(x: Tensor, place: Place) -> tuple[Tensor, Tensor]:
    """Mean and biased variance per group, over the own cells of all members."""
    rows = place.team.rows(torch.stack(_moments(x, place)))
    total, mean, square = 0, torch.zeros_like(rows[0][0]), torch.zeros_like(rows[0][0])
    for count, (other, spread) in zip(place.counts, rows, strict=True):
        if not count:
            continue
        total += count
        apart = other - mean
        mean = mean + apart * (count / total)
        square = square + spread + apart * apart * (count * (total - count) / total)
    return mean, square / place.cells


def _moments(x: Tensor, place: Place) -> tuple[Tensor, Tensor]:
    """Mean and sum of squares around it, per group, over this rank's own cells."""
    groups, count = place.groups, place.counts[place.team.me]
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    if not count:
        size = groups.samples * groups.count if groups.count else groups.channels
        nothing = torch.zeros(size, dtype=wide, device=x.device)
        return nothing, nothing
    rows = groups.samples * (groups.count or groups.channels)
    inner = (x if place.inner is None else x[place.inner]).to(wide)
    inner = inner.reshape(1, rows, -1).contiguous()
    # Of ATen's kernels the quickest that gives both, three times as fast as BatchNorm's own.
    _, mean, invert = torch.ops.aten.native_group_norm(
        inner, None, None, 1, rows, inner.numel() // rows, rows, 0.0
    )
    mean, square = mean.view(-1), invert.view(-1) ** -2 * (inner.numel() // rows)
    if groups.count:
        return mean, square
    mean, square = mean.view(groups.samples, -1), square.view(groups.samples, -1)
    middle = mean.mean(0)
    return middle, square.sum(0) + ((mean - middle) ** 2).sum(0) * (count / groups.samples)


class Normalise(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps) * weight + bias, the statistics being functions of x."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor,
        variance: Tensor, eps: float, place: Place,
    ) -> Tensor:  # fmt: skip
        ctx.place, ctx.eps, ctx.biased = place, eps, bias is not None
        ctx.set_materialize_grads(False)  # [Note: no gradient on tiles]
        ctx.save_for_backward(x, weight, mean, variance)
        groups = place.groups
        if not x.numel():
            return torch.empty_like(x)
        y = F.batch_norm(
            _rows(x), groups.spread(mean), groups.spread(variance), _every(weight, groups),
            _every(bias, groups), False, 0.0, eps,
        )  # fmt: skip
        return y.resize_(x.shape)  # not a view, so that it may be changed in place

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # type: ignore[override]
        if gradients[0] is None:
            return (None,) * 7
        x, weight, mean, variance = ctx.saved_tensors
        place, g, groups = ctx.place, gradients[0].contiguous(), ctx.place.groups
        if not x.numel():  # nothing to add, but the others wait
            place.team.total(torch.zeros_like(torch.stack((mean, mean))))
            none = None if weight is None else torch.zeros_like(weight)
            return torch.zeros_like(x), none, none if ctx.biased else None, None, None, None, None
        w = _every(weight, groups)
        if w is None:
            w = groups.spread(torch.ones_like(mean))
        # Per (sample, channel): dw = sum of g (x - mean) / deviation, db = sum of g.
        _, dw, db = torch.ops.aten.native_batch_norm_backward(
            _rows(g), _rows(x), w, groups.spread(mean), groups.spread(variance), None, None,
            False, ctx.eps, [False, True, True],
        )  # fmt: skip
        grad_weight = None if weight is None else dw.view(groups.samples, -1).sum(0)
        grad_bias = db.view(groups.samples, -1).sum(0) if ctx.biased else None
        sums = place.team.total(torch.stack((groups.gather(dw * w), groups.gather(db * w))))
        invert = torch.rsqrt(variance + ctx.eps)
        slope = -invert * invert * sums[0] / place.cells
        shift = -invert * sums[1] / place.cells - slope * mean
        dx = _combined(x, g, groups.spread(invert) * w, slope, shift, place)
        return dx, grad_weight, grad_bias, None, None, None, None


def _combined(
    x: Tensor, g: Tensor, scale: Tensor, slope: Tensor, shift: Tensor, place: Place
) -> Tensor:
    """scale g + slope x + shift; the last two, which come from the statistics, at own cells."""
    spread = place.groups.spread
    here = place.inner is None
    zero, one = torch.zeros_like(scale), torch.ones_like(scale)
    bias = spread(shift) if here else zero
    dx = F.batch_norm(_rows(g), zero, one, scale, bias, False, 0.0, 0.0)  # scale g + bias
    dx = dx.resize_(x.shape)
    rows = (*x.shape[:2], *(1,) * (x.dim() - 2))
    inner = ... if here else place.inner
    own = dx[inner].addcmul_(x[inner], spread(slope).view(rows).to(x.dtype))
    if not here:
        own.add_(spread(shift).view(rows).to(x.dtype))
    return dx


def _rows(x: Tensor) -> Tensor:
    """All channels of all samples side by side: (1, N C, cells)."""
    return x.reshape(1, x.shape[0] * x.shape[1], -1)


def _every(x: Tensor | None, groups: Groups) -> Tensor | None:
    return None if x is None else x.repeat(groups.samples)


# --- the rules ----------------------------------------------------------------------------------


def _batch_norm(
    input: Any, running_mean: Any = None, running_var: Any = None, weight: Any = None,
    bias: Any = None, training: bool = False, momentum: Any = 0.1, eps: float = 1e-5,
) -> None: ...  # fmt: skip


BATCH_NORM = ("running_mean", "running_var", "weight", "bias", "momentum", "eps")


@rule(("batch_norm",), (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d))
def batch_norm(ask: Ask) -> Rule:
    a = ask.named(_batch_norm, BATCH_NORM)
    if isinstance(ask.module, _BatchNorm):
        training = ask.module.training or ask.module.running_mean is None
    else:
        training = a["training"]
    if not training:
        return local(ask, a["input"])

    def work(a: dict[str, Any], x: Tensor, place: Place) -> Tensor:
        mean, variance = _taken(x, place)
        if ask.module is not None:
            _remember(ask.module, mean, variance, place.cells)
        elif a["running_mean"] is not None:
            _average(
                a["running_mean"], a["running_var"], mean, variance, place.cells, a["momentum"]
            )
        return _normalised(x, a, mean, variance, place)

    return normalised(ask, a["input"], 0, _batch_norm, BATCH_NORM, work)


def _taken(x: Tensor, place: Place) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        return statistics(x, place)


def _normalised(
    x: Tensor, a: dict[str, Any], mean: Tensor, variance: Tensor, place: Place
) -> Tensor:
    return Normalise.apply(  # type: ignore[no-any-return]
        x, a["weight"], a["bias"], mean, variance, a["eps"], place
    )


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
def group_norm(ask: Ask) -> Rule:
    a = ask.named(_group_norm, GROUP_NORM)

    def work(a: dict[str, Any], x: Tensor, place: Place) -> Tensor:
        return _normalised(x, a, *_taken(x, place), place)

    return normalised(ask, a["input"], a["num_groups"], _group_norm, GROUP_NORM, work)


def _instance_norm(
    input: Any, running_mean: Any = None, running_var: Any = None, weight: Any = None,
    bias: Any = None, use_input_stats: bool = True, momentum: Any = 0.1, eps: float = 1e-5,
) -> None: ...  # fmt: skip


@rule(("instance_norm",), (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d))
def instance_norm(ask: Ask) -> Rule:
    a = ask.named(_instance_norm, BATCH_NORM)
    module = ask.module
    if isinstance(module, _InstanceNorm):
        if not module.training and module.track_running_stats:
            return local(ask, a["input"])
    elif not a["use_input_stats"]:
        return local(ask, a["input"])
    elif a["running_mean"] is not None:
        raise NotTileable("keeps running statistics by itself; use nn.InstanceNorm")
    channels = ask.shape(a["input"])[1]

    def work(a: dict[str, Any], x: Tensor, place: Place) -> Tensor:
        mean, variance = _taken(x, place)
        if isinstance(module, _InstanceNorm) and module.training and module.track_running_stats:
            _remember_instances(module, mean, variance, place)
        return _normalised(x, a, mean, variance, place)

    return normalised(ask, a["input"], channels, _instance_norm, BATCH_NORM, work)


def _remember_instances(module: Any, mean: Tensor, variance: Tensor, place: Place) -> None:
    """The running averages of instance norm take the mean over the samples."""
    if module.momentum is None or module.running_mean is None:
        return
    mean, variance = (t.view(-1, place.groups.channels).mean(0) for t in (mean, variance))
    running = (module.running_mean, module.running_var)
    _average(*running, mean, variance, place.cells, module.momentum)


def normalised(
    ask: Ask, x: Any, groups: int, stub: Run, attributes: Sequence[str],
    work: Callable[[dict[str, Any], Tensor, Place], Tensor],
) -> Rule:  # fmt: skip
    """A norm over samples or groups of channels; without cells of others it needs nobody."""
    layout = ask.layout(x)
    if layout is None:
        raise NotTileable("reads a cut tensor where it takes a whole one")
    if groups and 0 in layout.dims and getattr(ask.module, "track_running_stats", False):
        raise NotTileable("keeps running statistics of samples that several ranks have")
    if groups and layout.dims == (0,):
        return local(ask, x)  # every sample is whole
    windows = same(layout)

    def bind(site: Site) -> Run:
        fetch = site.fetch(x, None)
        at = site.wanted(x.name)
        place = _place(site, x.name, at, groups)
        dtype = getattr(torch, ask.values[ask.out].dtype)

        def run(a: dict[str, Any]) -> Tensor:
            # Autocast takes some norms in float32, as the recording shows.
            return work(a, fetch(a["input"]).to(dtype).contiguous(), place)

        return site.named(stub, run, *attributes)

    outs = {ask.out: layout.follow(layout.shape, layout.dims, windows)}
    samples, channels = layout.shape[:2]
    return Rule(outs, {x.name: windows}, bind, sums=2 * (samples * groups or channels))


def _place(site: Site, name: str, at: Box, groups: int) -> Place:
    own = site.layouts[name].own_boxes()
    mine = own[site.team.me]
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
    return Place(site.team, Groups(samples, channels, groups), inner, tuple(counts))


def local(ask: Ask, x: Any) -> Rule:
    """A call that looks at nothing but its own cell, or at what every rank has of it whole."""
    layout = ask.primary(x)
    windows = same(layout)

    def nothing(site: Site) -> Run:
        """Of a rank without cells, which torch's instance norm does not take."""
        weights = () if ask.module is None else tuple(ask.module.parameters())

        def work(*args: Any, **kwargs: Any) -> Tensor:
            given = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
            return site.nothing(*given, *weights)

        return work

    def bind(site: Site) -> Run:
        work = nothing(site) if site.out().empty else site.original
        return site.mapped(work, lambda place: site.fetch(place, None))

    return Rule(
        {ask.out: layout.follow(ask.shape(ask.out), layout.dims, windows)}, {x.name: windows}, bind
    )


def _layer_norm(
    input: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> None: ...


LAYER_NORM = ("normalized_shape", "weight", "bias", "eps")


@rule(("layer_norm",), (nn.LayerNorm,))
def layer_norm(ask: Ask) -> Rule:
    """Over trailing dims: local if none is cut; else sums, and weights cut like the cells."""
    a = ask.named(_layer_norm, LAYER_NORM)
    x, layout = a["input"], ask.primary(a["input"])
    trailing = len(a["normalized_shape"])
    first = len(layout.shape) - trailing
    if all(dim < first for dim in layout.dims):
        return local(ask, x)
    if any(dim < first for dim in layout.dims):
        raise NotTileable("normalises over some, but not all, of the dims that are cut")
    windows = same(layout)
    dims = tuple(range(first, len(layout.shape)))
    cells = prod(layout.shape[first:])

    def bind(site: Site) -> Run:
        fetch = site.fetch(x, None)
        at, own = site.wanted(x.name), site.own(x.name)
        inner = own.relative_to(at).slices() if not own.empty else None
        here = tuple(at.slices()[first:])

        def work(a: dict[str, Any]) -> Tensor:
            t = fetch(a["input"])
            part = t[inner] if inner is not None else t[:, :0].sum() * 0 + t.new_zeros(own.shape)
            mean = Total.apply(part.sum(dims, keepdim=True), site.team) / cells
            square = ((part - mean) ** 2).sum(dims, keepdim=True)
            variance = Total.apply(square, site.team) / cells
            y = (t - mean) * torch.rsqrt(variance + a["eps"])
            y = y if a["weight"] is None else y * a["weight"][here]
            return y if a["bias"] is None else y + a["bias"][here]

        return site.named(_layer_norm, work, *LAYER_NORM)

    outs = {ask.out: layout.follow(layout.shape, layout.dims, windows)}
    return Rule(outs, {x.name: windows}, bind, sums=2 * prod(layout.shape[:first]))
