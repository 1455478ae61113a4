"""What a session does besides computing: prediction, other inputs, errors that all ranks share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import gems.keras
from gems.errors import GemsError, LossError, PeerError, PlanError, ShapeError, TraceError
from gems.keras.session import Session
from gems.plans.plan import Plan
from gems.transport.threads import run
from tests.keras.exact import build, float64, momentum, plain, planned, worst
from tests.keras.networks import images, loss, nested, unet

float64()
PLAN = Plan(stages=2, micro_batches=4)


def together(
    make: Callable[[], Any], work: Callable[[Session], Any], plan: Plan = PLAN, sample: Any = None
) -> list[Any]:
    """`work` on a session of every rank."""
    models = [build(make) for _ in range(plan.world)]
    given = images(1)[0][0][:2] if sample is None else sample

    def rank(transport: Any) -> Any:
        session = Session(models[transport.rank], loss(), given, plan, transport=transport)
        session.add_optimizer(momentum())
        return work(session)

    return run(plan.world, rank, seconds=120)


def test_predictions_and_losses_are_those_of_the_plain_model():
    (first, _), (x, y) = images(), images()[1]
    model = build(unet)
    plans = [PLAN, Plan(stages=2, schedule="gems", replications=2)]
    expected, value = model(x, training=False), float(loss()(y, model(x, training=False)))
    for plan in plans:

        def work(session: Session) -> tuple[Any, float, int]:
            found = session.evaluate(x, y)
            return session.predict(x), found.loss, len(session.outputs)

        ranks = together(unet, work, plan)
        for predicted, told, _ in ranks:
            np.testing.assert_allclose(predicted, expected, rtol=1e-10, atol=1e-12)
            assert abs(told - value) < 1e-10
        assert sum(count for *_, count in ranks) == 4  # micro-batches on the last stage
    assert first is not None


def test_weights_come_from_and_go_to_the_plain_model():
    model = build(nested)
    state = {v.path: np.asarray(v.value) + 1 for v in model.variables}

    def work(session: Session) -> dict[str, Any]:
        session.load_state_dict(state)
        return session.state_dict()

    for found in together(nested, work):
        assert found.keys() == state.keys()
        assert all(np.array_equal(found[path], state[path]) for path in state)


def test_lazily_built_models_hold_only_the_weights_of_their_rank():
    """The values are those of the model that was built as a whole, bit for bit."""

    def lazy() -> Any:
        with gems.keras.lazily():
            return unet()

    whole = {v.path: np.asarray(v.value) for v in build(unet).variables}

    def work(session: Session) -> set[str]:
        held = {v.path: v for v in session.model.variables if v._value is not None}
        assert held.keys() == session.weights.variables.keys()
        assert all(np.array_equal(v.numpy(), whole[path]) for path, v in held.items())
        return set(held)

    first, second = together(lazy, work)
    assert first and second and first | second == set(whole) and not first & second


def test_a_lazily_built_model_trains_like_the_plain_one():
    def lazy() -> Any:
        with gems.keras.lazily():
            return unet()

    assert worst(planned(lazy, loss(), images(), PLAN), plain(unet, loss(), images(), 4)) < 1e-10


def test_other_batch_sizes_and_other_images_are_recorded_anew():
    def free() -> Any:
        image = keras.Input((None, None, 3))
        x = keras.layers.Conv2D(4, 3, activation="relu")(image)
        x = keras.layers.BatchNormalization()(x)
        return keras.Model(image, keras.layers.Dense(5)(keras.layers.GlobalMaxPooling2D()(x)))

    batches = [*images(1, 8), *images(1, 3), *images(1, 4, 12)]
    assert worst(planned(free, loss(), batches, PLAN), plain(free, loss(), batches, 4)) < 1e-10


def test_a_layer_that_is_frozen_later_stays_as_it_is():
    """`trainable` is read at every step: the recording is made anew."""
    x, y = images(1)[0]

    def work(session: Session) -> tuple[dict[str, Any], dict[str, Any]]:
        session.step(x, y)
        before = session.state_dict()
        for layer in session.model.layers:
            if "batch_normalization" in layer.name or layer.name == "conv2d_2":
                layer.trainable = False
        session.step(x, y)
        return before, session.state_dict()

    before, after = together(unet, work)[0]
    same = {path for path in before if np.array_equal(before[path], after[path])}
    frozen = {p for p in before if "batch_normalization" in p or p.startswith("conv2d_2/")}
    assert same == frozen


def test_a_layer_that_becomes_trainable_needs_a_new_optimizer():
    x, y = images(1)[0]

    def work(session: Session) -> None:
        session.model.get_layer("conv2d").trainable = True
        session.step(x, y)

    def frozen() -> Any:
        model = unet()
        model.get_layer("conv2d").trainable = False
        return model

    with pytest.raises(PlanError, match="has become trainable"):
        together(frozen, work)


def test_a_layer_built_anew_is_noticed():
    def make() -> Any:
        layers = [keras.layers.Dense(4), keras.layers.Dense(5)]
        return keras.Sequential([keras.Input((3,)), *layers])

    x, y = np.ones((8, 3)), np.zeros(8)

    def work(session: Session) -> None:
        session.step(x, y)
        session.model.pop()
        session.model.add(keras.layers.Dense(5, name="other"))
        session.step(x, y)

    with pytest.raises(TraceError, match="other variables"):
        together(make, work, sample=x[:2])


def test_a_loss_that_is_not_finite_changes_nothing():
    x, y = images(1)[0]
    bad = x.copy()
    bad[5] = np.nan

    def work(session: Session) -> tuple[Any, Any, Any]:
        session.step(x, y)
        before = session.state_dict()
        with pytest.raises(LossError, match="loss is nan in step 1"):
            session.step(bad, y)
        after = session.state_dict()
        session.step(x, y)
        return before, after, session.state_dict()

    for before, after, last in together(unet, work):
        assert all(np.array_equal(before[path], after[path]) for path in before)
        assert all(np.isfinite(value).all() for value in last.values())


def test_ranks_given_other_batches_all_raise():
    batches = images(2)

    def work(session: Session) -> str:
        with pytest.raises(ShapeError, match="different batches") as raised:
            session.step(*batches[session.rank])
        return str(raised.value)

    told = together(unet, work)
    assert all("rank 0 has step 0" in text or "rank 1 has step 0" in text for text in told)


def test_ranks_given_other_models_all_raise():
    def work(transport: Any) -> None:
        wide = 4 + transport.rank
        with pytest.raises(PeerError, match="different models"):
            Session(models[wide], "mse", np.ones((2, 3)), PLAN, transport=transport)
        transport.close()

    def make(width: int) -> Any:
        layers = [keras.layers.Dense(width), keras.layers.Dense(5)]
        return keras.Sequential([keras.Input((3,)), *layers])

    models = {width: build(lambda: make(width)) for width in (4, 5)}  # noqa: B023
    run(2, work, seconds=60)


def test_one_rank_that_fails_ends_the_others():
    x, y = images(1)[0]
    ended = threading.Event()

    def work(session: Session) -> None:
        session.step(x, y)
        if session.rank == 1:
            ended.set()
            raise KeyError("out of data")
        ended.wait()
        with pytest.raises(PeerError, match="rank 1"):
            session.step(x, y)
        with pytest.raises(GemsError, match="make a new one"):
            session.step(x, y)

    with pytest.raises(KeyError):
        together(unet, work)


@pytest.mark.parametrize(
    "plan, said",
    [
        (Plan(stages=2, spatial=[(2, 1)], halo="d2"), "use halo='d1'"),
        (Plan(stages=2, local_dp=2), "local_dp slices"),
        (Plan(stages=2, stream=[(2, 2)]), "stream runs patches"),
        (Plan(stages=2, zero=1, data=2), "zero shards state"),
        (Plan(stages=2, offload="activations:host"), "offload moves state out"),
        (Plan(stages=2, offload="optimizer:host"), "offload moves state out"),
        (Plan(stages=2, schedule="2bw"), "schedule '2bw' trains without a flush; use '1f1b'"),
        (Plan(stages=2, ranks=1, schedule="l2l"), "schedule 'l2l' loads weights"),
        (Plan(stages=2, optimizer_step="eager"), "optimizer_step='eager'"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_is_not_offered_is_rejected_by_name(plan, said):
    with pytest.raises(PlanError, match=said):
        Session(build(nested), loss(), images(1)[0][0], plan)


class Python(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        y = tf.numpy_function(np.sin, [x], tf.float64)
        return tf.ensure_shape(y, x.shape)


class Raw(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        return x + tf.random.normal(tf.shape(x), dtype=x.dtype)


class Unowned(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        return keras.random.dropout(x, 0.5)


class Nonlinear(keras.layers.Layer):
    """A statistic that depends on the order of samples."""

    def build(self, shape: Any) -> None:
        self.most = self.add_weight(shape=(), initializer="zeros", trainable=False, name="most")

    def call(self, x: Any) -> Any:
        self.most.assign(keras.ops.maximum(self.most, keras.ops.max(x)))
        return x


@pytest.mark.parametrize(
    "layer, said",
    [
        (Python, "runs Python inside the graph"),
        (Raw, "draws from a generator that has no place"),
        (Unowned, "not one of its own"),
    ],
)
def test_what_cannot_be_run_in_parts_is_rejected_by_name(layer, said):
    model = build(lambda: keras.Sequential([keras.Input((3,)), layer(), keras.layers.Dense(5)]))
    with pytest.raises(TraceError, match=said):
        Session(model, loss(), np.ones((2, 3)), Plan(stages=1, schedule="sequential"))


@pytest.mark.parametrize("unroll", [True, False])
def test_recurrent_layers_are_unrolled_or_rejected(unroll):
    def make() -> Any:
        layers = [keras.layers.LSTM(4, unroll=unroll), keras.layers.Dense(5)]
        return keras.Sequential([keras.Input((6, 3)), *layers])

    numbers = np.random.default_rng(0)
    batch = [(numbers.normal(size=(8, 6, 3)), numbers.integers(0, 5, 8))]
    if unroll:
        assert worst(planned(make, loss(), batch, PLAN), plain(make, loss(), batch, 4)) < 1e-10
        return
    with pytest.raises(TraceError, match="unroll=True"):
        planned(make, loss(), batch, PLAN)


def test_state_that_depends_on_the_order_of_samples():
    """Exact where one rank sees all samples in order, rejected where several see them."""

    def make() -> Any:
        layers = [keras.layers.Dense(4), Nonlinear(), keras.layers.Dense(5)]
        return keras.Sequential([keras.Input((3,)), *layers])

    numbers = np.random.default_rng(0)
    batches = [(numbers.normal(size=(8, 3)), numbers.integers(0, 5, 8)) for _ in range(2)]
    assert worst(planned(make, loss(), batches, PLAN), plain(make, loss(), batches, 4)) < 1e-10
    with pytest.raises(PlanError, match="depend on the order of samples"):
        planned(make, loss(), batches, Plan(stages=2, schedule="gems", replications=2))


def test_the_planner_finds_a_plan_that_is_offered():
    model, sample = build(nested), images(1)[0][0][:2]
    found = gems.keras.plan(model, sample, ranks=2, memory="64MiB")
    assert found.world == 2 and not found.zero and not found.offload
    assert "plans simulated" in found.explain()
    with pytest.raises(PlanError, match="objective 'image'"):
        gems.keras.plan(model, sample, ranks=2, objective="image")


def test_auto_plans_run():
    """Each rank measures; all take the mean, and choose the same."""
    models = [build(nested) for _ in range(2)]
    x, y = images(1)[0]

    def rank(transport: Any) -> tuple[Plan, float]:
        session = Session(
            models[transport.rank], loss(), x[:2], "auto", memory="64MiB", transport=transport
        )
        session.add_optimizer(momentum())
        return session.plan, session.step(x, y).loss

    first, second = run(2, rank, seconds=120)
    assert first == second and first[0].world == 2 and np.isfinite(first[1])


def test_a_timeline_has_the_actions_of_all_ranks():
    def work(session: Session) -> tuple[Any, Any]:
        session.step(*images(1)[0])
        assert session.peak > 0
        return session.timeline(), session.forecast()

    measured, predicted = (
        {(e.rank, e.action) for e in timeline.events if e.parsed().computes}
        for timeline in together(nested, work)[0]
    )
    assert measured == predicted and len(measured) == 16


def test_gems_keras_needs_neither_torch_nor_tensorflow_to_be_imported():
    code = """
import json, sys
import gems.keras
light = sorted(set(sys.modules) & {"torch", "tensorflow", "keras", "numpy"})
import gems.keras.session, gems.keras.planning
print(json.dumps([light, "torch" in sys.modules]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [[], False]
