"""FLOPs and bytes of TensorFlow ops, from their shapes."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from gems.keras.tracing.subgraph import size


def flops(op: Any) -> int:
    """Of multiplications with weights or between values; 0 for what memory decides."""
    count = COUNTS.get(op.type)
    return count(op) if count is not None else 0


def moved(op: Any) -> int:
    """Bytes that are read and written."""
    return sum(size(t) for t in (*op.inputs, *op.outputs) if known(t))


def known(t: Any) -> bool:
    """Whether a tensor is numbers of a known shape."""
    return t.shape.is_fully_defined() and bool(t.dtype.size)


def _shape(t: Any) -> list[int]:
    return t.shape.as_list()


def _convolution(op: Any) -> int:
    kernel = _shape(op.inputs[1])
    return 2 * prod(_shape(op.outputs[0])) * prod(kernel[:-1])


def _depthwise(op: Any) -> int:
    return 2 * prod(_shape(op.outputs[0])) * prod(_shape(op.inputs[1])[:2])


def _transposed(op: Any) -> int:
    return 2 * prod(_shape(op.inputs[2])) * prod(_shape(op.inputs[1])[:-1])


def _product(op: Any) -> int:
    inner = _shape(op.inputs[0])[-2 if _transposes(op) else -1]
    return 2 * prod(_shape(op.outputs[0])) * inner


def _transposes(op: Any) -> bool:
    return op.get_attr("transpose_a" if op.type == "MatMul" else "adj_x")


COUNTS: dict[str, Callable[[Any], int]] = {
    "Conv2D": _convolution,
    "Conv3D": _convolution,
    "DepthwiseConv2dNative": _depthwise,
    "Conv2DBackpropInput": _transposed,
    "Conv3DBackpropInputV2": _transposed,
    "MatMul": _product,
    "BatchMatMulV2": _product,
    "BatchMatMulV3": _product,
}
