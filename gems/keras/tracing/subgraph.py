"""Parts of a TensorFlow graph as functions: what lies between some tensors and others.

Nothing here knows of Keras or of stages. Tensors are symbolic, of one graph without resources.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import tensorflow as tf

lock = threading.RLock()  # tracing uses globals of TensorFlow and of Keras
SHAPES = ("Shape", "ShapeN", "Size", "Rank")
Tensor = Any  # a symbolic tf.Tensor


@dataclass(frozen=True)
class Function:
    """A part of a graph. `feeds` and `fetches` name what goes in and comes out, in order."""

    run: Any
    feeds: tuple[str, ...] = ()
    fetches: tuple[str, ...] = ()

    def __call__(self, at: Mapping[str, Any]) -> dict[str, Any]:
        if not self.fetches:
            return {}
        found = self.run(*[at[name] for name in self.feeds])
        return dict(zip(self.fetches, found, strict=True))


NOTHING = Function(None)


def ancestors(roots: Iterable[Tensor], stops: Collection[str] = ()) -> dict[str, Tensor]:
    """The tensors that these depend on, and these, by name; not what is behind `stops`, or what is
    only asked for its shape."""
    found: dict[str, Tensor] = {}
    stack = list(roots)
    while stack:
        t = stack.pop()
        if t.name in found:
            continue
        found[t.name] = t
        if t.name not in stops and not is_shape(t.op):
            stack.extend(t.op.inputs)
    return found


def dependents(graph: Any, sources: Iterable[Tensor]) -> set[str]:
    """Names of the ops that depend on `sources`, without the sources' own. What asks for the shape
    of a tensor only does not depend on it."""
    own = {t.op.name for t in sources}
    seen = set(own)
    for op in graph.get_operations():
        if not is_shape(op) and any(x.op.name in seen for x in op.inputs):
            seen.add(op.name)
    return seen - own


def is_shape(op: Any) -> bool:
    """Whether an op gives a shape, which is known before anything runs."""
    return op.type in SHAPES and all(x.shape.is_fully_defined() for x in op.inputs)


def shape_value(t: Tensor) -> Any:
    """What an op for which `is_shape` holds gives."""
    if t.op.type == "Rank":
        return tf.constant(len(t.op.inputs[0].shape), t.dtype)
    shape = t.op.inputs[t.value_index].shape.as_list()
    return tf.constant(prod(shape) if t.op.type == "Size" else shape, t.dtype)


def size(t: Tensor) -> int:
    """Bytes."""
    return prod(t.shape.as_list()) * t.dtype.size


def cut(graph: Any, feeds: Mapping[str, Tensor], fetches: Mapping[str, Tensor]) -> Function:
    """The part of a graph that computes `fetches` out of `feeds`. Of the feeds only those that are
    needed are fed."""
    if not fetches:
        return NOTHING
    stops = {t.name for t in feeds.values()}
    needed = ancestors(fetches.values(), stops)
    used = {name: t for name, t in feeds.items() if t.name in needed}
    shapes = {name: t for name, t in needed.items() if name not in stops and is_shape(t.op)}
    captured = {t.name: outside for outside, t in graph.captures if t.name in needed}
    given = {*stops, *shapes, *captured}
    part = _definition(graph, {t.op.name: t.op for n, t in needed.items() if n not in given})

    consumed = {_tensor_name(name) for node in part.node for name in node.input}

    def run(*values: Any) -> list[Any]:
        at = {t.name: x for t, x in zip(used.values(), values, strict=True)}
        at.update((name, shape_value(t)) for name, t in shapes.items() if name not in at)
        at.update((name, tf.constant(x.numpy())) for name, x in captured.items())
        names = [t.name for t in fetches.values() if t.name not in at]
        read = {n: x for n, x in at.items() if n in consumed}
        made = tf.graph_util.import_graph_def(part, input_map=read, return_elements=names, name="")
        at.update(zip(names, made or (), strict=True))
        return [
            tf.identity(at[t.name]) if t.name in given else at[t.name] for t in fetches.values()
        ]

    specs = [tf.TensorSpec(t.shape, t.dtype) for t in used.values()]
    function = tf.compat.v1.wrap_function(run, specs)
    return Function(function, tuple(used), tuple(fetches))


def _tensor_name(written: str) -> str:
    """Of an input of a node, which leaves out the number of a first result."""
    return written if ":" in written else f"{written}:0"


def _definition(graph: Any, ops: Mapping[str, Any]) -> Any:
    part = tf.compat.v1.GraphDef()
    part.versions.CopyFrom(graph.graph_def_versions)
    if any(a.HasField("func") for op in ops.values() for a in op.node_def.attr.values()):
        part.library.CopyFrom(graph.as_graph_def().library)  # which takes its time
    for op in ops.values():
        node = part.node.add()
        node.CopyFrom(op.node_def)
        inputs = [x for x in node.input if not x.startswith("^")]  # control inputs: checks, prints
        del node.input[:]
        node.input.extend(inputs)
        node.attr.pop("_class", None)  # to be where another op is, which may not be here
    return part
