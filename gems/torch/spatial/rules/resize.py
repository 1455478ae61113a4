"""Interpolation of a tiled image: every output knows its taps and their weights from its place."""

from __future__ import annotations

from dataclasses import dataclass
from math import floor
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from gems.geometry.layout import Layout
from gems.geometry.window import Taps
from gems.torch.spatial.op import NotTileable, Op, Run
from gems.torch.spatial.rule import Rule, one_input, rule
from gems.torch.spatial.rules.adaptive_pool import averaged
from gems.torch.spatial.tile import Tile

Tensor = torch.Tensor
LINEAR = ("linear", "bilinear", "trilinear")
NEAREST = ("nearest", "nearest-exact")


@dataclass(frozen=True)
class Resample:
    """One dim of an interpolation: which inputs each output reads, and what each is worth."""

    places: tuple[tuple[int, ...], ...]  # tap -> input of every output
    weights: tuple[tuple[float, ...], ...]
    length: int

    def taps(self) -> Taps:
        rows = list(zip(*self.places, strict=True))
        return Taps([min(r) for r in rows], [max(r) for r in rows], self.length)

    def apply(self, x: Tensor, dim: int, first: int, start: int, stop: int) -> Tensor:
        """Outputs start..stop, from inputs that begin at `first`."""
        shape = [1] * x.dim()
        shape[dim] = stop - start
        found = None
        for places, weights in zip(self.places, self.weights, strict=True):
            at = torch.tensor(places[start:stop], device=x.device) - first
            part = x.index_select(dim, at)
            if any(w != 1.0 for w in weights):
                part = part * torch.tensor(
                    weights[start:stop], dtype=x.dtype, device=x.device
                ).view(shape)
            found = part if found is None else found + part
        assert found is not None
        return found


def _interpolate(
    input: Any, size: Any = None, scale_factor: Any = None, mode: str = "nearest",
    align_corners: Any = None, recompute_scale_factor: Any = None, antialias: bool = False,
) -> None: ...  # fmt: skip


UPSAMPLE = ("size", "scale_factor", "mode", "align_corners", "recompute_scale_factor")


@rule(
    ("interpolate", "upsample"),
    (nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d),
    from_whole=True,
)
def interpolate(op: Op) -> Rule:
    a: dict[str, Any] = {"antialias": False} | op.named(_interpolate, UPSAMPLE)
    x, before, shape = a["input"], op.shape(a["input"]), op.shape(op.out)
    mode, corners = a["mode"], bool(a["align_corners"])
    if mode == "area" and op.tiled:
        return averaged(op, x, lambda work: lambda tile: tile.named(_interpolate, work, *UPSAMPLE))
    if a["antialias"] or mode not in (*LINEAR, *NEAREST, "bicubic"):
        raise NotTileable(
            f"interpolates by mode {mode!r}{' with antialias' * bool(a['antialias'])}"
        )
    scales = _scales(a, len(shape) - 2)
    # A dim that keeps its length is copied; ATen's bicubic does so only if all of them do.
    copies = mode != "bicubic" or shape[2:] == before[2:]
    axes = {
        d: _resample(mode, corners, before[d], shape[d], scales[d - 2], copies)
        for d in range(2, len(shape))
    }
    if not op.tiled:
        return _from_whole(op, axes)
    layout = op.primary(x)
    windows = tuple(axes[d].taps() if d > 1 else Taps(*_straight(layout, d)) for d in layout.dims)
    whole = [d for d in axes if d not in layout.dims]

    def bind(tile: Tile) -> Run:
        with_halo, out = tile.with_halo(x), tile.out()
        firsts = {d: tile.padded_span(x.name, k)[0] for k, d in enumerate(layout.dims)}
        native = _native(tile, layout, shape, mode, corners, scales, x.name)

        def work(a: dict[str, Any]) -> Tensor:
            t = with_halo(a["input"])
            if out.empty:
                return tile.nothing(t)
            if native is not None:
                return native(t)
            for d in (*layout.dims, *whole):
                if d > 1:
                    t = axes[d].apply(t, d, firsts.get(d, 0), out.start[d], out.stop[d])
            return t

        return tile.named(_interpolate, work, *UPSAMPLE)

    return one_input(op, x, bind, windows)


def _from_whole(op: Op, axes: dict[int, Resample]) -> Rule:
    """A small whole map, of which every rank makes its own part of a tiled image."""
    layout = op.layout_like(op.shape(op.out))

    def bind(tile: Tile) -> Run:
        out = tile.out()

        def work(a: dict[str, Any]) -> Tensor:
            t = a["input"]
            if out.empty:
                return tile.nothing(t)
            for d in layout.dims:
                if d < 2:
                    t = t.narrow(d, out.start[d], out.shape[d])
            for d, axis in axes.items():
                t = axis.apply(t, d, 0, out.start[d], out.stop[d])
            return t

        return tile.named(_interpolate, work, *UPSAMPLE)

    return Rule({op.out: layout}, {}, bind)


