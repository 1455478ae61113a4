"""gems.Trainer on Keras models with the torch backend: the numbers of a plain loop over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import torch
from keras import layers

import gems
from gems import Plan, Trainer
from gems.errors import GemsError, PlanError
from gems.transport.threads import run
from tests.keras.parity import float64, fresh, worst

cross_entropy = torch.nn.functional.cross_entropy
PLANS = [
    Plan(stages=3, micro_batches=4, schedule="1f1b"),
    Plan(stages=2, schedule="gems", replications=2),
    Plan(stages=3, micro_batches=4, schedule="zero-bubble"),
    Plan(stages=2, micro_batches=2, data=2, recompute="always", schedule="1f1b"),
]
ONE = Plan(stages=1, micro_batches=4, schedule="sequential")
every_plan = pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.schedule)


@pytest.fixture(autouse=True)
def exact() -> Any:
    with float64():
        yield


def classifier(dropout: bool = False, frozen: bool = False) -> keras.Model:
    x = inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(4, 3, padding="same", use_bias=False)(x)
    x = layers.BatchNormalization()(x)
    x = skip = layers.ReLU()(x)
    x = layers.SeparableConv2D(4, 3, padding="same")(x)
    x = layers.BatchNormalization(momentum=0.9, scale=False, trainable=not frozen)(x)
    if dropout:
        x = layers.SpatialDropout2D(0.4)(layers.GaussianNoise(0.3)(x))
    x = layers.GlobalAveragePooling2D()(layers.Add()([x, skip]))
    if dropout:
        x = layers.Dropout(0.3, seed=4)(layers.Dropout(0.3)(x))
    return keras.Model(inputs, layers.Dense(5)(x))


class Subclassed(keras.Model):
    """A layer used twice, functions of Keras and of torch between layers, Keras's RMS norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = layers.Conv2D(4, 3, padding="same", strides=2)
        self.norm, self.mix = layers.BatchNormalization(), layers.Conv2D(4, 3, padding="same")
        self.rest = keras.Sequential([layers.GroupNormalization(2), layers.GlobalMaxPooling2D()])
        self.head = layers.Dense(5)

    def call(self, x: Any, training: bool | None = None) -> Any:
        x = keras.ops.relu(self.norm(self.stem(x), training=training))
        x = x + self.mix(x)
        return self.head(self.rest(torch.nn.functional.gelu(x + self.mix(x))))


def subclassed() -> keras.Model:
    model = Subclassed()
    model(np.zeros((1, 8, 8, 3)))
    return model


MODELS: dict[str, Callable[[], keras.Model]] = {
    "functional": classifier,
    "a frozen norm": lambda: classifier(frozen=True),
    "subclassed": subclassed,
}


def data(samples: int = 8) -> list[Any]:
    dice = np.random.default_rng(1)
    return [
        (
            torch.tensor(dice.normal(size=(samples, 8, 8, 3))),
            torch.tensor(dice.integers(0, 5, samples)),
        )
        for _ in range(2)
    ]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.05, momentum=0.9)


def plainly(make: Callable[[], keras.Model], parts: int) -> tuple[list[float], dict[str, Any]]:
    model = fresh(make)
    optimizer, losses = sgd([v.value for v in model.trainable_variables]), []
    for inputs, targets in data():
        total = 0.0
        for x, y in zip(inputs.chunk(parts), targets.chunk(parts), strict=True):
            loss = cross_entropy(model(x, training=True), y) / parts
            loss.backward()
            total += float(loss.detach())
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {v.path: v.numpy() for v in model.weights}


