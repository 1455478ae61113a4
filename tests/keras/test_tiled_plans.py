"""Whole networks on tiles against plain Keras on the same micro-batches, in float64: losses, every
gradient, every variable after two steps, running statistics among them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from gems.errors import PlanError
from gems.hardware import machine
from gems.keras.planning import Study
from gems.planner.request import Request
from gems.plans.plan import Plan
from tests.keras.exact import build, float64, momentum, plain, planned, worst
from tests.keras.networks import CLASSES, images, loss, nested, subclassed, unet

float64()
Make = Callable[[], Any]


def residual() -> Any:
    """Two blocks of a ResNet with other strides in the shortcut, sizes that do not divide."""
    image = keras.Input((15, 17, 3))
    x = layers.ZeroPadding2D(2)(image)
    x = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(4, 5, 2, use_bias=False)(x)))
    x = layers.MaxPooling2D(3, 2, padding="same")(x)
    for channels, stride in ((4, 1), (6, 2)):
        y = layers.Conv2D(channels, 3, stride, padding="same", use_bias=False)(x)
        y = layers.ReLU()(layers.BatchNormalization(momentum=0.9)(y))
        y = layers.Conv2D(channels, 3, padding="same", use_bias=False)(y)
        y = layers.BatchNormalization(gamma_initializer="zeros")(y)
        if stride > 1:
            x = layers.BatchNormalization()(layers.Conv2D(channels, 1, stride)(x))
        x = layers.ReLU()(layers.Add()([x, y]))
    x = layers.Dropout(0.4)(layers.GlobalAveragePooling2D()(x))
    return keras.Model(image, layers.Dense(CLASSES)(x))


def inverted() -> Any:
    """A block of MobileNetV3: depthwise, squeeze and excitation, hard activations."""
    image = keras.Input((15, 17, 3))
    x = layers.Conv2D(4, 3, 2, padding="same")(layers.Rescaling(0.5)(image))
    y = layers.Activation("hard_swish")(layers.BatchNormalization()(layers.Conv2D(8, 1)(x)))
    y = layers.BatchNormalization()(layers.DepthwiseConv2D(5, padding="same")(y))
    s = layers.GlobalAveragePooling2D(keepdims=True)(y)
    s = layers.Conv2D(8, 1, activation="hard_sigmoid")(layers.Conv2D(2, 1, activation="relu")(s))
    y = layers.Conv2D(4, 1)(layers.Multiply()([y, s]))
    x = layers.SpatialDropout2D(0.2)(layers.Add()([x, y]))
    x = layers.SeparableConv2D(6, 3, 2, padding="same", activation="silu")(x)
    return keras.Model(image, layers.Dense(CLASSES)(layers.Flatten()(x)))


def volume() -> Any:
    """A U-Net of three dims, with channels that are layer-normalised and dropped."""
    image = keras.Input((8, 7, 9, 2))
    a = layers.LayerNormalization()(layers.Conv3D(3, 3, padding="same")(image))
    b = layers.Activation("gelu")(layers.Conv3D(4, 3, 2, padding="same")(a))
    b = layers.GroupNormalization(2)(layers.Conv3D(4, 3, padding="same")(b))
    up = layers.Cropping3D(((0, 0), (0, 1), (0, 1)))(layers.Conv3DTranspose(3, 2, 2)(b))
    x = layers.Dropout(0.2)(layers.Concatenate()([up, a]))
    return keras.Model(image, layers.Conv3D(1, 1)(x))


def segmenting() -> Any:
    """Its output is an image, of which the loss takes all."""
    image = keras.Input((15, 17, 3))
    x = layers.Conv2D(4, 3, padding="same", activation="relu")(image)
    x = layers.UpSampling2D()(layers.AveragePooling2D(2, padding="same")(x))
    x = layers.BatchNormalization()(layers.Cropping2D(((0, 1), (1, 0)))(x))
    return keras.Model(image, layers.Conv2D(1, 1)(x))


def pictures(*sides: int, target: tuple[int, ...] = ()) -> list[tuple[Any, Any]]:
    numbers = np.random.default_rng(1)
    shape = (8, *sides)
    return [
        (
            numbers.normal(size=shape),
            numbers.normal(size=(8, *target)) if target else numbers.integers(0, CLASSES, 8),
        )
        for _ in range(2)
    ]


UNEVEN = pictures(15, 17, 3)
CASES: dict[str, tuple[Make, Any, Any, Plan]] = {
    "residual, two tiled stages": (
        residual, loss(), UNEVEN, Plan(stages=3, spatial=["2x2", "1x2"], micro_batches=4),
    ),
    "residual, GEMS": (
        residual, loss(), UNEVEN,
        Plan(stages=2, spatial=["2x1", "1x2"], schedule="gems", replications=2),
    ),
    "residual, copies, recomputed": (
        residual, loss(), UNEVEN,
        Plan(stages=2, spatial=["1x2"], micro_batches=4, data=2, recompute="always"),
    ),
    "inverted, three columns, zero-bubble": (
        inverted, loss(), UNEVEN,
        Plan(stages=2, spatial=["1x3"], micro_batches=4, schedule="zero-bubble"),
    ),
    "U-Net, all tiled": (unet, loss(), images(), Plan(stages=1, spatial="2x2", micro_batches=2)),
    "subclassed, reused layer": (
        subclassed, loss(), images(), Plan(stages=2, spatial=["2x1", "1x2"], micro_batches=4),
    ),
    "nested, regularizers": (
        nested, loss(), images(),
        Plan(stages=2, spatial=["1x2"], micro_batches=4, schedule="gpipe"),
    ),
    "volume": (
        volume, "mse", pictures(8, 7, 9, 2, target=(8, 7, 9, 1)),
        Plan(stages=2, spatial=["2x1x2"], micro_batches=2),
    ),
    "segmenting": (
        segmenting, "mse", pictures(15, 17, 3, target=(15, 17, 1)),
        Plan(stages=2, spatial=["1x2", "2x1"], micro_batches=2),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_tiles_give_what_plain_keras_gives(name: str) -> None:
    make, objective, batches, plan = CASES[name]
    expected = plain(make, objective, batches, plan.total, momentum)
    found = planned(make, objective, batches, plan, momentum)
    assert worst(found, expected) < 1e-10


def test_predictions_are_those_of_the_plain_model() -> None:
    plan = Plan(stages=2, spatial=["2x1"], micro_batches=2)
    (x, y), *_ = UNEVEN
    found = planned(residual, loss(), [(x, y)], plan, momentum)
    model = build(residual)
    plain_one = plain(residual, loss(), [(x, y)], 2, momentum)
    for variable in model.variables:
        variable.assign(plain_one.state[variable.path])
    tiled = [s.part.programs for s in found.sessions]
    assert len(tiled) == plan.world
    np.testing.assert_allclose(
        _predicted(found.sessions, x), model(x, training=False), rtol=1e-9, atol=1e-11
    )


def _predicted(sessions: list[Any], x: Any) -> Any:
    from threading import Thread

    found: list[Any] = [None] * len(sessions)

    def predict(rank: int) -> None:
        found[rank] = sessions[rank].predict(x)

    threads = [Thread(target=predict, args=(rank,)) for rank in range(len(sessions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert all(np.array_equal(found[0], other) for other in found)
    return found[0]


def test_the_planner_knows_halos_and_chooses_tiles_for_large_images() -> None:
    def make() -> Any:
        image = keras.Input((64, 64, 3))
        x = image
        for _ in range(3):
            x = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(8, 3, padding="same")(x)))
        return keras.Model(image, layers.Dense(CLASSES)(layers.GlobalAveragePooling2D()(x)))

    sample = tf.TensorSpec((1, 64, 64, 3), "float64")
    study = Study(build(make), sample, machine("cpu"), "estimate")
    graph, _ = study.graph
    convolutions = [b for b in graph.blocks if "conv2d" in b.name]
    # A column, or a row, of 8 channels from each side; nothing to the first: images are everywhere.
    assert [b.halos for b in convolutions] == [(0, 0), (8192, 8192), (8192, 8192)]
    norms = [b for b in graph.blocks if "batch_norm" in b.name]
    assert [(b.sums, b.totals) for b in norms] == [(128, 2)] * 3
    assert not any(b.whole for b in graph.blocks)
    request = Request.on(machine("cpu"), 4, None, micro_batches=1)
    found = study.search(request)
    assert any(candidate.plan.spatial for candidate in (*found.fitting, *found.rest))


def test_predicted_activations_are_those_that_tiles_hold() -> None:
    """Of a rank with one neighbour, on sizes that divide: the tiles' share and the halos."""

    def make() -> Any:
        image = keras.Input((16, 16, 4))
        x = layers.Activation("tanh")(image)
        for _ in range(3):
            x = layers.Conv2D(4, 3, padding="same", activation="tanh")(x)
        return keras.Model(image, layers.Conv2D(1, 1)(x))

    batches = pictures(16, 16, 4, target=(16, 16, 1))
    plan = Plan(stages=2, spatial=["1x2"], micro_batches=2)
    found = planned(make, "mse", batches, plan, momentum)
    for rank in range(2):
        session = found.sessions[rank]
        (part,) = session.part.programs.known.values()
        held = part.programs[0].saved_bytes
        assert math.isclose(held, session.costs.items[0].activations, rel_tol=1e-6)


