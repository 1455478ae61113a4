"""Gradients of a stage, and sums of its running statistics, in flat buffers that are reduced as
they are. Halves are accumulated and reduced in float32."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
import tensorflow as tf

from gems.keras.arrays import ALIGNED, Array, array_of, empty, size, tensor_of

HALVES = ("float16", "bfloat16")
Form = tuple[tuple[int, ...], str]  # shape and type


class GradBucket:
    """Sums by name, zero until something is added. A sum of one is the tensor that came; memory for
    more is taken when it is needed. There each sum begins where TensorFlow can take it over."""

    def __init__(self, forms: Mapping[str, Form]) -> None:
        self.forms = dict(forms)
        self.first: dict[str, Any] = {}  # tensors to which nothing was added
        self.flat: dict[str, Array] = {}
        self.views: dict[str, Array] = {}

    def add(self, name: str, tensor: Any) -> None:
        """The tensor's own type is the one of the variable, or of the sums."""
        if tensor.dtype.name in HALVES:
            tensor = tf.cast(tensor, tf.float32)
        if self.flat and name not in self.first:
            view = self.views[name]
            np.add(view, array_of(tensor), out=view)
        elif name not in self.first:
            self.first[name] = tensor
        else:
            self._allocate()
            np.add(array_of(self.first.pop(name)), array_of(tensor), out=self.views[name])

    def _allocate(self) -> None:
        """Buffers of each type, and a view of them for each name; zero where nothing came yet."""
        if self.flat:
            return
        sizes: dict[str, int] = {}
        places: dict[str, tuple[str, int, int]] = {}
        for name, (shape, dtype) in self.forms.items():
            kind = "float32" if dtype in HALVES else dtype
            start, width = sizes.get(kind, 0), prod(shape) * np.dtype(kind).itemsize
            places[name] = (kind, start, start + width)
            sizes[kind] = start + -(-width // ALIGNED) * ALIGNED
        self.flat = {kind: empty(size) for kind, size in sizes.items()}
        for name, (kind, start, stop) in places.items():
            self.flat[kind][stop : stop + -stop % ALIGNED] = 0  # what is reduced, and read by none
            self.views[name] = self.flat[kind][start:stop].view(kind).reshape(self.forms[name][0])
            if name not in self.first:
                self.views[name][...] = 0

    @property
    def buffers(self) -> list[Array]:
        """To all-reduce, each flat and of one type."""
        self._allocate()
        for name in list(self.first):
            np.copyto(self.views[name], array_of(self.first.pop(name)))
        return [data.view(kind) for kind, data in self.flat.items()]

    @property
    def nbytes(self) -> int:
        """Without what aligns them."""
        if not self.flat:
            return sum(map(size, self.first.values()))
        return sum(view.nbytes for view in self.views.values())

    def tensor(self, name: str) -> Any:
        """The sum as a tensor of the variable's type, on the bucket's memory if that has it."""
        shape, dtype = self.forms[name]
        if name in self.first:
            found = self.first[name]
        else:
            self._allocate()
            view = self.views[name]
            found = tensor_of(view.reshape(-1).view(np.uint8), shape, view.dtype.name)
        return found if found.dtype.name == dtype else tf.cast(found, dtype)
