"""More tests of `gems.keras.distribute`, for both backends of Keras: what users met, or would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import gems.keras
from gems import Plan
from gems.errors import GemsError, PlanError
from gems.transport.threads import run
from tests.keras.fit_cases import (
    IMAGES,
    LABELS,
    PIPELINE,
    PLANS,
    compiled,
    cross_entropy,
    fitting,
    network,
    on_ranks,
)
from tests.keras.parity import float64, fresh, worst


@pytest.fixture(autouse=True)
def exact() -> Any:
    with float64():
        yield


def with_dropout() -> keras.Model:
    """Its generator's state is no weight, and is on the rank of the last stage only."""
    inputs = keras.Input((8, 8, 3))
    x = layers.GlobalAveragePooling2D()(layers.Conv2D(8, 3, activation="relu")(inputs))
    return keras.Model(inputs, layers.Dense(3)(layers.Dropout(0.5)(x)))


@pytest.mark.parametrize("suffix", [".keras", ".weights.h5", ".safetensors"])
def test_a_model_with_dropout_is_saved_and_loaded(tmp_path: Path, suffix: str) -> None:
    """Loading after the first batch used to miss the states of generators, and to fail."""
    path = tmp_path / f"model{suffix}"

    def work(model: Any, rank: int) -> Any:
        model.fit(IMAGES, LABELS, **fitting(epochs=1))
        (model.save if suffix == ".keras" else model.save_weights)(path)
        expected = model.get_weights()
        model.fit(IMAGES, LABELS, **fitting(epochs=1))
        model.load_weights(path)
        loaded = model.get_weights()
        model.set_weights([w + 1 for w in expected])
        return expected, loaded, model.get_weights()

    for expected, loaded, later in on_ranks(PIPELINE, work, make=with_dropout):
        assert all(np.array_equal(a, b) for a, b in zip(loaded, expected, strict=True))
        assert all(np.array_equal(a, b + 1) for a, b in zip(later, expected, strict=True))
    other = fresh(with_dropout)
    (gems.keras.load_weights if suffix == ".safetensors" else keras.Model.load_weights)(other, path)
    assert all(np.array_equal(a, b) for a, b in zip(other.get_weights(), expected, strict=True))


def test_a_model_that_was_never_compiled_is_loaded_and_predicts(tmp_path: Path) -> None:
    path, plain = tmp_path / "model.weights.h5", fresh(network)
    plain.set_weights([w + 0.1 for w in plain.get_weights()])
    plain.save_weights(path)
    models = [fresh(network) for _ in range(2)]

    def rank(transport: Any) -> Any:
        model = gems.keras.distribute(models[transport.rank], PIPELINE, transport=transport)
        model.predict(IMAGES, verbose=0)
        model.load_weights(path)
        return model.predict(IMAGES, verbose=0)

    for outputs in run(2, rank, seconds=100):
        assert worst(outputs, plain.predict(IMAGES, verbose=0)) < 1e-12


class Largest(keras.metrics.Metric):
    """Marked as a sum by Keras, like every metric."""

    def __init__(self, name: str = "largest") -> None:
        super().__init__(name=name)
        self.most = self.add_variable((), "zeros", name="most")

    def update_state(self, y: Any, output: Any, sample_weight: Any = None) -> None:
        most = keras.ops.cast(keras.ops.max(output), self.most.dtype)
        self.most.assign(keras.ops.maximum(self.most, most))

    def result(self) -> Any:
        return self.most.value


class Total(Largest):
    def update_state(self, y: Any, output: Any, sample_weight: Any = None) -> None:
        self.most.assign(self.most + keras.ops.cast(keras.ops.sum(output), self.most.dtype))


def test_own_metrics_are_tried_for_being_sums() -> None:
    """The largest output over all ranks used to be the sum of the ranks' largest."""

    def work(model: Any, rank: int = 0) -> Any:
        return model.fit(IMAGES, LABELS, **fitting()).history

    plan = PLANS[2]
    expected = work(compiled(metrics=[Total("total")]))
    models = [compiled(metrics=[Total("total")]) for _ in range(plan.world)]

    def rank(transport: Any) -> Any:
        return work(gems.keras.distribute(models[transport.rank], plan, transport=transport))

    for found in run(plan.world, rank, seconds=100):
        assert worst(found, expected) < 1e-5  # large float32 sums
    model = gems.keras.distribute(compiled(metrics=[Largest()]), Plan())
    with pytest.raises(PlanError, match="largest: its variables after two batches are not the sum"):
        work(model)


