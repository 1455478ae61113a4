"""Plain Keras over micro-batches, and the same under a plan: what tests compare. Not a test itself.

Keras demotes float64 to float32 where it looks for a type of its own; `float64()` stops that.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import keras
import keras.src.layers.normalization.batch_normalization as batch_normalization
import numpy as np
import tensorflow as tf
from keras.src.trainers.compile_utils import CompileLoss

from gems.geometry.box import split_points
from gems.keras.session import Session
from gems.keras.tracing.subgraph import lock
from gems.keras.weight_files import named_variables
from gems.plans.plan import Plan
from gems.transport.threads import run

Make = Callable[[], Any]


def float64() -> None:
    """Models, losses and BatchNormalization compute in float64 from now on."""
    keras.backend.set_floatx("float64")
    own = batch_normalization.backend
    if not isinstance(own, types.SimpleNamespace):
        copy = types.SimpleNamespace(**{name: getattr(own, name) for name in dir(own)})
        copy.result_type = lambda *dtypes: dtypes[0]
        setattr(batch_normalization, "backend", copy)  # noqa: B010


def build(make: Make) -> Any:
    """A model with the same names and weights every time."""
    with lock:
        keras.backend.clear_session()
        keras.utils.set_random_seed(0)
        return make()


@dataclass
class Trained:
    """What several steps gave: losses, all variables, gradients of the last step."""

    losses: list[float] = field(default_factory=list)
    state: dict[str, np.ndarray] = field(default_factory=dict)
    gradients: dict[str, np.ndarray] = field(default_factory=dict)
    sessions: list[Any] = field(default_factory=list)


Batches = Sequence[tuple[Any, ...]]  # inputs, targets, sample weights


def momentum() -> Any:
    return keras.optimizers.SGD(1e-2, momentum=0.9)


def plain(
    make: Make, loss: Any, batches: Batches, parts: int, optimizer: Any = momentum
) -> Trained:
    """One model, its gradients averaged over micro-batches by their samples."""
    model, found = build(make), Trained()
    stepper = optimizer()
    stepper.build(model.trainable_variables)
    objective = CompileLoss(loss, output_names=getattr(model, "output_names", None))
    first = [tf.nest.map_structure(lambda x: tf.convert_to_tensor(x[:1]), t) for t in batches[0]]
    objective(first[1], model(first[0], training=False))  # makes what Keras tracks
    names = {id(v): path for path, v in named_variables(model).items()}

    @tf.function(reduce_retracing=True)
    def micro(x: Any, y: Any, w: Any) -> Any:
        with tf.GradientTape() as tape:
            value = objective(y, model(x, training=True), w)
            value += sum(tf.reduce_sum(tf.cast(each, value.dtype)) for each in model.losses)
        return value, tape.gradient(value, [v.value for v in model.trainable_variables])

    for inputs, targets, *rest in batches:
        weights = rest[0] if rest else None
        samples = len(tf.nest.flatten(inputs)[0])
        points = split_points(samples, parts)
        total, sums = 0.0, None
        for a, b in pairwise(points):
            if a == b:
                continue
            part = lambda x: tf.convert_to_tensor(x[a:b])  # noqa: B023, E731
            w = None if weights is None else part(weights)
            x, y = (tf.nest.map_structure(part, tree) for tree in (inputs, targets))
            value, gradients = micro(x, y, w)
            share = (b - a) / samples
            total += float(value) * share
            more = [None if g is None else tf.convert_to_tensor(g) * share for g in gradients]
            sums = more if sums is None else [
                a if b is None else a + b for a, b in zip(sums, more, strict=True)
            ]  # fmt: skip
        found.losses.append(total)
        pairs = zip(sums, model.trainable_variables, strict=True)
        found.gradients = {names[id(v)]: np.asarray(g) for g, v in pairs if g is not None}
        stepper.apply(sums, model.trainable_variables)
    found.state = {path: v.numpy() for path, v in named_variables(model).items()}
    return found


def planned(
    make: Make,
    loss: Any,
    batches: Batches,
    plan: Plan,
    optimizer: Any = momentum,
    transport: Any = None,
    **options: Any,
) -> Trained:
    """The same under a plan: on the rank of a transport, or on ranks that are threads."""
    if transport is None:
        models = [build(make) for _ in range(plan.world)]
        ranks = run(
            plan.world,
            lambda t: _rank(models[t.rank], loss, batches, plan, optimizer, t, options),
            seconds=300,
        )
    else:
        mine = _rank(build(make), loss, batches, plan, optimizer, transport, options)
        mine.sessions = []
        ranks = [mine]
    found = ranks[0]
    for other in ranks[1:]:
        assert other.losses == found.losses
        found.gradients |= other.gradients
        found.sessions += other.sessions
    return found


def _rank(
    model: Any, loss: Any, batches: Batches, plan: Plan, optimizer: Any, t: Any, options: Any
) -> Trained:
    samples = len(tf.nest.flatten(batches[0][0])[0])
    size = -(-samples // plan.total)
    sample = tf.nest.map_structure(lambda x: x[:size], batches[0][0])
    found = Trained()
    session = Session(model, loss, sample, plan, transport=t, **options)
    session.add_optimizer(optimizer())
    for batch in batches:
        found.losses.append(session.forward_backward(*batch).loss)
        found.gradients = {path: np.array(g) for path, g in session.gradients().items()}
        session.optimizer_step()
    found.state = session.state_dict()
    found.sessions = [session]
    return found


def worst(found: Trained, expected: Trained) -> float:
    """The largest relative difference of losses, gradients and variables."""
    assert found.gradients.keys() == expected.gradients.keys()
    assert found.state.keys() == expected.state.keys()
    pairs = [(np.array(found.losses), np.array(expected.losses))]
    for a, b in ((found.gradients, expected.gradients), (found.state, expected.state)):
        pairs += [(a[name], b[name]) for name in b]
    return max((_difference(a, b) for a, b in pairs if b.size), default=0.0)


def _difference(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float(np.abs(a - b).max() / max(1.0, np.abs(b).max()))
