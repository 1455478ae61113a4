"""Ops whose gradient is not that of their type: functions, and `tf.custom_gradient`.

The gradient looks at tensors of the recorded graph, or at the function as it was recorded, so it
has no form in the local graph of a rank. Two are known to be written in another way there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tensorflow.python.framework.ops import get_gradient_function

OWN_GRADIENT = "_gradient_op_type"
# TensorFlow's silu: its gradient is that of its ops, which saves less.
SAME_AS_ITS_OPS = ("tensorflow.python.ops.nn_impl",)


def own_gradient(op: Any) -> bool:
    """Whether an op has a gradient that its local form would not have."""
    if any(a.HasField("func") for a in op.node_def.attr.values()):
        return True
    if OWN_GRADIENT not in op.node_def.attr:
        return False
    modules = {getattr(f, "__module__", "") for f in _inside(get_gradient_function(op), depth=3)}
    return not modules & {*SAME_AS_ITS_OPS}


def _inside(function: Any, depth: int) -> Iterator[Any]:
    """A function, and those that it closes over."""
    yield function
    for cell in getattr(function, "__closure__", None) or () if depth else ():
        if callable(cell.cell_contents):
            yield from _inside(cell.cell_contents, depth - 1)
