"""Layers that slide a window over the image: convolution, pooling and their opposites."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from gems.geometry.layout import Layout
from gems.geometry.window import Slide, Spread, Window
from gems.torch.spatial.rule import Ask, NotTileable, Rule, Run, Site, rule
from gems.torch.spatial.rules.overlap_conv import Kernel, apart
from gems.torch.spatial.rules.padding import Bent, bordered

Tensor = torch.Tensor
CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
MAX_POOLS = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
AVERAGE_POOLS = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


def spread_out(x: Any, count: int) -> tuple[int, ...]:
    """One number per spatial dim, from one for all or one each."""
    if isinstance(x, int):
        return (x,) * count
    found = tuple(int(n) for n in x)
    return found * count if len(found) == 1 else found


@dataclass(frozen=True)
class Frame:
    """The spatial dims of a layer's input: which are cut, and by which axis of the grid."""

    layout: Layout
    count: int  # spatial dims

    @property
    def first(self) -> int:
        return len(self.layout.shape) - self.count

    def axis(self, spatial: int) -> int | None:
        dim = self.first + spatial
        return self.layout.dims.index(dim) if dim in self.layout.dims else None

    def uncut(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """Settings for the dims that are whole here; 0 for those that a slab takes care of."""
        return tuple(n if self.axis(d) is None else 0 for d, n in enumerate(numbers))

    def windows(self, each: Callable[[int], Window]) -> tuple[Window, ...]:
        """One window per axis of the grid; the other dims, the samples, are read as they are."""
        spatial = {self.axis(d): d for d in range(self.count)}
        return tuple(
            each(spatial[k]) if k in spatial else Slide() for k in range(len(self.layout.dims))
        )

    def lengths(self) -> tuple[int, ...]:
        return self.layout.shape[self.first :]


def batched(layout: Layout, count: int) -> Frame:
    if len(layout.shape) != count + 2:
        raise NotTileable(f"takes an input of {len(layout.shape)} dims, samples not among them")
    return Frame(layout, count)


# --- convolution --------------------------------------------------------------------------------


def _conv(
    input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0,
    dilation: Any = 1, groups: int = 1, padding_mode: str = "zeros",
) -> None: ...  # fmt: skip


CONV = ("weight", "bias", "stride", "padding", "dilation", "groups", "padding_mode")


@rule(("conv1d", "conv2d", "conv3d"), (nn.Conv1d, nn.Conv2d, nn.Conv3d))
def convolution(ask: Ask) -> Rule:
    a = ask.named(_conv, CONV)
    layout = ask.primary(a["input"])
    count = len(ask.shape(ask.out)) - 2
    frame = batched(layout, count)
    kernel = _weight_shape(ask, a["weight"])[2:]
    stride, dilation = spread_out(a["stride"], count), spread_out(a["dilation"], count)
    before, after = _paddings(a["padding"], kernel, dilation)
    mode = "constant" if a["padding_mode"] == "zeros" else a["padding_mode"]
    lengths = frame.lengths()

    def window(d: int) -> Window:
        slide = Slide(kernel[d], stride[d], before[d], dilation[d])
        return slide if mode in ("constant", "circular") else Bent(slide, lengths[d], mode)

    windows = frame.windows(window)
    native = before == after and mode == "constant"
    around = zip(frame.uncut(before), frame.uncut(after), strict=True)
    pads = [n for pair in reversed(list(around)) for n in pair]
    x = a["input"]

    def run(slab: Tensor, a: dict[str, Any]) -> Tensor:
        """On a slab that brings its own border along the cut dims."""
        padding = frame.uncut(before)
        if not native:
            slab, padding = F.pad(slab, pads, mode=mode) if any(pads) else slab, (0,) * count
        convolve = CONVOLUTIONS[count]
        return convolve(slab, a["weight"], a["bias"], stride, padding, dilation, a["groups"])

    def bind(site: Site) -> Run:
        kernel = Kernel(stride, frame.uncut(before), dilation, a["groups"])
        parted = apart(site, x.name, windows, kernel) if native else None
        if parted is not None:
            return site.named(_conv, lambda a: parted(a["input"], a["weight"], a["bias"]), *CONV)
        fetch, empty = bordered(site, x, mode), site.out().empty

        def work(a: dict[str, Any]) -> Tensor:
            slab = fetch(a["input"])
            return site.nothing(slab, a["weight"], a["bias"]) if empty else run(slab, a)

        return site.named(_conv, work, *CONV)

    outs = {ask.out: layout.follow(ask.shape(ask.out), layout.dims, windows)}
    return Rule(outs, {x.name: windows}, bind, circular=mode == "circular")


def _weight_shape(ask: Ask, weight: Any) -> tuple[int, ...]:
    if ask.module is not None:
        return tuple(weight.shape)
    return ask.whole(weight)


def _paddings(
    padding: Any, kernel: Sequence[int], dilation: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What is added before and after, per dim; "same" puts the odd one behind."""
    if padding == "valid":
        return (0,) * len(kernel), (0,) * len(kernel)
    if padding == "same":
        total = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return tuple(n // 2 for n in total), tuple(n - n // 2 for n in total)
    found = spread_out(padding, len(kernel))
    return found, found


def _transposed(
    input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0,
    output_padding: Any = 0, groups: int = 1, dilation: Any = 1, output_size: Any = None,
) -> None: ...  # fmt: skip


TRANSPOSE = ("weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")


@rule(
    ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
def transposed_convolution(ask: Ask) -> Rule:
    """Run on what reaches this rank's outputs, without padding; then crop, or extend by zeros."""
    a = ask.named(_transposed, TRANSPOSE)
    x, layout = a["input"], ask.primary(a["input"])
    shape = ask.shape(ask.out)
    count = len(shape) - 2
    frame = batched(layout, count)
    kernel = _weight_shape(ask, a["weight"])[2:]
    stride, dilation = spread_out(a["stride"], count), spread_out(a["dilation"], count)
    padding = spread_out(a["padding"], count)
    spreads = [Spread(kernel[d], stride[d], padding[d], dilation[d]) for d in range(count)]
    windows = frame.windows(spreads.__getitem__)
    # What output_padding, or output_size, added to the dims that are whole here.
    lengths = zip(spreads, padding, shape[2:], frame.lengths(), strict=True)
    extra = [m - spread.writes(0, n)[1] + p for spread, p, m, n in lengths]

    def bind(site: Site) -> Run:
        fetch = site.fetch(x, None)
        out, read = site.out(), site.wanted(x.name)
        pads = []
        for d in reversed(range(count)):
            dim = frame.first + d
            if frame.axis(d) is None:
                pads += [0, 0]
            else:
                low, high = spreads[d].writes(read.start[dim], read.stop[dim])
                pads += [low - out.start[dim], out.stop[dim] - high]
        run = TRANSPOSED[count]

        def work(a: dict[str, Any]) -> Tensor:
            part, weight, bias = fetch(a["input"]), a["weight"], a["bias"]
            if out.empty or read.empty:
                y = site.nothing(part, weight, bias)
            else:
                y = run(
                    part, weight, None, stride, frame.uncut(padding), frame.uncut(extra),
                    a["groups"], dilation,
                )  # fmt: skip
                y = F.pad(y, pads) if any(pads) else y
            return y if bias is None else y + bias.view(-1, *(1,) * count)

        return site.named(_transposed, work, *TRANSPOSE)

    return Rule({ask.out: layout.follow(shape, layout.dims, windows)}, {x.name: windows}, bind)


# --- pooling ------------------------------------------------------------------------------------


def _max_pool(
    input: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
    ceil_mode: bool = False, return_indices: bool = False,
) -> None: ...  # fmt: skip


MAX_POOL = ("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")


@rule(
    [f"max_pool{n}d{kind}" for n in (1, 2, 3) for kind in ("", "_with_indices")],
    (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d),
)
def max_pool(ask: Ask) -> Rule:
    """The border is minus infinity; indices count the cells of the whole image."""
    a = ask.named(_max_pool, MAX_POOL)
    x, layout = a["input"], ask.primary(a["input"])
    shape = ask.shape(ask.call.writes[0])
    count = len(shape) - 2
    frame = batched(layout, count)
    pool = _Pool.of(a, count)
    windows = frame.windows(pool.window)
    _reject_bare_windows(pool, frame, shape[2:])
    indices = len(ask.call.writes) > 1

    def bind(site: Site) -> Run:
        fetch = site.fetch(x, -torch.inf)
        out = site.out(ask.call.writes[0])
        run = MAX_POOLS[count]
        axes = [frame.axis(d) for d in range(count)]
        starts = [0 if k is None else site.slab_span(x.name, k)[0] for k in axes]

        def work(a: dict[str, Any]) -> Any:
            slab = fetch(a["input"])
            if out.empty:
                y = site.nothing(slab)
                return (y, torch.zeros_like(y, dtype=torch.int64)) if indices else y
            found = run(
                slab, pool.kernel, pool.stride, frame.uncut(pool.padding), pool.dilation,
                a["ceil_mode"], indices,
            )  # fmt: skip
            if not indices:
                return found
            return found[0], _whole_image(found[1], slab.shape[2:], starts, frame.lengths())

        return site.named(_max_pool, work, *MAX_POOL)

    outs = {name: layout.follow(shape, layout.dims, windows) for name in ask.call.writes}
    return Rule(outs, {x.name: windows}, bind)


@dataclass(frozen=True)
class _Pool:
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @classmethod
    def of(cls, a: dict[str, Any], count: int) -> _Pool:
        stride = a["stride"] if a["stride"] not in (None, [], ()) else a["kernel_size"]
        numbers = (a["kernel_size"], stride, a["padding"], a.get("dilation", 1))
        return cls(*(spread_out(n, count) for n in numbers))

    def window(self, d: int) -> Slide:
        return Slide(self.kernel[d], self.stride[d], self.padding[d], self.dilation[d])


def _reject_bare_windows(pool: _Pool, frame: Frame, outputs: Sequence[int]) -> None:
    """With dilation, a window may hit nothing but border; what ATen does then is not defined."""
    for d, (n, m) in enumerate(zip(frame.lengths(), outputs, strict=True)):
        for o in (*range(min(m, 2)), *range(max(m - 2, 0), m)):
            start = pool.stride[d] * o - pool.padding[d]
            if not any(0 <= start + pool.dilation[d] * k < n for k in range(pool.kernel[d])):
                raise NotTileable("has a window in which there is no cell of the image")


def _whole_image(
    indices: Tensor, slab: Sequence[int], starts: Sequence[int], lengths: Sequence[int]
) -> Tensor:
    """Positions in a slab, as positions in the whole image."""
    found = torch.zeros_like(indices)
    for d in range(len(slab)):
        place = indices // prod(slab[d + 1 :]) % slab[d] + starts[d]
        found = found * lengths[d] + place
    return found


def _average_pool(
    input: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: Any = None,
) -> None: ...  # fmt: skip


AVERAGE_POOL = (
    "kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override",
)  # fmt: skip


@rule(("avg_pool1d", "avg_pool2d", "avg_pool3d"), (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d))
def average_pool(ask: Ask) -> Rule:
    """A sum over the window, divided by how many cells it counts: both follow from the place."""
    a: dict[str, Any] = {"divisor_override": None} | ask.named(_average_pool, AVERAGE_POOL)
    x, layout = a["input"], ask.primary(a["input"])
    shape = ask.shape(ask.out)
    count = len(shape) - 2
    frame = batched(layout, count)
    pool = _Pool.of(a, count)
    windows = frame.windows(pool.window)
    counts = [
        _counts(pool, d, n, m, a["count_include_pad"])
        for d, (n, m) in enumerate(zip(frame.lengths(), shape[2:], strict=True))
    ]
    pads = []
    for d in reversed(range(count)):
        reach = pool.stride[d] * (shape[2 + d] - 1) + pool.kernel[d]
        behind = reach - pool.padding[d] - frame.lengths()[d]
        pads += [pool.padding[d], behind] if frame.axis(d) is None else [0, 0]

    def bind(site: Site) -> Run:
        fetch = site.fetch(x)
        out = site.out()
        factor = _factor(pool, counts, out, frame.first, a["divisor_override"])

        def work(a: dict[str, Any]) -> Tensor:
            slab = fetch(a["input"])
            if out.empty:
                return site.nothing(slab)
            if any(pads):
                slab = F.pad(slab, pads)
            y = AVERAGE_POOLS[count](slab, pool.kernel, pool.stride)
            return y if factor is None else y * factor.to(y)

        return site.named(_average_pool, work, *AVERAGE_POOL)

    return Rule({ask.out: layout.follow(shape, layout.dims, windows)}, {x.name: windows}, bind)


def _counts(pool: _Pool, d: int, n: int, m: int, include_pad: bool) -> list[int]:
    """How many cells each window along a dim counts."""
    kernel, stride, padding = pool.kernel[d], pool.stride[d], pool.padding[d]
    found = []
    for o in range(m):
        start = stride * o - padding
        if include_pad:
            found.append(min(start + kernel, n + padding) - start)
        else:
            found.append(min(start + kernel, n) - max(start, 0))
    return found


def _factor(
    pool: _Pool, counts: list[list[int]], out: Any, first: int, override: int | None
) -> Tensor | None:
    """What turns the mean over the kernel into the mean over what counts."""
    size = prod(pool.kernel)
    if override:
        return torch.tensor(size / override, dtype=torch.float64)
    rows = [counts[d][out.start[first + d] : out.stop[first + d]] for d in range(len(counts))]
    if all(n == pool.kernel[d] for d, row in enumerate(rows) for n in row):
        return None
    factor = torch.ones((), dtype=torch.float64)
    for row in rows:
        factor = factor.unsqueeze(-1) * torch.tensor(row, dtype=torch.float64)
    return size / factor


def _unpool(
    input: Any, indices: Any, kernel_size: Any, stride: Any = None, padding: Any = 0,
    output_size: Any = None,
) -> None: ...  # fmt: skip


UNPOOL = ("kernel_size", "stride", "padding")


@rule(
    ("max_unpool1d", "max_unpool2d", "max_unpool3d"),
    (nn.MaxUnpool1d, nn.MaxUnpool2d, nn.MaxUnpool3d),
)
def max_unpool(ask: Ask) -> Rule:
    """Each value goes where its index says; a rank fetches all whose windows touch its box."""
    a = ask.named(_unpool, UNPOOL)
    x, where = a["input"], a["indices"]
    layout = ask.layout(x)
    shape = ask.shape(ask.out)
    count = len(shape) - 2
    pool = _Pool.of(a, count)
    if layout is None or ask.layout(where) is None or layout.dims != ask.layouts[where.name].dims:
        raise NotTileable("takes values and indices that are not cut the same way")
    maker = ask.maker(where.name)
    if maker is None or _pool_of(maker, count) != pool:
        raise NotTileable("takes indices that do not come from a max-pool with the same windows")
    frame = batched(layout, count)
    spreads = [Spread(pool.kernel[d], pool.stride[d], pool.padding[d]) for d in range(count)]
    windows = frame.windows(spreads.__getitem__)

    def bind(site: Site) -> Run:
        fetch, fetch_where = site.fetch(x, None), site.fetch(where, None)
        out = site.out()
        room = prod(out.shape[2:])

        def work(a: dict[str, Any]) -> Tensor:
            part, at = fetch(a["input"]), fetch_where(a["indices"])
            if out.empty:
                return site.nothing(part)
            flat, inside = torch.zeros_like(at), torch.ones_like(at, dtype=torch.bool)
            for d in range(count):
                place = at // prod(shape[3 + d :]) % shape[2 + d] - out.start[2 + d]
                inside &= (place >= 0) & (place < out.shape[2 + d])
                flat = flat * out.shape[2 + d] + place
            flat = torch.where(inside, flat, room)  # one more cell for what is others'
            empty = part.new_zeros((*out.shape[:2], room + 1))
            y = empty.scatter(2, flat.flatten(2), part.flatten(2))
            return y[..., :room].view(out.shape)

        return site.named(_unpool, work, *UNPOOL)

    outs = {ask.out: layout.follow(shape, layout.dims, windows)}
    return Rule(outs, {x.name: windows, where.name: windows}, bind)


def _pool_of(maker: Ask, count: int) -> _Pool | None:
    """The windows of the max-pool that made some indices."""
    if maker.make is not max_pool:
        return None
    return _Pool.of(maker.named(_max_pool, MAX_POOL), count)
