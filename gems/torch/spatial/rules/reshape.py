"""Calls that move cells about: padding, cropping, reshaping, pixel shuffle."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from gems.geometry.layout import Layout
from gems.geometry.window import Grow, Same, Shrink, Slide, Window
from gems.torch.spatial.rule import Ask, NotTileable, Rule, Run, Site, rule, same
from gems.torch.spatial.rules.padding import Bent, bordered

Tensor = torch.Tensor


def one_place(ask: Ask, x: Any, dims: Sequence[int], windows: Sequence[Window], bind: Any) -> Rule:
    """A rule for calls with one cut input; all results are cut the same way."""
    layout = ask.primary(x)
    outs = {n: layout.follow(ask.shape(n), tuple(dims), windows) for n in ask.call.writes}
    return Rule(outs, {x.name: tuple(windows)}, bind)


def fetched(ask: Ask, x: Any, dims: Sequence[int]) -> Rule:
    """A call that works along uncut dims only: it runs as it is, on what is here."""

    def bind(site: Site) -> Run:
        return site.mapped(site.original, lambda place: site.fetch(place, None))

    return one_place(ask, x, dims, same(ask.primary(x)), bind)


# --- borders and crops ----------------------------------------------------------------------------


def _pad(input: Any, pad: Any, mode: str = "constant", value: Any = None) -> None: ...


MODES = {
    "Constant": "constant", "Zero": "constant", "Reflection": "reflect",
    "Replication": "replicate", "Circular": "circular",
}  # fmt: skip
PADS = [getattr(nn, f"{kind}Pad{n}d") for kind in MODES for n in (1, 2, 3)]


@rule(("pad",), PADS)
def pad(ask: Ask) -> Rule:
    if ask.module is not None:
        module: Any = ask.module
        x, numbers = ask.call.args[0], module.padding
        mode = next(m for kind, m in MODES.items() if type(ask.module).__name__.startswith(kind))
        value = getattr(ask.module, "value", 0.0) if mode == "constant" else 0.0
    else:
        a = ask.named(_pad)
        x, numbers, mode, value = a["input"], a["pad"], a["mode"], a["value"] or 0.0
    layout = ask.primary(x)
    rank = len(layout.shape)
    before = {rank - 1 - k: int(n) for k, n in enumerate(numbers[::2])}
    windows: list[Window] = []
    for dim in layout.dims:
        slide = Slide(padding=before.get(dim, 0))
        bent = mode in ("reflect", "replicate")
        windows.append(Bent(slide, layout.shape[dim], mode) if bent else slide)
    left = [0 if rank - 1 - k // 2 in layout.dims else int(n) for k, n in enumerate(numbers)]

    def bind(site: Site) -> Run:
        fetch = bordered(site, x, mode, value)

        def run(t: Tensor, *_: Any, **__: Any) -> Tensor:
            t = fetch(t)
            if site.out().empty:
                return site.nothing(t)
            if not any(left):
                return t
            return F.pad(t, left, mode, value if mode == "constant" else None)

        return run

    found = one_place(ask, x, layout.dims, windows, bind)
    return replace(found, circular=mode == "circular")


@rule(("getitem",))
def getitem(ask: Ask) -> Rule:
    """Slices with positive steps; whole dims may also be picked or added where nothing is cut."""
    x, index = ask.call.args
    if ask.layout(x) is None and ask.layout(index) is not None:
        return fetched(ask, index, ask.primary(index).dims)  # a whole table, read by cut numbers
    layout = ask.primary(x)
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
                raise NotTileable(f"picks one cell along dim {dim}, which is cut")
            start, _, step = i.indices(layout.shape[dim])
            windows[dim], dims[dim] = Slide(stride=step, padding=-start), out
            local.append(slice(None, None, step))
        else:
            local.append(i)
        out += not isinstance(i, int)
        dim += 1

    def bind(site: Site) -> Run:
        fetch, mine = site.fetch(x, None), tuple(local)
        return lambda t, _: fetch(t)[mine]

    return one_place(
        ask, x, [dims[d] for d in layout.dims], [windows[d] for d in layout.dims], bind
    )


def dim_count(index: tuple[Any, ...]) -> int:
    return sum(i is not None for i in index)


def _narrow(input: Any, dim: int, start: Any, length: int) -> None: ...


@rule(("narrow",))
def narrow(ask: Ask) -> Rule:
    a = ask.named(_narrow)
    x, layout = a["input"], ask.primary(a["input"])
    dim, start = a["dim"] % len(layout.shape), a["start"]
    if dim not in layout.dims:
        return fetched(ask, x, layout.dims)
    if not isinstance(start, int):
        raise NotTileable("starts where a tensor says")
    start %= layout.shape[dim]
    windows = [Slide(padding=-start) if d == dim else Same() for d in layout.dims]

    def bind(site: Site) -> Run:
        fetch = site.fetch(x, None)
        return lambda t, *_, **__: fetch(t)

    return one_place(ask, x, layout.dims, windows, bind)


# --- other shapes -------------------------------------------------------------------------------


@rule(("permute", "transpose", "swapaxes", "swapdims", "movedim", "mT", "T", "t", "mH"))
def permute(ask: Ask) -> Rule:
    """The order of dims: seen from the strides that the recorded call gave to numbered dims."""
    x = ask.call.args[0]
    layout = ask.primary(x)
    with torch.no_grad():
        probe = torch.empty(tuple(range(2, 2 + len(layout.shape))))
        rest = tuple(ask.call.args[1:])
        function = ask.call.function
        assert function is not None
        seen = function(probe, *rest, **ask.call.kwargs)
    order = [int(n) - 2 for n in seen.shape]
    return fetched(ask, x, [order.index(d) for d in layout.dims])


RESHAPES = (
    "view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as",
)  # fmt: skip


@rule(RESHAPES, (nn.Flatten, nn.Unflatten))
def reshape(ask: Ask) -> Rule:
    """Cut dims may stay as they are, or be joined with the dims right behind them."""
    x = ask.call.args[0]
    layout, shape = ask.primary(x), ask.shape(ask.out)
    dims, windows = [], []
    for dim in layout.dims:
        at, times = _kept(layout.shape, shape, dim)
        dims.append(at)
        windows.append(Grow(times) if times > 1 else Same())
    if any(isinstance(w, Grow) for w in windows) and len(dims) > 1:
        raise NotTileable(f"joins dims of {layout.shape} of which several are cut")

    def bind(site: Site) -> Run:
        fetch, target = site.fetch(x, None), site.out().shape
        return lambda t, *_, **__: fetch(t).reshape(target)

    return one_place(ask, x, dims, windows, bind)


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
    raise NotTileable(f"reshapes {tuple(old)} to {tuple(new)}, in which dim {dim} is cut")


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
        raise NotTileable(f"takes dim {rank - 3} for channels, which is cut")
    return range(rank - 2, rank)


@rule(("channel_shuffle", "native_channel_shuffle"), (nn.ChannelShuffle,))
def channel_shuffle(ask: Ask) -> Rule:
    x = ask.call.args[0]
    layout = ask.primary(x)
    if 1 in layout.dims:
        raise NotTileable("moves channels, which are cut")
    return fetched(ask, x, layout.dims)


def _roll(input: Any, shifts: Any, dims: Any = None) -> None: ...


@rule(("roll",))
def roll(ask: Ask) -> Rule:
    """Cells move round the image: along cut dims by an exchange, along the others here."""
    a = ask.named(_roll)
    x, layout = a["input"], ask.primary(a["input"])
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

    def bind(site: Site) -> Run:
        fetch = bordered(site, x, "circular")

        def run(t: Tensor, *_: Any, **__: Any) -> Tensor:
            t = fetch(t)
            return torch.roll(t, [far[d] for d in here], here) if here else t

        return run

    out = layout.follow(layout.shape, layout.dims, same(layout))
    return Rule({ask.out: out}, {x.name: windows}, bind, circular=True)


@rule(("pixel_shuffle",), (nn.PixelShuffle,))
def pixel_shuffle(ask: Ask) -> Rule:
    a = ask.named(_shuffle, ("upscale_factor",))
    x, times = a["input"], int(a["upscale_factor"])
    layout = ask.primary(x)
    spatial = _shuffled_dims(layout)
    windows = [Grow(times) if d in spatial else Same() for d in layout.dims]

    def bind(site: Site) -> Run:
        fetch, out = site.fetch(x, None), site.out()
        crop = []
        for axis, dim in enumerate(layout.dims):
            if dim in spatial:
                start = out.start[dim] - times * site.slab_span(x.name, axis)[0]
                crop.append((dim, start, out.shape[dim]))

        def work(a: dict[str, Any]) -> Tensor:
            t = fetch(a["input"])
            if out.empty:
                return site.nothing(t)
            y = F.pixel_shuffle(t, times)
            for dim, start, length in crop:
                y = y.narrow(dim, start, length)
            return y

        return site.named(_shuffle, work, "upscale_factor")

    return one_place(ask, x, layout.dims, windows, bind)


@rule(("pixel_unshuffle",), (nn.PixelUnshuffle,))
def pixel_unshuffle(ask: Ask) -> Rule:
    a = ask.named(_unshuffle, ("downscale_factor",))
    x, times = a["input"], int(a["downscale_factor"])
    layout = ask.primary(x)
    spatial = _shuffled_dims(layout)
    windows = [Shrink(times) if d in spatial else Same() for d in layout.dims]

    def bind(site: Site) -> Run:
        fetch, empty = site.fetch(x, None), site.out().empty

        def work(a: dict[str, Any]) -> Tensor:
            t = fetch(a["input"])
            return site.nothing(t) if empty else F.pixel_unshuffle(t, times)

        return site.named(_unshuffle, work, "downscale_factor")

    return one_place(ask, x, layout.dims, windows, bind)
