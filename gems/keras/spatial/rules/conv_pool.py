"""Convolution, transposed convolution and pooling on tiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import tensorflow as tf

from gems.geometry.layout import Layout, clipped, read
from gems.geometry.window import Slide, Spread
from gems.keras.spatial.op import NotTileable, Op, moved, shape_of
from gems.keras.spatial.rule import Rule, Tile, one_input, rule
from gems.keras.tracing.subgraph import Tensor

CONVOLUTIONS = {"Conv2D", "Conv3D", "DepthwiseConv2dNative"}


def same_padding(length: int, kernel: int, stride: int, dilation: int = 1) -> int:
    """What padding SAME adds before the first cell, where a kernel slides over `length` cells."""
    reach = dilation * (kernel - 1)
    return max((-(-length // stride) - 1) * stride + reach + 1 - length, 0) // 2


@dataclass(frozen=True)
class Kernel:
    """Lengths by dim of the image; those of samples and channels are 1."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    padding: str
    explicit: tuple[int, ...] = ()

    def before(self, dim: int, length: int) -> int:
        """Padding before the first of `length` cells that the kernel slides over."""
        if self.padding == "EXPLICIT":
            return self.explicit[2 * dim]
        if self.padding == "VALID":
            return 0
        return same_padding(length, self.shape[dim], self.strides[dim], self.dilations[dim])

    def slides(self, layout: Layout) -> list[Slide]:
        return [
            Slide(
                self.shape[d], self.strides[d], self.before(d, layout.shape[d]), self.dilations[d]
            )
            for d in layout.dims
        ]

    def others(self, layout: Layout, back: bool = False) -> tuple[tuple[int, int], ...]:
        """Padding along dims that are not tiled: before and after."""
        found = [(0, 0)] * len(layout.shape)
        for dim, length in enumerate(layout.shape):
            if dim in layout.dims or self.shape[dim] * self.strides[dim] == 1:
                continue
            reach = self.dilations[dim] * (self.shape[dim] - 1)
            if self.padding == "EXPLICIT":
                found[dim] = (self.explicit[2 * dim], self.explicit[2 * dim + 1])
            elif self.padding == "SAME":
                before = self.before(dim, length)
                count = -(-length // self.strides[dim])
                total = max((count - 1) * self.strides[dim] + reach + 1 - length, 0)
                found[dim] = (before, total - before)
        return tuple(found)


def channel_dim(op: Op, rank: int) -> int:
    return rank - 1 if op.attr("data_format", "NHWC").endswith("C") else 1


def kernel_of(op: Op, lengths: Sequence[int], rank: int) -> Kernel:
    """`lengths` are those of the kernel along the dims of space."""
    ones = [1] * rank
    space = [d for d in range(1, rank) if d != channel_dim(op, rank)]
    for d, n in zip(space, lengths, strict=True):
        ones[d] = n
    found = Kernel(
        tuple(ones),
        tuple(op.attr("strides")),
        tuple(op.attr("dilations", [1] * rank)),
        op.attr("padding"),
        tuple(op.attr("explicit_paddings", ())),
    )
    return found


def _reject_channels(layout: Layout, channels: int) -> None:
    if channels in layout.dims or 0 in layout.dims:
        raise NotTileable("mixes the channels, along which its input is tiled")


def padded(x: Tensor, pads: Sequence[tuple[int, int]], fill: float = 0.0) -> Tensor:
    if not any(a or b for a, b in pads):
        return x
    return tf.pad(x, pads, constant_values=tf.constant(fill, x.dtype))


# --- convolution ----------------------------------------------------------------------------------


@rule(*CONVOLUTIONS)
def convolution(op: Op) -> Rule:
    x, w = op.inputs
    layout = op.only(x)
    kernel = kernel_of(op, shape_of(w)[:-2], len(layout.shape))
    return _convolution(op, layout, kernel, lambda x, w: _run(op, x, w))


def _convolution(
    op: Op, layout: Layout, kernel: Kernel, run: Callable[[Tensor, Tensor], Tensor]
) -> Rule:
    x, w = op.inputs
    _reject_channels(layout, channel_dim(op, len(layout.shape)))
    others = kernel.others(layout)

    def write(tile: Tile) -> list[Tensor]:
        halo_tile, box = tile.read(x, 0.0), tile.box(op.out)
        if box.empty:
            return [tf.zeros(box.shape, op.out.dtype)]
        return [run(tile.bordered(halo_tile, others), tile.read(w))]

    return one_input(op, x, kernel.slides(layout), write)


def _run(op: Op, x: Tensor, w: Tensor) -> Tensor:
    options = dict(
        strides=op.attr("strides"),
        dilations=op.attr("dilations"),
        padding="VALID",
        data_format=op.attr("data_format"),
    )
    return getattr(tf.raw_ops, op.type)(input=x, filter=w, **options)


# --- dilation, which TensorFlow may write as convolution of every n-th cell -----------------------


@rule("SpaceToBatchND")
def dilated(op: Op) -> Rule:
    """SpaceToBatchND, a convolution of stride 1, BatchToSpaceND: one convolution with dilation."""
    chain = chain_of(op, {*CONVOLUTIONS, "ExpandDims", "Squeeze"}, "BatchToSpaceND")
    inner = [one for one in chain if one.type in CONVOLUTIONS]
    if len(inner) != 1:
        raise NotTileable("does not stand before a convolution")
    conv, last = inner[0], chain[-1]
    layout, x = op.only(op.inputs[0]), op.inputs[0]
    if conv.inputs[1].name in op.layouts or set(conv.attr("strides")) != {1}:
        raise NotTileable("stands before a convolution with strides")
    blocks, before = op.const(1), op.const(2)
    after = last.const(2)
    rank, w = len(layout.shape), conv.inputs[1]
    flat = rank - 2 < len(shape_of(w)) - 2  # in one dim, with a second of length 1
    lengths = shape_of(w)[1:-2] if flat else shape_of(w)[:-2]
    ones = [1] * rank
    shape, dilations, explicit = list(ones), list(ones), [0] * (2 * rank)
    for i, (length, block) in enumerate(zip(lengths, blocks, strict=True)):
        dim = 1 + i
        shape[dim], dilations[dim] = length, int(block)
        reach = int(block) * (length - 1)
        made = shape_of(last.out)[dim]
        first = int(before[i][0]) - int(after[i][0])
        explicit[2 * dim], explicit[2 * dim + 1] = first, made + reach - layout.shape[dim] - first
    if conv.attr("padding") != "VALID":
        raise NotTileable("stands before a padded convolution")
    kernel = Kernel(tuple(shape), tuple(ones), tuple(dilations), "EXPLICIT", tuple(explicit))
    _reject_channels(layout, rank - 1)
    others = kernel.others(layout)

    def run(x: Tensor, w: Tensor) -> Tensor:
        if conv.type == "DepthwiseConv2dNative":
            if flat:
                raise AssertionError("Keras gives depthwise convolutions in one dim no dilation")
            return tf.nn.depthwise_conv2d(x, w, [1] * rank, "VALID", dilations=dilations[1:-1])
        w = w[0] if flat else w
        return tf.nn.convolution(x, w, padding="VALID", dilations=dilations[1:-1])

    def write(tile: Tile) -> list[Tensor]:
        halo_tile, box = tile.read(x, 0.0), tile.box(last.out)
        if box.empty:
            return [tf.zeros(box.shape, last.out.dtype)]
        return [run(tile.bordered(halo_tile, others), tile.read(w))]

    covers = tuple(one.op.name for one in chain)
    return one_input(op, x, kernel.slides(layout), write, last=last.out, covers=covers)


def chain_of(op: Op, inner: set[str], end: str, first: int = 0) -> list[Op]:
    """The ops behind this one up to one of type `end`, if each result is read by the next only."""
    chain, at = [], op
    while True:
        readers = op.readers(at.out)
        if len(readers) != 1 or (readers[0].type not in inner and readers[0].type != end):
            raise NotTileable("stands where its result is no image")
        if readers[0].inputs[first].name != at.out.name:
            raise NotTileable("stands where its result is no image")
        at = replace(op, op=readers[0])
        chain.append(at)
        if at.type == end:
            return chain


# --- convolutions inside of functions -------------------------------------------------------------


@rule("PartitionedCall", "StatefulPartitionedCall")
def compiled(op: Op) -> Rule:
    """Keras compiles some convolutions by XLA: those in groups, and some with channels first."""
    nodes = _nodes(op)
    inner = [node for node in nodes if node.op in CONVOLUTIONS]
    others = {node.op for node in nodes} - CONVOLUTIONS - {"Identity", "NoOp", "Const"}
    extra = op.outputs[1:]  # which its gradient has added, and nobody else reads
    if len(inner) != 1 or others or len(op.inputs) != 2 or any(map(op.readers, extra)):
        raise NotTileable("is a function")
    node = inner[0]
    seen = _Inner(op.op, op.layouts, op.forward, node)
    x, w = op.inputs
    layout = op.only(x)
    kernel = kernel_of(seen, shape_of(w)[:-2], len(layout.shape))

    @tf.function(jit_compile=True, autograph=False)
    def run(x: Tensor, w: Tensor) -> Tensor:
        return _run(seen, x, w)

    return _convolution(seen, layout, kernel, run)


@dataclass(frozen=True)
class _Inner(Op):
    """The call of a function that has one op, with the attributes of that."""

    node: Any = None

    @property
    def type(self) -> str:
        return self.node.op

    @property
    def out(self) -> Tensor:
        return self.op.outputs[0]

    def attr(self, name: str, default: Any = None) -> Any:
        if name not in self.node.attr:
            return default
        found = self.node.attr[name]
        return found.s.decode() if found.HasField("s") else list(found.list.i)


def _nodes(op: Op) -> list[Any]:
    name = op.op.get_attr("f").name
    functions = {f.signature.name: f for f in op.op.graph.as_graph_def().library.function}
    return list(functions[name].node_def) if name in functions else []


# --- pooling --------------------------------------------------------------------------------------


@rule("MaxPool", "MaxPool3D")
def max_pool(op: Op) -> Rule:
    layout, kernel, _ = _pool(op)
    others = kernel.others(layout)
    (x,) = op.inputs

    def write(tile: Tile) -> list[Tensor]:
        halo_tile, box = tile.read(x, -inf), tile.box(op.out)
        if box.empty:
            return [tf.zeros(box.shape, x.dtype)]
        halo_tile = tile.bordered(halo_tile, others, -inf)
        return [getattr(tf.raw_ops, op.type)(input=halo_tile, **_pool_options(op))]

    return one_input(op, x, kernel.slides(layout), write)


@rule("AvgPool", "AvgPool3D")
def average_pool(op: Op) -> Rule:
    """The cells beyond the border count for nothing, also in the number of cells."""
    layout, kernel, space = _pool(op)
    (x,), others = op.inputs, kernel.others(layout)

    def write(tile: Tile) -> list[Tensor]:
        halo_tile, box = tile.read(x, 0.0), tile.box(op.out)
        if box.empty:
            return [tf.zeros(box.shape, x.dtype)]
        first = {"input" if op.type == "AvgPool3D" else "value": tile.bordered(halo_tile, others)}
        y = getattr(tf.raw_ops, op.type)(**first, **_pool_options(op))
        for dim in space:
            k, length = kernel.shape[dim], layout.shape[dim]
            window = Slide(k, kernel.strides[dim], kernel.before(dim, length))
            reads = [window.reads(o, o + 1) for o in range(box.start[dim], box.stop[dim])]
            counts = [min(b, length) - max(a, 0) for a, b in reads]
            if any(n != k for n in counts):
                shape = [-1 if d == dim else 1 for d in range(len(layout.shape))]
                y = y * tf.reshape(tf.constant([k / n for n in counts], y.dtype), shape)
        return [y]

    return one_input(op, x, kernel.slides(layout), write)


def _pool(op: Op) -> tuple[Layout, Kernel, list[int]]:
    layout = op.only(op.inputs[0])
    rank = len(layout.shape)
    space = [d for d in range(1, rank) if d != channel_dim(op, rank)]
    if op.attr("ksize")[channel_dim(op, rank)] != 1 or op.attr("ksize")[0] != 1:
        raise NotTileable("pools channels or samples")
    return layout, kernel_of(op, [op.attr("ksize")[d] for d in space], rank), space


def _pool_options(op: Op) -> dict[str, Any]:
    options = {name: op.attr(name) for name in ("ksize", "strides", "data_format")}
    return {**options, "padding": "VALID"}


# --- transposed convolution -----------------------------------------------------------------------


@rule("Conv2DBackpropInput", "Conv3DBackpropInputV2")
def transposed(op: Op) -> Rule:
    """Each cell of the image writes a kernel's extent of outputs, here without padding; what lies
    beyond this rank's part of the result is dropped, and what no cell reaches is zero."""
    _, w, x = op.inputs
    layout, shape = op.only(x), shape_of(op.out)
    rank = len(shape)
    kernel = kernel_of(op, shape_of(w)[:-2], rank)
    _reject_channels(layout, channel_dim(op, rank))
    spread = {
        d: Spread(k, s, kernel.before(d, shape[d]), kernel.dilations[d])
        for d, (k, s) in enumerate(zip(kernel.shape, kernel.strides, strict=True))
    }
    space = [d for d in range(1, rank) if d != channel_dim(op, rank)]
    windows = [spread[d] for d in layout.dims]
    made = layout.follow(shape, layout.dims, windows)
    wants = clipped(read(made.own, windows), layout)

    def write(tile: Tile) -> list[Tensor]:
        box, halo_tile = tile.box(op.out), tile.read(x)
        if box.empty or 0 in halo_tile.shape:
            return [tf.zeros(box.shape, op.out.dtype)]
        size, start, pads = list(box.shape), [0] * rank, [(0, 0)] * rank
        for d in space:
            low = 0 if d not in layout.dims else tile.span(x, layout.dims.index(d))[0]
            first, last = spread[d].writes(low, low + halo_tile.shape[d])
            size[d], start[d] = last - first, max(box.start[d] - first, 0)
            pads[d] = (max(first - box.start[d], 0), max(box.stop[d] - last, 0))
        options = {name: op.attr(name) for name in ("strides", "data_format", "dilations")}
        y = getattr(tf.raw_ops, op.type)(
            input_sizes=size,
            filter=tile.read(w),
            out_backprop=halo_tile,
            padding="VALID",
            **options,
        )
        kept = [n - a - b for n, (a, b) in zip(box.shape, pads, strict=True)]
        return [padded(tf.slice(y, start, kept) if kept != size else y, pads)]

    return Rule({op.out.name: made}, {x.name: wants}, write)


@rule("BiasAdd")
def bias(op: Op) -> Rule:
    x, b = op.inputs
    layout = op.only(x)
    _reject_channels(layout, channel_dim(op, len(layout.shape)))

    def write(tile: Tile) -> list[Tensor]:
        return tile.copied([tile.read(x), tile.read(b)])

    out = moved(layout, shape_of(op.out), layout.dims)
    return Rule({op.out.name: out}, {x.name: out.own}, write)
