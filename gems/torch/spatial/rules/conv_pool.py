"""Layers that slide a window over the image: convolution, pooling and their opposites."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from gems.geometry.layout import Layout
from gems.geometry.window import Slide, Spread, Window
from gems.torch.spatial.op import NotTileable, Op, Run
from gems.torch.spatial.rule import Rule, one_input, rule, rule_of
from gems.torch.spatial.rules.overlap_conv import Kernel, overlapped
from gems.torch.spatial.rules.padding import Bent, bordered
from gems.torch.spatial.rules.unread_conv import UnreadConvolution
from gems.torch.spatial.tile import Tile

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
    """The spatial dims of a layer's input: which are tiled, and by which axis of the grid."""

    layout: Layout
    count: int  # spatial dims

    @property
    def first(self) -> int:
        return len(self.layout.shape) - self.count

    def axis(self, spatial: int) -> int | None:
        dim = self.first + spatial
        return self.layout.dims.index(dim) if dim in self.layout.dims else None

    def untiled(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """Settings for the dims that are whole here; 0 for those that a padded takes care of."""
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
def convolution(op: Op) -> Rule:
    a = op.named(_conv, CONV)
    layout = op.primary(a["input"])
    count = len(op.shape(op.out)) - 2
    frame = batched(layout, count)
    kernel = op.shape(a["weight"])[2:]
    stride, dilation = spread_out(a["stride"], count), spread_out(a["dilation"], count)
    before, after = _paddings(a["padding"], kernel, dilation)
    mode = "constant" if a["padding_mode"] == "zeros" else a["padding_mode"]
    lengths = frame.lengths()

    def window(d: int) -> Window:
        slide = Slide(kernel[d], stride[d], before[d], dilation[d])
        return slide if mode in ("constant", "circular") else Bent(slide, lengths[d], mode)

    windows = frame.windows(window)
    native = before == after and mode == "constant"
    around = zip(frame.untiled(before), frame.untiled(after), strict=True)
    pads = [n for pair in reversed(list(around)) for n in pair]
    x = a["input"]

    def run(padded: Tensor, a: dict[str, Any]) -> Tensor:
        """On a padded that brings its own border along the tiled dims."""
        padding = frame.untiled(before)
        if not native:
            padded, padding = F.pad(padded, pads, mode=mode) if any(pads) else padded, (0,) * count
        convolve = CONVOLUTIONS[count]
        return convolve(padded, a["weight"], a["bias"], stride, padding, dilation, a["groups"])

    def bind(tile: Tile) -> Run:
        kernel = Kernel(stride, frame.untiled(before), dilation, a["groups"])
        overlap = overlapped(tile, x.name, windows, kernel) if native else None
        if overlap is not None:
            return tile.named(_conv, lambda a: overlap(a["input"], a["weight"], a["bias"]), *CONV)
        with_halo, empty = bordered(tile, x, mode), tile.out().empty

        def work(a: dict[str, Any]) -> Tensor:
            padded = with_halo(a["input"])
            if empty:
                return tile.nothing(padded, a["weight"], a["bias"])
            if native and tile.unread(padded):
                given = padded, a["weight"], a["bias"], stride, frame.untiled(before), dilation
                return UnreadConvolution.apply(*given, a["groups"])  # type: ignore
            return run(padded, a)

        return tile.named(_conv, work, *CONV)

    found = one_input(op, x, bind, windows, circular=mode == "circular")
    return replace(found, relative=mode == "constant")


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
def transposed_convolution(op: Op) -> Rule:
    """Run on what reaches this rank's outputs, without padding; then crop, or extend by zeros."""
    a = op.named(_transposed, TRANSPOSE)
    x, layout = a["input"], op.primary(a["input"])
    shape = op.shape(op.out)
    count = len(shape) - 2
    frame = batched(layout, count)
    kernel = op.shape(a["weight"])[2:]
    stride, dilation = spread_out(a["stride"], count), spread_out(a["dilation"], count)
    padding = spread_out(a["padding"], count)
    spreads = [Spread(kernel[d], stride[d], padding[d], dilation[d]) for d in range(count)]
    windows = frame.windows(spreads.__getitem__)
    # What output_padding, or output_size, added to the dims that are whole here.
    lengths = zip(spreads, padding, shape[2:], frame.lengths(), strict=True)
    extra = [m - spread.writes(0, n)[1] + p for spread, p, m, n in lengths]

    def bind(tile: Tile) -> Run:
        with_halo = tile.with_halo(x)
        out, read = tile.out(), tile.wanted(x.name)
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
            part, weight, bias = with_halo(a["input"]), a["weight"], a["bias"]
            if out.empty or read.empty:
                y = tile.nothing(part, weight, bias)
            else:
                y = run(
                    part, weight, None, stride, frame.untiled(padding), frame.untiled(extra),
                    a["groups"], dilation,
                )  # fmt: skip
                y = F.pad(y, pads) if any(pads) else y
            return y if bias is None else y + bias.view(-1, *(1,) * count)

        return tile.named(_transposed, work, *TRANSPOSE)

    return one_input(op, x, bind, windows)


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
def max_pool(op: Op) -> Rule:
    """The border is minus infinity; indices count the cells of the whole image."""
    a = op.named(_max_pool, MAX_POOL)
    x, layout = a["input"], op.primary(a["input"])
    shape = op.shape(op.call.writes[0])
    count = len(shape) - 2
    frame = batched(layout, count)
    pool = _Pool.of(a, count)
    windows = frame.windows(pool.window)
    _reject_bare_windows(pool, frame, shape[2:])
    indices = len(op.call.writes) > 1

    def bind(tile: Tile) -> Run:
        with_halo = tile.with_halo(x, -torch.inf)
        out = tile.out(op.call.writes[0])
        run = MAX_POOLS[count]
        axes = [frame.axis(d) for d in range(count)]
        starts = [0 if k is None else tile.padded_span(x.name, k)[0] for k in axes]

        def work(a: dict[str, Any]) -> Any:
            padded = with_halo(a["input"])
            if out.empty:
                y = tile.nothing(padded)
                return (y, torch.zeros_like(y, dtype=torch.int64)) if indices else y
            found = run(
                padded, pool.kernel, pool.stride, frame.untiled(pool.padding), pool.dilation,
                a["ceil_mode"], indices,
            )  # fmt: skip
            if not indices:
                return found
            return found[0], _whole_image(found[1], padded.shape[2:], starts, frame.lengths())

        return tile.named(_max_pool, work, *MAX_POOL)

    return replace(one_input(op, x, bind, windows), relative=not indices)


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
    indices: Tensor, padded: Sequence[int], starts: Sequence[int], lengths: Sequence[int]
) -> Tensor:
    """Positions in a padded, as positions in the whole image."""
    found = torch.zeros_like(indices)
    for d in range(len(padded)):
        place = indices // prod(padded[d + 1 :]) % padded[d] + starts[d]
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
def average_pool(op: Op) -> Rule:
    """A sum over the window, divided by how many cells it counts: both follow from the place."""
    a: dict[str, Any] = {"divisor_override": None} | op.named(_average_pool, AVERAGE_POOL)
    x, layout = a["input"], op.primary(a["input"])
    shape = op.shape(op.out)
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

    def bind(tile: Tile) -> Run:
        with_halo = tile.with_halo(x, 0.0)
        out = tile.out()
        factor = _factor(pool, counts, out, frame.first, a["divisor_override"])

        def work(a: dict[str, Any]) -> Tensor:
            padded = with_halo(a["input"])
            if out.empty:
                return tile.nothing(padded)
            if any(pads):
                padded = F.pad(padded, pads)
            y = AVERAGE_POOLS[count](padded, pool.kernel, pool.stride)
            return y if factor is None else y * factor.to(y)

        return tile.named(_average_pool, work, *AVERAGE_POOL)

    return one_input(op, x, bind, windows)


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
def max_unpool(op: Op) -> Rule:
    """Each value goes to its index; a rank fetches all whose windows touch its box."""
    a = op.named(_unpool, UNPOOL)
    x, where = a["input"], a["indices"]
    layout = op.layout(x)
    shape = op.shape(op.out)
    count = len(shape) - 2
    pool = _Pool.of(a, count)
    if layout is None or op.layout(where) is None or layout.dims != op.layouts[where.name].dims:
        raise NotTileable("takes values and indices that are not tiled the same way")
    producer = op.producer(where.name)
    if producer is None or _pool_of(producer, count) != pool:
        raise NotTileable("takes indices that do not come from a max-pool with the same windows")
    frame = batched(layout, count)
    spreads = [Spread(pool.kernel[d], pool.stride[d], pool.padding[d]) for d in range(count)]
    windows = frame.windows(spreads.__getitem__)

    def bind(tile: Tile) -> Run:
        with_halo, indices_with_halo = tile.with_halo(x), tile.with_halo(where)
        out = tile.out()
        cells = prod(out.shape[2:])

        def work(a: dict[str, Any]) -> Tensor:
            part, at = with_halo(a["input"]), indices_with_halo(a["indices"])
            if out.empty:
                return tile.nothing(part)
            flat, inside = torch.zeros_like(at), torch.ones_like(at, dtype=torch.bool)
            for d in range(count):
                place = at // prod(shape[3 + d :]) % shape[2 + d] - out.start[2 + d]
                inside &= (place >= 0) & (place < out.shape[2 + d])
                flat = flat * out.shape[2 + d] + place
            flat = torch.where(inside, flat, cells)  # one more cell, for values of other ranks
            empty = part.new_zeros((*out.shape[:2], cells + 1))
            y = empty.scatter(2, flat.flatten(2), part.flatten(2))
            return y[..., :cells].view(out.shape)

        return tile.named(_unpool, work, *UNPOOL)

    outs = {op.out: layout.follow(shape, layout.dims, windows)}
    return Rule(outs, {x.name: windows, where.name: windows}, bind)


def _pool_of(producer: Op, count: int) -> _Pool | None:
    """The windows of the max-pool that made some indices."""
    if rule_of(producer) is not max_pool:
        return None
    return _Pool.of(producer.input_first().named(_max_pool, MAX_POOL), count)