def test_what_runs_whole_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    def make() -> Any:
        image = keras.Input((8, 8, 2))
        x = layers.Flatten(name="flat")(layers.Conv2D(2, 3)(image))
        return keras.Model(image, layers.Dense(CLASSES)(x))

    with caplog.at_level(logging.INFO, "gems.keras"):
        planned(make, loss(), [_small()], Plan(stages=1, spatial="1x2"))
    lines = [r.getMessage() for r in caplog.records if "run whole" in r.getMessage()]
    assert len(lines) == 2  # of two ranks
    assert "flat" in lines[0] and "stage 0 is cut 1x2" in lines[0]


def _small() -> tuple[Any, Any]:
    numbers = np.random.default_rng(0)
    return numbers.normal(size=(2, 8, 8, 2)), numbers.integers(0, CLASSES, 2)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"spatial": ["1x2"], "halo": "d2"}, "use halo='d1'"),
        ({"spatial": ["2x2x2"]}, "reads no image of 3 dims"),
        # On one rank only: the others, which could go on, must not wait for it.
        ({"spatial": ["1x2"], "schedule": "gems"}, "rank 1 has two of its tiles"),
    ],
)
def test_what_tiles_cannot_do_is_rejected_by_name(options: Any, what: str) -> None:
    with pytest.raises(PlanError, match=what):
        planned(residual, loss(), UNEVEN[:1], Plan(stages=2, micro_batches=2, **options))


