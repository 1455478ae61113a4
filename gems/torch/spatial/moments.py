"""Means and variances over tiles: of the tiles of all ranks at once, or of one after the other.

Where all tiles are there (`statistics`), each rank's moments are gathered. Where they run one after
the other, the moments are the summands of a `Split` (rule.py): `Moments` of each tile, as counts,
means and sums of squares around them; merged without cancellation (`merged`); then `Standardise`
of each tile, given those of all. The gradient of the merged moments is summed over all tiles, and
enters every cell:

    mean = sum of x / n               d mean / dx = 1 / n
    square = sum of (x - mean)^2      d square / dx = 2 (x - mean)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from gems.torch.spatial.group import SpatialGroup
from gems.torch.tensors.memory_format import formatted_like

Tensor = torch.Tensor


@dataclass(frozen=True)
class Sharing:
    """Which channels of which samples share their statistics: one channel of all samples
    (BatchNorm), or one of `count` groups of channels of one sample (GroupNorm, InstanceNorm)."""

    samples: int
    channels: int
    count: int  # groups per sample, or 0: per channel over all samples

    def spread(self, x: Tensor) -> Tensor:
        """A number per group, for every (sample, channel): flat."""
        if not self.count:
            return x if self.samples == 1 else x.repeat(self.samples)
        return (
            x if self.channels == self.count else x.repeat_interleave(self.channels // self.count)
        )

    def gather(self, x: Tensor) -> Tensor:
        """Numbers per (sample, channel), summed over each group."""
        if not self.count:
            return x.view(self.samples, self.channels).sum(0)
        return x.view(self.samples * self.count, -1).sum(1)


@dataclass(frozen=True)
class NormTile:
    """A rank's tile of a norm's input: its own cells, and how many cells every member has."""

    group: SpatialGroup
    sharing: Sharing
    inner: tuple[slice, ...] | None  # own cells in the local tensor; None: all of it
    counts: tuple[int, ...]  # cells per group of each member

    @property
    def cells(self) -> int:
        return sum(self.counts)


def statistics(x: Tensor, tile: NormTile) -> tuple[Tensor, Tensor]:
    """Mean and biased variance per group, over the own cells of all members."""
    rows = tile.group.all_gather(torch.stack(own_moments(x, tile)))
    total, mean, square = 0, torch.zeros_like(rows[0][0]), torch.zeros_like(rows[0][0])
    for count, (other, spread) in zip(tile.counts, rows, strict=True):
        if not count:
            continue
        total += count
        apart = other - mean
        mean = mean + apart * (count / total)
        square = square + spread + apart * apart * (count * (total - count) / total)
    return mean, square / tile.cells


def own_moments(x: Tensor, tile: NormTile) -> tuple[Tensor, Tensor]:
    """Mean and sum of squares around it, per group, over this rank's own cells."""
    sharing, count = tile.sharing, tile.counts[tile.group.me]
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    if not count:
        size = sharing.samples * sharing.count if sharing.count else sharing.channels
        nothing = torch.zeros(size, dtype=wide, device=x.device)
        return nothing, nothing
    rows = sharing.samples * (sharing.count or sharing.channels)
    inner = (x if tile.inner is None else x[tile.inner]).to(wide)
    inner = inner.reshape(1, rows, -1).contiguous()
    # Of ATen's kernels the quickest that gives both, three times as fast as BatchNorm's own.
    _, mean, invert = torch.ops.aten.native_group_norm(
        inner, None, None, 1, rows, inner.numel() // rows, rows, 0.0
    )
    mean, square = mean.view(-1), invert.view(-1) ** -2 * (inner.numel() // rows)
    if sharing.count:
        return mean, square
    mean, square = mean.view(sharing.samples, -1), square.view(sharing.samples, -1)
    middle = mean.mean(0)
    return middle, square.sum(0) + ((mean - middle) ** 2).sum(0) * (count / sharing.samples)


def rows(x: Tensor) -> Tensor:
    """All channels of all samples side by side: (1, N C, cells)."""
    return x.reshape(1, x.shape[0] * x.shape[1], -1)


def every(x: Tensor | None, sharing: Sharing) -> Tensor | None:
    return x if x is None or sharing.samples == 1 else x.repeat(sharing.samples)


# --- one tile after the other ---------------------------------------------------------------------


class Measured(Protocol):
    """Which cells of a tile share a mean."""

    def measure(self, x: Tensor) -> Tensor:
        """Counts, means and sums of squares around these, stacked, in float64."""
        ...

    def spread(self, numbers: Tensor, x: Tensor) -> Tensor:
        """A number for each of them, so that it broadcasts over the tile, in its type."""
        ...


@dataclass(frozen=True)
class SharedMoments:
    """Those of a norm."""

    sharing: Sharing

    @property
    def size(self) -> int:
        sharing = self.sharing
        return sharing.samples * sharing.count if sharing.count else sharing.channels

    def measure(self, x: Tensor) -> Tensor:
        cells = x.numel() // max(self.size, 1)
        alone = SpatialGroup((1,), (0,), 0, None)  # type: ignore[arg-type]
        mean, square = own_moments(x, NormTile(alone, self.sharing, None, (cells,)))
        count = torch.full_like(mean, cells)
        return torch.stack((count, mean, square)).double()

    def spread(self, numbers: Tensor, x: Tensor) -> Tensor:
        flat = self.sharing.spread(numbers.to(x.dtype))
        return flat.view(*x.shape[:2], *(1,) * (x.dim() - 2))


def merged(a: Tensor, b: Tensor) -> Tensor:
    """The moments of two sets of cells together."""
    count = a[0] + b[0]
    apart, share = b[1] - a[1], b[0] / count.clamp_min(1)
    return torch.stack((count, a[1] + apart * share, a[2] + b[2] + apart * apart * a[0] * share))


class Moments(torch.autograd.Function):
    """A tile's moments. Where backward runs it again, those of all tiles are `known`, and of the
    tile's own only the gradient matters."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cells: Measured, known: Tensor | None) -> Tensor:
        ctx.cells = cells
        ctx.set_materialize_grads(False)
        if known is None:
            return cells.measure(x)
        ctx.save_for_backward(x, known)
        return torch.zeros_like(known)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # type: ignore[override]
        (g,) = gradients
        if g is None:
            return None, None, None
        x, known = ctx.saved_tensors
        spread = ctx.cells.spread
        shift = spread(g[1] / known[0].clamp_min(1), x)
        return torch.addcmul(shift, x - spread(known[1], x), spread(2 * g[2], x)), None, None


class Standardise(torch.autograd.Function):
    """(x - mean) / sqrt(square / count + eps) * weight + bias, given the moments of all tiles."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, moments: Tensor, weight: Tensor | None, bias: Tensor | None,
        eps: float, sharing: Sharing,
    ) -> Tensor:  # fmt: skip
        ctx.sharing, ctx.eps, ctx.biased = sharing, eps, bias is not None
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, moments, weight)
        if not x.numel():
            return torch.empty_like(x)
        mean, variance = _mean_and_variance(moments, x)
        y = F.batch_norm(
            rows(x), sharing.spread(mean), sharing.spread(variance), every(weight, sharing),
            every(bias, sharing), False, 0.0, eps,
        )  # fmt: skip
        return formatted_like(y.resize_(x.shape), x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # type: ignore[override]
        (g,) = gradients
        if g is None:
            return (None,) * 6
        x, moments, weight = ctx.saved_tensors
        sharing = ctx.sharing
        if not x.numel():
            none = None if weight is None else torch.zeros_like(weight)
            zeros = torch.zeros_like(moments)
            return torch.zeros_like(x), zeros, none, none if ctx.biased else None, None, None
        mean, variance = _mean_and_variance(moments, x)
        w = every(weight, sharing)
        if w is None:
            w = sharing.spread(torch.ones_like(mean))
        # Per (sample, channel): dw = sum of g (x - mean) / deviation, db = sum of g.
        dx, dw, db = torch.ops.aten.native_batch_norm_backward(
            rows(g), rows(x), w, sharing.spread(mean), sharing.spread(variance), None, None,
            False, ctx.eps, [True, True, True],
        )  # fmt: skip
        invert = torch.rsqrt(moments[2] / moments[0] + ctx.eps)
        back = torch.zeros_like(moments)
        back[1] = -invert * sharing.gather((db * w).double())
        back[2] = -0.5 * invert * invert * sharing.gather((dw * w).double()) / moments[0]
        grad_weight = None if weight is None else dw.view(sharing.samples, -1).sum(0)
        grad_bias = db.view(sharing.samples, -1).sum(0) if ctx.biased else None
        return formatted_like(dx.view(x.shape), x), back, grad_weight, grad_bias, None, None


def _mean_and_variance(moments: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    kind = torch.float64 if x.dtype == torch.float64 else torch.float32
    return moments[1].to(kind), (moments[2] / moments[0]).to(kind)
