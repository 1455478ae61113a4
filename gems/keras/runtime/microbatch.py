"""One step's samples, split into micro-batches along their first dimension."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import tensorflow as tf

from gems.errors import ShapeError
from gems.geometry.box import split_points

Form = tuple[tuple[tuple[int, ...], str], ...]  # shape and type of each input


@dataclass(frozen=True)
class Batch:
    """All samples, and where each micro-batch begins and ends. A rank makes tensors only of those
    that it runs. A micro-batch without samples is run by nobody."""

    inputs: list[Any]  # flat
    structure: Any  # the inputs as they were given
    targets: Any
    weights: Any  # of samples, or None
    spans: list[tuple[int, int]]

    @property
    def sizes(self) -> list[int]:
        return [stop - start for start, stop in self.spans]

    @property
    def samples(self) -> int:
        return self.spans[-1][1]

    def input(self, number: int, i: int) -> Any:
        """Of micro-batch `i`."""
        return self._part(self.inputs[number], i)

    def targets_of(self, i: int) -> Any:
        return tf.nest.map_structure(lambda x: self._part(x, i), self.targets)

    def weights_of(self, i: int) -> Any:
        """None if there are none."""
        if self.weights is None:
            return None
        return tf.nest.map_structure(lambda x: self._part(x, i), self.weights)

    def _part(self, x: Any, i: int) -> Any:
        start, stop = self.spans[i]
        return tf.convert_to_tensor(x if (start, stop) == (0, self.samples) else x[start:stop])

    def form(self, i: int) -> Form:
        """What a recording depends on."""
        start, stop = self.spans[i]
        return tuple(
            ((stop - start, *map(int, x.shape[1:])), tf.as_dtype(x.dtype).name) for x in self.inputs
        )


def split(inputs: Any, targets: Any, weights: Any, micro_batches: int) -> Batch:
    """Near-equal micro-batches; fewer samples than micro-batches leave the last ones empty."""
    inputs, targets, weights = (
        tf.nest.map_structure(_array, tree) if tree is not None else None
        for tree in (inputs, targets, weights)
    )
    flat = tf.nest.flatten(inputs)
    lengths = {
        int(x.shape[0]) if len(x.shape) else 0
        for x in (*flat, *tf.nest.flatten(targets), *tf.nest.flatten(weights))
        if x is not None
    }
    if len(lengths) != 1 or not min(lengths):
        shapes = [tuple(x.shape) for tree in (inputs, targets, weights) for x in _leaves(tree)]
        raise ShapeError(
            "inputs, targets and sample weights must be arrays with the samples along their first "
            f"dimension, equally many and at least one; got shapes {shapes}"
        )
    spans = list(pairwise(split_points(lengths.pop(), micro_batches)))
    return Batch(flat, inputs, targets, weights, spans)


def _leaves(tree: Any) -> list[Any]:
    return [x for x in tf.nest.flatten(tree) if x is not None]


def _array(x: Any) -> Any:
    return x if x is None or hasattr(x, "shape") else tf.convert_to_tensor(x)


def describe(form: Form) -> str:
    """Shapes and types, as people write them."""
    return ", ".join(f"{name}{list(shape)}" for shape, name in form)
