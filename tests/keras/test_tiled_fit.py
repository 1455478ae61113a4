"""`fit` under plans whose last stage is tiled, where the metrics are: on TensorFlow."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import gems.keras
from gems import Plan
from gems.transport.threads import run
from tests.keras.fit_cases import IMAGES, assert_same, compiled, fitting
from tests.keras.parity import float64, worst


@pytest.fixture(autouse=True)
def exact() -> Any:
    with float64():
        yield


def u_net() -> keras.Model:
    """A class of every pixel; the skip reaches the last stage."""
    x = inputs = keras.Input((8, 8, 3))
    x = skip = layers.Conv2D(4, 3, padding="same", activation="relu")(x)
    x = layers.Conv2D(4, 3, padding="same", activation="relu")(layers.MaxPooling2D()(x))
    x = layers.Concatenate()([layers.UpSampling2D()(x), skip])
    return keras.Model(inputs, layers.Conv2D(3, 1)(x))


@pytest.mark.parametrize(
    "plan",
    [
        Plan(stages=1, spatial=["2x1"], micro_batches=2, schedule="sequential"),
        Plan(stages=2, spatial=["1x2", "1x2"], micro_batches=2, schedule="1f1b"),
        Plan(stages=1, spatial=["1x2"], micro_batches=1, data=2, schedule="sequential"),
    ],
    ids=["one stage", "two stages", "copies"],
)
def test_every_pixel_has_a_class_and_the_last_stage_is_tiled(plan: Plan) -> None:
    """Metrics with weights of pixels and with a matrix of counts; each cell counts once."""
    masks = (IMAGES[..., 0] > 0.3).astype("int64") + (IMAGES[..., 1] > 0.5)
    weights = np.linspace(0.5, 1.5, masks.size).reshape(masks.shape)
    given = fitting(sample_weight=weights, validation_data=(IMAGES[:6], masks[:6]))

    def options() -> dict[str, Any]:
        iou = keras.metrics.MeanIoU(3, sparse_y_pred=False)
        return {"metrics": ["accuracy", iou], "weighted_metrics": ["accuracy"]}

    plain = compiled(u_net, **options())
    history = plain.fit(IMAGES, masks, **given).history
    evaluated = plain.evaluate(IMAGES, masks, verbose=0, return_dict=True)
    predicted = plain.predict(IMAGES, verbose=0)
    models = [compiled(u_net, **options()) for _ in range(plan.world)]

    def rank(transport: Any) -> Any:
        model = gems.keras.distribute(models[transport.rank], plan, transport=transport)
        told = model.fit(IMAGES, masks, **given).history
        again = model.evaluate(IMAGES, masks, verbose=0, return_dict=True)
        return told, again, model.predict(IMAGES, verbose=0), model.get_weights()

    for told, again, outputs, found in run(plan.world, rank, seconds=300):
        assert_same(told, history)
        assert_same(again, evaluated)
        assert worst(outputs, predicted) < 1e-12
        assert all(worst(a, b) < 1e-12 for a, b in zip(found, plain.get_weights(), strict=True))
