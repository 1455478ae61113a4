"""Tensors of TensorFlow and arrays of numpy on one memory: what transports move.

TensorFlow takes memory over as it is if it is aligned, so buffers that others write are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

ALIGNED = 64  # bytes: what TensorFlow asks for
Array = np.ndarray


def empty(size: int) -> Array:
    """An aligned buffer of so many bytes."""
    whole = np.empty(size + ALIGNED, np.uint8)
    start = -whole.ctypes.data % ALIGNED
    return whole[start : start + size]


class _Writable:
    """The memory of a read-only array: transports only read it, but those of torch want more."""

    def __init__(self, array: Array) -> None:
        data = (array.ctypes.data, False)
        self.array = array
        self.__array_interface__ = {**array.__array_interface__, "data": data}


def array_of(tensor: Any) -> Array:
    """The numbers of a tensor, on its memory."""
    found = np.from_dlpack(tensor)
    return np.asarray(_Writable(found)) if found.size else np.array(found)


def bytes_of(tensor: Any) -> Array:
    """The same as bytes, flat."""
    if tensor.dtype == tf.bfloat16:  # unknown to numpy
        tensor = tf.bitcast(tensor, tf.uint16)
    return array_of(tensor).reshape(-1).view(np.uint8)


def tensor_of(data: Array, shape: Sequence[int], dtype: Any) -> Any:
    """A tensor of these bytes: on their memory, which is its own from now on, or a copy."""
    dtype = tf.as_dtype(dtype)
    plain = tf.uint16 if dtype == tf.bfloat16 else dtype
    array = data.view(plain.as_numpy_dtype).reshape(tuple(shape))
    if array.size and data.ctypes.data % ALIGNED == 0:
        found = tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    else:
        found = tf.constant(array, plain)
    return found if plain == dtype else tf.bitcast(found, dtype)


def size(x: Any) -> int:
    """Bytes of a tensor or an array."""
    return x.nbytes if isinstance(x, np.ndarray) else int(np.prod(x.shape)) * x.dtype.size
