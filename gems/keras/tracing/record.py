"""A Keras model on TensorFlow as one pure graph: variables are inputs, their updates outputs.

The model is called once on symbolic tensors of fixed shapes, in a keras.StatelessScope. What comes
out is a graph without resources: cutting it, differentiating it or running a part of it twice
changes no state. Which layer made which ops is noted on the way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from gems.errors import TraceError
from gems.keras.tracing.subgraph import Tensor, ancestors, dependents, lock
from gems.keras.weight_files import named_variables
from gems.model.graph import Graph

RANDOM = {
    *(
        "RandomUniform",
        "RandomUniformInt",
        "RandomStandardNormal",
        "TruncatedNormal",
        "RandomGamma",
    ),
    *("RandomPoissonV2", "RandomShuffle", "Multinomial", "ParameterizedTruncatedNormal"),
}
PYTHON = {"PyFunc", "PyFuncStateless", "EagerPyFunc"}


@dataclass(frozen=True)
class LayerCall:
    """A call of a layer, and the ops that were made meanwhile: from `start` up to `stop`."""

    path: str
    start: int
    stop: int
    leaf: bool  # whether no other layer was called inside


@dataclass
class Recording:
    """The graph of a model, for inputs of one form. Weights and state are by path of the variable.

    `arrivals` are placeholders beside the inputs, of what comes from elsewhere while the graph
    runs: an exchange inside of a stage.
    """

    tf_graph: Any
    inputs: list[Tensor]
    weights: dict[str, Tensor]  # trained
    state: dict[str, Tensor]  # not trained
    outputs: list[Tensor]
    structure: Any  # of the outputs
    updates: dict[str, Tensor]  # new values of the state that a call changes
    losses: list[Tensor]  # of regularizers and add_loss
    calls: list[LayerCall]
    training: bool
    arrivals: dict[str, Tensor] = field(default_factory=dict)
    live: set[str] = field(default_factory=set)  # ops that depend on the inputs, or give an output
    forward: set[str] = field(default_factory=set)  # all ops of the model, before any gradient
    ops: list[list[Any]] = field(default_factory=list)  # of each block of `graph`
    unconnected: set[str] = field(default_factory=set)  # weights that the loss does not depend on
    graph: Graph = field(default_factory=lambda: Graph((), (), (), (), (), ()))

    def tensor(self, name: str) -> Tensor:
        return self.tf_graph.as_graph_element(name)


def record(model: keras.Model, specs: Any, *, training: bool) -> Recording:
    """The model's graph on inputs like `specs`, tf.TensorSpecs in the structure of its inputs."""
    if not model.built:
        with lock:
            model(tf.nest.map_structure(lambda s: keras.KerasTensor(s.shape, s.dtype.name), specs))
    variables = named_variables(model)
    found: dict[str, Any] = {}
    calls: list[LayerCall] = []

    def run(values: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
        mapping = list(zip(variables.values(), values, strict=True))
        nested = tf.nest.pack_sequence_as(specs, inputs)
        with (
            keras.StatelessScope(mapping, collect_losses=True, initialize_variables=False) as scope,
            _noted(tf.compat.v1.get_default_graph(), calls),
        ):
            outputs = model(nested, training=training)
            losses = [_total(loss) for loss in model.losses]
        new = {path: scope.get_current_value(v) for path, v in variables.items()}
        found.update(values=values, inputs=inputs, outputs=outputs, losses=losses, new=new)
        return tf.nest.flatten(outputs)

    specs_of = [tf.TensorSpec(v.shape, v.dtype) for v in variables.values()]
    with lock:
        graph = tf.compat.v1.wrap_function(run, [specs_of, tf.nest.flatten(specs)]).graph
    return _recording(model, variables, graph, found, calls, training)


def _total(loss: Tensor) -> Tensor:
    return loss if loss.shape.rank == 0 else tf.reduce_sum(loss)


def _recording(
    model: keras.Model,
    variables: Mapping[str, Any],
    graph: Any,
    found: Mapping[str, Any],
    calls: list[LayerCall],
    training: bool,
) -> Recording:
    at = dict(zip(variables, found["values"], strict=True))
    trained = {id(v) for v in model.trainable_variables} if training else set()
    updates = {}
    for path, new in found["new"].items():
        if training and new.name != at[path].name:
            updates[path] = new
    outputs = [tf.convert_to_tensor(t) for t in tf.nest.flatten(found["outputs"])]
    made = Recording(
        graph,
        list(found["inputs"]),
        {path: t for path, t in at.items() if id(variables[path]) in trained},
        {path: t for path, t in at.items() if id(variables[path]) not in trained},
        outputs,
        found["outputs"],
        updates,
        list(found["losses"]) if training else [],
        calls,
        training,
    )
    _reject(made)
    made.live = dependents(graph, made.inputs) | _rootless(made)
    made.forward = {op.name for op in graph.get_operations()}
    return made


def _rootless(r: Recording) -> set[str]:
    """Ops of outputs that depend on no input: what they need of weights belongs to a block, too."""
    placeholders = {t.name for t in (*r.inputs, *r.weights.values(), *r.state.values())}
    live = dependents(r.tf_graph, r.inputs)
    roots = [t for t in r.outputs if t.op.name not in live and t.name not in placeholders]
    behind = ancestors(roots, placeholders)
    return {t.op.name for name, t in behind.items() if name not in placeholders}


def _reject(r: Recording) -> None:
    """What could not be run in parts, or not twice alike."""
    for outside, _ in r.tf_graph.captures:
        if outside.dtype in (tf.resource, tf.variant):
            raise TraceError(
                "the model reads a variable that is not one of its own (model.variables), such as "
                "the global seed generator of keras.random: make the variable, or a "
                "keras.random.SeedGenerator, an attribute of the layer that uses it"
            )
    changed = [path for path in r.updates if path in r.weights]
    if changed:
        raise TraceError(
            f"forward changes {changed[0]}, a weight that the optimizer steps; make it a variable "
            "with trainable=False"
        )
    for op in r.tf_graph.get_operations():
        if op.type in RANDOM:
            raise TraceError(
                f"{op.name} ({op.type}) draws from a generator that has no place in the order of "
                "samples; draw by keras.random with a keras.random.SeedGenerator of the layer's own"
            )
        if op.type in PYTHON:
            raise TraceError(
                f"{op.name} ({op.type}) runs Python inside the graph, which cannot be cut into "
                "stages or moved to another process; write it with keras.ops or TensorFlow ops"
            )
    for path, t in r.updates.items():
        if any(t.name == x.name for x in r.inputs):
            raise TraceError(
                f"forward assigns an input to {path} as it is; assign a value that a layer "
                "computed from it"
            )
    if any(getattr(t, "_keras_mask", None) is not None for t in r.outputs):
        raise TraceError(
            "the model's output has a mask, which the loss would use; give sample weights instead"
        )
    for t in (*r.inputs, *r.outputs):
        if not t.shape.is_fully_defined():
            raise TraceError(
                f"{t.name} has shape {t.shape}, which depends on values; give the model outputs "
                "whose shape follows from the shape of its inputs"
            )


@contextmanager
def _noted(graph: Any, calls: list[LayerCall]) -> Iterator[None]:
    """Note which ops each layer call of this thread makes. Callers hold the lock."""
    original = keras.layers.Layer.__call__
    count = lambda: len(graph.get_operations())  # noqa: E731

    def noted(layer: Any, *args: Any, **kwargs: Any) -> Any:
        if tf.compat.v1.get_default_graph() is not graph:
            return original(layer, *args, **kwargs)
        start, inner = count(), len(calls)
        try:
            return original(layer, *args, **kwargs)
        finally:
            path = (getattr(layer, "path", None) or layer.name).replace("/", ".")
            calls.append(LayerCall(path, start, count(), len(calls) == inner))

    setattr(keras.layers.Layer, "__call__", noted)  # noqa: B010 (pyright's wish)
    try:
        yield
    finally:
        setattr(keras.layers.Layer, "__call__", original)  # noqa: B010


def blocks_of(calls: Sequence[LayerCall]) -> dict[int, int]:
    """For each op the innermost call that made it. Inner calls end before outer ones."""
    found: dict[int, int] = {}
    for number, call in enumerate(calls):
        for op in range(call.start, call.stop):
            found.setdefault(op, number)
    return found