def test_averages_of_the_optimizer_are_taken_at_the_end_of_fit() -> None:
    """Keras hands its optimizer all weights then, of which a rank has some: it raised."""

    def work(model: Any, rank: int = 0) -> Any:
        model.compile(keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5), cross_entropy())
        model.fit(IMAGES, LABELS, **fitting())
        return model.get_weights()

    expected = work(compiled())
    for weights in on_ranks(PIPELINE, work):
        assert all(worst(a, b) < 1e-12 for a, b in zip(weights, expected, strict=True))


def test_histograms_of_weights_are_rejected(tmp_path: Path) -> None:
    def work(model: Any, rank: int) -> None:
        board = keras.callbacks.TensorBoard(tmp_path, histogram_freq=1)
        with pytest.raises(PlanError, match="histogram_freq=1"):
            model.fit(IMAGES, LABELS, **fitting(callbacks=[board]))

    on_ranks(PIPELINE, work)


def test_a_norm_over_several_batches_is_rejected() -> None:
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2, global_clipnorm=1.0)
    model = gems.keras.distribute(compiled(optimizer=optimizer), Plan())
    with pytest.raises(PlanError, match="gradient_accumulation_steps=2 with global_clipnorm"):
        model.fit(IMAGES, LABELS, **fitting())


@pytest.mark.skipif(len(PLANS) == 3, reason="on torch the weights of other ranks have no values")
def test_calling_the_model_with_weights_of_other_ranks_is_rejected() -> None:
    """It gave what the weights gave before they were trained on another rank."""

    expected = compiled()(IMAGES)

    def work(model: Any, rank: int) -> None:
        assert worst(model(IMAGES), expected) < 1e-12  # before it is partitioned
        model.fit(IMAGES, LABELS, **fitting(epochs=1))
        with pytest.raises(GemsError, match=r"call model\.predict"):
            model(IMAGES)

    on_ranks(PIPELINE, work)


def two_outputs() -> keras.Model:
    inputs = keras.Input((8,))
    x = layers.Dense(4, activation="relu")(inputs)
    return keras.Model(
        inputs, {"a": layers.Dense(2, name="a")(x), "b": layers.Dense(1, name="b")(x)}
    )


def one_output() -> keras.Model:
    return keras.Sequential(
        [keras.Input((8,)), layers.Dense(4, activation="relu"), layers.Dense(2)]
    )


NUMBERS = np.random.default_rng(0).normal(size=(16, 8))
REPORTED = {
    "losses of each output": (
        two_outputs,
        {"a": NUMBERS[:, :2], "b": NUMBERS[:, 2:3]},
        lambda: {"loss": {"a": "mse", "b": "mae"}, "loss_weights": {"a": 1.0, "b": 0.3}},
    ),
    "a metric that is built with its first batch": (
        one_output,
        NUMBERS[:, :2],
        lambda: {"loss": "mse", "metrics": [keras.metrics.R2Score()]},
    ),
}


@pytest.mark.parametrize("plan", [PIPELINE, Plan(stages=1, data=2)], ids=["pipeline", "copies"])
@pytest.mark.parametrize("what", REPORTED)
def test_what_is_reported_beside_the_loss_is_that_of_plain_keras(what: str, plan: Plan) -> None:
    """Story: both missed, or counted twice, the first batch of a fit."""
    make, targets, settings = REPORTED[what]

    def ready() -> keras.Model:
        model = fresh(make)
        model.compile(keras.optimizers.SGD(0.1), **settings())
        return model

    def fit(model: keras.Model) -> Any:
        return model.fit(NUMBERS, targets, batch_size=8, epochs=2, shuffle=False, verbose=0).history

    expected, models = fit(ready()), [ready() for _ in range(plan.world)]
    for found in run(
        plan.world,
        lambda t: fit(gems.keras.distribute(models[t.rank], plan, transport=t)),
    ):
        assert worst(found, expected) < 1e-6
