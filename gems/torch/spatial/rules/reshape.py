"""Calls that move cells about: padding, cropping, reshaping, pixel shuffle."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from gems.geometry.layout import Layout
from gems.geometry.window import Grow, Same, Shrink, Slide, Window
from gems.torch.spatial.op import NotTileable, Op, Run
from gems.torch.spatial.rule import Rule, one_input, rule, same, unchanged
from gems.torch.spatial.rules.padding import Bent, bordered
from gems.torch.spatial.tile import Tile

Tensor = torch.Tensor


# --- borders and crops ----------------------------------------------------------------------------


def _pad(input: Any, pad: Any, mode: str = "constant", value: Any = None) -> None: ...


MODES = {
    "Constant": "constant", "Zero": "constant", "Reflection": "reflect",
    "Replication": "replicate", "Circular": "circular",
}  # fmt: skip
PADS = [getattr(nn, f"{kind}Pad{n}d") for kind in MODES for n in (1, 2, 3)]


@rule(("pad",), PADS)
def pad(op: Op) -> Rule:
    if op.module is not None:
        module: Any = op.module
        x, numbers = op.call.args[0], module.padding
        mode = next(m for kind, m in MODES.items() if type(op.module).__name__.startswith(kind))
        value = getattr(op.module, "value", 0.0) if mode == "constant" else 0.0
    else:
        a = op.named(_pad)
        x, numbers, mode, value = a["input"], a["pad"], a["mode"], a["value"] or 0.0
    layout = op.primary(x)
    rank = len(layout.shape)
    before = {rank - 1 - k: int(n) for k, n in enumerate(numbers[::2])}
    windows: list[Window] = []
    for dim in layout.dims:
        slide = Slide(padding=before.get(dim, 0))
        bent = mode in ("reflect", "replicate")
        windows.append(Bent(slide, layout.shape[dim], mode) if bent else slide)
    left = [0 if rank - 1 - k // 2 in layout.dims else int(n) for k, n in enumerate(numbers)]

    def bind(tile: Tile) -> Run:
        with_halo = bordered(tile, x, mode, value)

        def run(t: Tensor, *_: Any, **__: Any) -> Tensor:
            t = with_halo(t)
            if tile.out().empty:
                return tile.nothing(t)
            if not any(left):
                return t
            return F.pad(t, left, mode, value if mode == "constant" else None)

        return run

    return one_input(op, x, bind, windows, circular=mode == "circular")


@rule(("getitem",))
def getitem(op: Op) -> Rule:
    """Slices with positive steps; whole dims may also be picked or added where nothing is tiled."""
    x, index = op.call.args
    if op.layout(x) is None and op.layout(index) is not None:
        return unchanged(op, index)  # a whole table, read by tiled numbers
    layout = op.primary(x)
    index = index if isinstance(index, tuple) else (index,)
    if any(not isinstance(i, (slice, int, type(None), type(...))) for i in index):
        raise NotTileable("picks cells by a list or a mask")
    used = sum(isinstance(i, (slice, int)) for i in index)
    if ... in index:
        at = index.index(...)
        fill = (slice(None),) * (len(layout.shape) - used)
        index = (*index[:at], *fill, *index[at + 1 :])
    dim, out, windows, dims, local = 0, 0, {}, {}, []
    for i in (*index, *(slice(None),) * (len(layout.shape) - dim_count(index))):
        if i is None:
            local.append(None)
            out += 1
            continue
        if dim in layout.dims:
            if isinstance(i, int):
                raise NotTileable(f"picks one cell along dim {dim}, which is tiled")
            start, _, step = i.indices(layout.shape[dim])
            windows[dim], dims[dim] = Slide(stride=step, padding=-start), out
            local.append(slice(None, None, step))
        else:
            local.append(i)
        out += not isinstance(i, int)
        dim += 1

    def bind(tile: Tile) -> Run:
        with_halo, mine = tile.with_halo(x), tuple(local)
        return lambda t, _: with_halo(t)[mine]

    return one_input(op, x, bind, [windows[d] for d in layout.dims], [dims[d] for d in layout.dims])


def dim_count(index: tuple[Any, ...]) -> int:
    return sum(i is not None for i in index)


def _narrow(input: Any, dim: int, start: Any, length: int) -> None: ...


@rule(("narrow",))
def narrow(op: Op) -> Rule:
    a = op.named(_narrow)
    x, layout = a["input"], op.primary(a["input"])
    dim, start = a["dim"] % len(layout.shape), a["start"]
    if dim not in layout.dims:
        return unchanged(op, x)
    if not isinstance(start, int):
        raise NotTileable("starts at an index that is a tensor")
    start %= layout.shape[dim]
    windows = [Slide(padding=-start) if d == dim else Same() for d in layout.dims]

    def bind(tile: Tile) -> Run:
        with_halo = tile.with_halo(x)
        return lambda t, *_, **__: with_halo(t)

    return one_input(op, x, bind, windows)


# --- other shapes -------------------------------------------------------------------------------


@rule(("permute", "transpose", "swapaxes", "swapdims", "movedim", "mT", "T", "t", "mH"))
def permute(op: Op) -> Rule:
    """The order of dims: seen from the strides that the recorded call gave to numbered dims."""
    x = op.call.args[0]
    layout = op.primary(x)
    with torch.no_grad():
        probe = torch.empty(tuple(range(2, 2 + len(layout.shape))))
        rest = tuple(op.call.args[1:])
        function = op.call.function
        assert function is not None
        seen = function(probe, *rest, **op.call.kwargs)
    order = [int(n) - 2 for n in seen.shape]
    return unchanged(op, x, [order.index(d) for d in layout.dims])


RESHAPES = (
    "view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as",
)  # fmt: skip


@rule(RESHAPES, (nn.Flatten, nn.Unflatten))
def reshape(op: Op) -> Rule:
    """Cut dims may stay as they are, or be joined with the dims right behind them."""
    x = op.call.args[0]
    layout, shape = op.primary(x), op.shape(op.out)
    dims, windows = [], []
    for dim in layout.dims:
        at, times = _kept(layout.shape, shape, dim)
        dims.append(at)
        windows.append(Grow(times) if times > 1 else Same())
    if any(isinstance(w, Grow) for w in windows) and len(dims) > 1:
        raise NotTileable(f"joins dims of {layout.shape} of which several are tiled")

    def bind(tile: Tile) -> Run:
        with_halo, target = tile.with_halo(x), tile.out().shape
        return lambda t, *_, **__: with_halo(t).reshape(target)

    return one_input(op, x, bind, windows, dims)


def _kept(old: Sequence[int], new: Sequence[int], dim: int) -> tuple[int, int]:
    """Where a dim is in another shape of the same cells, and how many cells each of its has."""
    before = prod(old[:dim])
    if tuple(new[: dim + 1]) == tuple(old[: dim + 1]):
        return dim, 1
    for at, size in enumerate(new):
        if prod(new[:at]) == before and size % old[dim] == 0 and (size > 1 or old[dim] == 1):
            times = size // old[dim]
            if times == 1 or times == prod(_joined(old, dim, times)):
                return at, times
    raise NotTileable(f"reshapes {tuple(old)} to {tuple(new)}, in which dim {dim} is tiled")


def _joined(old: Sequence[int], dim: int, times: int) -> list[int]:
    """The dims behind this one that together have so many cells."""
    found = list(itertools.accumulate(old[dim + 1 :], initial=1, func=lambda a, b: a * b))
    return list(old[dim + 1 : dim + 1 + found.index(times)]) if times in found else []


def _shuffle(input: Any, upscale_factor: int) -> None: ...


def _unshuffle(input: Any, downscale_factor: int) -> None: ...


def _shuffled_dims(layout: Layout) -> range:
    """The last two; the dim before them holds the channels, also those of a volume."""
    rank = len(layout.shape)
    if rank - 3 in layout.dims:
        raise NotTileable(f"takes dim {rank - 3} for channels, which is tiled")
    return range(rank - 2, rank)


@rule(("channel_shuffle", "native_channel_shuffle"), (nn.ChannelShuffle,))
def channel_shuffle(op: Op) -> Rule:
    x = op.call.args[0]
    layout = op.primary(x)
    if 1 in layout.dims:
        raise NotTileable("moves channels, which are tiled")
    return unchanged(op, x)


def _roll(input: Any, shifts: Any, dims: Any = None) -> None: ...


@rule(("roll",))
def roll(op: Op) -> Rule:
    """Cells move round the image: along tiled dims by an exchange, along the others here."""
    a = op.named(_roll)
    x, layout = a["input"], op.primary(a["input"])
    rank = len(layout.shape)
    if a["dims"] is None or a["dims"] == ():
        raise NotTileable("moves cells through all dims as if they were one")
    shifts = (a["shifts"],) if isinstance(a["shifts"], int) else tuple(a["shifts"])
    dims = (a["dims"],) if isinstance(a["dims"], int) else tuple(a["dims"])
    far = [0] * rank
    for shift, dim in zip(shifts, dims, strict=True):
        far[dim % rank] += shift
    windows = tuple(Slide(padding=far[d] % max(layout.shape[d], 1)) for d in layout.dims)
    here = [d for d in range(rank) if far[d] and d not in layout.dims]

    def bind(tile: Tile) -> Run:
        with_halo = bordered(tile, x, "circular")

        def run(t: Tensor, *_: Any, **__: Any) -> Tensor:
            t = with_halo(t)
            return torch.roll(t, [far[d] for d in here], here) if here else t

        return run

    out = layout.follow(layout.shape, layout.dims, same(layout))
    return Rule({op.out: out}, {x.name: windows}, bind, circular=True)


@rule(("pixel_shuffle",), (nn.PixelShuffle,))
def pixel_shuffle(op: Op) -> Rule:
    a = op.named(_shuffle, ("upscale_factor",))
    x, times = a["input"], int(a["upscale_factor"])
    layout = op.primary(x)
    spatial = _shuffled_dims(layout)
    windows = [Grow(times) if d in spatial else Same() for d in layout.dims]

    def bind(tile: Tile) -> Run:
        with_halo, out = tile.with_halo(x), tile.out()
        crop = []
        for axis, dim in enumerate(layout.dims):
            if dim in spatial:
                start = out.start[dim] - times * tile.padded_span(x.name, axis)[0]
                crop.append((dim, start, out.shape[dim]))

        def work(a: dict[str, Any]) -> Tensor:
            t = with_halo(a["input"])
            if out.empty:
                return tile.nothing(t)
            y = F.pixel_shuffle(t, times)
            for dim, start, length in crop:
                y = y.narrow(dim, start, length)
            return y

        return tile.named(_shuffle, work, "upscale_factor")

    return one_input(op, x, bind, windows)


@rule(("pixel_unshuffle",), (nn.PixelUnshuffle,))
def pixel_unshuffle(op: Op) -> Rule:
    a = op.named(_unshuffle, ("downscale_factor",))
    x, times = a["input"], int(a["downscale_factor"])
    layout = op.primary(x)
    spatial = _shuffled_dims(layout)
    windows = [Shrink(times) if d in spatial else Same() for d in layout.dims]

    def bind(tile: Tile) -> Run:
        with_halo, empty = tile.with_halo(x), tile.out().empty

        def work(a: dict[str, Any]) -> Tensor:
            t = with_halo(a["input"])
            return tile.nothing(t) if empty else F.pixel_unshuffle(t, times)

        return tile.named(_unshuffle, work, "downscale_factor")

    return one_input(op, x, bind, windows)