def _straight(layout: Layout, dim: int) -> tuple[list[int], list[int], int]:
    places = list(range(layout.shape[dim]))
    return places, places, max(len(places), 1)


def _native(
    tile: Tile, layout: Layout, shape: tuple[int, ...], mode: str, corners: bool,
    scales: list[float | None], name: str,
) -> Any:  # fmt: skip
    """A whole number of outputs per input: ATen's own kernel on the padded, then a crop.

    Seen from any input cell the pattern is the same, and where the padded ends without the image
    ending, the outputs that would miss a tap are not ours.
    """
    times = {d: shape[d] // layout.shape[d] for d in range(2, len(shape)) if layout.shape[d]}
    if corners or any(shape[d] != layout.shape[d] * n for d, n in times.items()):
        return None
    if len(times) != len(shape) - 2 or any(n == 1 and mode != "nearest" for n in times.values()):
        return None
    if any(s not in (None, float(times[2 + k])) for k, s in enumerate(scales)):
        return None
    out = tile.out()
    crops = []
    for k, d in enumerate(layout.dims):
        if d > 1:
            crops.append((d, out.start[d] - times[d] * tile.padded_span(name, k)[0], out.shape[d]))

    def run(t: Tensor) -> Tensor:
        size = [t.shape[d] * n for d, n in times.items()]
        y = F.interpolate(t, size, mode=mode, align_corners=None if mode in NEAREST else False)
        for d, start, length in crops:
            y = y.narrow(d, start, length)
        return y

    return run


def _scales(a: dict[str, Any], count: int) -> list[float | None]:
    """The scale that ATen is given per dim, if any: it is used as it is, not as sizes say."""
    scale = a["scale_factor"]
    if scale is None or a["recompute_scale_factor"]:
        return [None] * count
    scale = (scale,) * count if isinstance(scale, (int, float)) else scale
    return [float(s) for s in scale]


def _resample(
    mode: str, corners: bool, n: int, m: int, scale: float | None, copies: bool
) -> Resample:
    if n == m and copies and mode not in NEAREST:
        return Resample((tuple(range(n)),), ((1.0,) * n,), n)
    if mode in NEAREST:
        # ATen's index map is float32 arithmetic of its own: run it on indices.
        probe = torch.arange(n, dtype=torch.float64).view(1, 1, n, 1)
        if scale is None:
            seen = F.interpolate(probe, (m, 1), mode=mode)
        else:
            seen = F.interpolate(probe, scale_factor=(scale, 1.0), mode=mode)
        return Resample((tuple(map(int, seen.flatten().tolist())),), ((1.0,) * m,), n)
    if corners:
        step = (n - 1) / (m - 1) if m > 1 else 0.0
        sources = [j * step for j in range(m)]
    else:
        step = 1 / scale if scale else n / m
        sources = [(j + 0.5) * step - 0.5 for j in range(m)]
        if mode in LINEAR:
            sources = [max(s, 0.0) for s in sources]
    return _cubic(sources, n) if mode == "bicubic" else _linear(sources, n)


def _linear(sources: list[float], n: int) -> Resample:
    low = [min(floor(s), n - 1) for s in sources]
    high = [min(i + 1, n - 1) for i in low]
    part = [min(max(s - i, 0.0), 1.0) for s, i in zip(sources, low, strict=True)]
    return Resample((tuple(low), tuple(high)), (tuple(1 - p for p in part), tuple(part)), n)


def _cubic(sources: list[float], n: int) -> Resample:
    """Keys' kernel with a = -0.75 on four taps, clamped to the image."""
    a = -0.75

    def near(t: float) -> float:
        return ((a + 2) * t - (a + 3)) * t * t + 1

    def far(t: float) -> float:
        return ((a * t - 5 * a) * t + 8 * a) * t - 4 * a

    places: list[list[int]] = [[], [], [], []]
    weights: list[list[float]] = [[], [], [], []]
    for s in sources:
        i = floor(s)
        t = s - i
        for k, w in enumerate((far(t + 1), near(t), near(1 - t), far(2 - t))):
            places[k].append(min(max(i - 1 + k, 0), n - 1))
            weights[k].append(w)
    return Resample(tuple(map(tuple, places)), tuple(map(tuple, weights)), n)