def trained(
    make: Callable[[], keras.Model], plan: Plan, look: Any = None
) -> tuple[list[float], dict[str, Any]]:
    models = [fresh(make) for _ in range(plan.world)]

    def work(transport: Any) -> Any:
        sample = torch.zeros(8 // plan.total, 8, 8, 3)
        trainer = Trainer(
            models[transport.rank], cross_entropy, sgd, sample, plan, transport=transport
        )
        losses = [trainer.step(x, y).loss for x, y in data()]
        if look is not None:
            look(trainer, models[transport.rank])
        state = trainer.state_dict()
        return losses, {path: state[name].numpy() for path, name in trainer.model.names.items()}

    found = run(plan.world, work)
    assert all(losses == found[0][0] for losses, _ in found)
    return found[0]


@pytest.mark.parametrize("name", MODELS)
@every_plan
def test_training_is_that_of_a_plain_loop(plan: Plan, name: str) -> None:
    expected = plainly(MODELS[name], 4)
    losses, weights = trained(MODELS[name], plan)
    assert weights.keys() == expected[1].keys()
    assert worst(losses, expected[0]) < 1e-13
    assert worst(weights, expected[1]) < 1e-13


def test_running_statistics_move_only_in_training() -> None:
    """A Keras layer is told by an argument, which model.train() does not reach."""
    before = {v.path: v.numpy() for v in fresh(classifier).weights}
    after = trained(classifier, ONE)[1]
    moved = {path for path in before if np.abs(before[path] - after[path]).max() > 0}
    assert moved == set(before)

    def look(trainer: Trainer, model: keras.Model) -> None:
        x, state = data()[0][0], trainer.state_dict()
        assert np.allclose(trainer.predict(x).numpy(), model(x, training=False).detach().numpy())
        assert all(torch.equal(t, state[name]) for name, t in trainer.state_dict().items())

    trained(classifier, ONE, look)


@every_plan
def test_dropout_and_noise_do_not_depend_on_the_plan(plan: Plan) -> None:
    dropping = lambda: classifier(dropout=True)  # noqa: E731
    losses, weights = trained(dropping, plan)
    expected = trained(dropping, ONE)
    assert worst(losses, expected[0]) < 1e-13
    assert worst(weights, expected[1]) < 1e-13
    assert abs(expected[0][0] - plainly(dropping, 4)[0][0]) > 1e-3, "nothing was dropped"


def test_a_rank_has_the_weights_of_its_own_stages_only() -> None:
    def look(trainer: Trainer, model: keras.Model) -> None:
        held = {v.path for v in model.weights if not v.value.is_meta and v.value.numel()}
        assert 0 < len(held) < len(model.weights)
        for v in model.trainable_variables:
            if v.path in held:
                own = trainer.model.get_parameter(trainer.model.names[v.path])
                assert v.value is own

    trained(classifier, PLANS[0], look)


def test_blocks_have_the_names_of_keras_layers() -> None:
    plan = Plan(stages=[["to", "conv2d"], ["batch_normalization", "re_lu", "separable_conv2d",
        "batch_normalization_1", "add", "global_average_pooling2d", "dense"]], micro_batches=4,
        schedule="1f1b")  # fmt: skip
    assert worst(trained(classifier, plan)[0], plainly(classifier, 4)[0]) < 1e-13


def test_a_plan_can_be_made_for_a_keras_model_first() -> None:
    model = fresh(classifier)
    found = gems.plan(model, torch.zeros(2, 8, 8, 3), ranks=1)
    Trainer(model, cross_entropy, sgd, torch.zeros(2, 8, 8, 3), found, transport=None).close()


def test_what_cannot_be_run_is_rejected_by_name() -> None:
    with pytest.raises(PlanError, match=r"has no weights yet; call model\.build"):
        Trainer(Subclassed(), cross_entropy, sgd, torch.zeros(2, 8, 8, 3), ONE)
    renorm = lambda: keras.Sequential(  # noqa: E731
        [keras.Input((8, 8, 3)), layers.Flatten(), layers.BatchNormalization(renorm=True),
         layers.Dense(5)]
    )  # fmt: skip
    with pytest.raises(GemsError, match="buffers would differ"):
        trained(renorm, PLANS[1])