def test_a_layer_with_a_gradient_of_its_own_is_rejected_with_a_remedy() -> None:
    @tf.custom_gradient
    def clipped(x: Any) -> Any:
        return x * 2, lambda g: tf.clip_by_value(g, -1.0, 1.0)

    def make() -> Any:
        image = keras.Input((15, 17, 3))
        x = layers.Lambda(clipped, name="clipped")(layers.Conv2D(2, 3)(image))
        return keras.Model(image, layers.Dense(CLASSES)(layers.GlobalAveragePooling2D()(x)))

    with pytest.raises(PlanError, match=r"clipped.*Let the tiled stages end before this layer"):
        planned(make, loss(), UNEVEN[:1], Plan(stages=1, spatial="1x2"))


def test_so_is_one_of_a_weight() -> None:
    @tf.custom_gradient
    def rounded(w: Any) -> Any:
        return tf.round(w), lambda g: g

    class Quantized(layers.Layer):
        def build(self, shape: Any) -> None:
            self.w = self.add_weight(shape=(shape[-1],), initializer="normal")

        def call(self, x: Any) -> Any:
            return x * rounded(tf.convert_to_tensor(self.w))

    def make() -> Any:
        image = keras.Input((15, 17, 3))
        x = layers.GlobalAveragePooling2D()(Quantized()(image))
        return keras.Model(image, layers.Dense(CLASSES)(x))

    with pytest.raises(PlanError, match=r"gradient of its own.*Let the tiled stages end"):
        planned(make, loss(), UNEVEN[:1], Plan(stages=1, spatial="1x2"))
