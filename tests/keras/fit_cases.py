"""The tests of `gems.keras.distribute`, for both backends of Keras: test_fit.py and
test_torch_fit.py collect them, and each runs where its backend does."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
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
from tests.keras.parity import float64, fresh, worst

PLANS = [
    Plan(stages=2, micro_batches=4, schedule="1f1b"),
    Plan(stages=2, schedule="gems", replications=1),
    Plan(stages=1, data=2, micro_batches=1, schedule="1f1b"),
]
IDS = ["1f1b", "gems", "data"]
if keras.backend.backend() == "tensorflow":
    PLANS.append(Plan(stages=2, spatial=["1x2"], micro_batches=4, schedule="1f1b"))
    PLANS.append(Plan(stages=1, spatial=["1x2"], micro_batches=4, schedule="sequential"))
    IDS += ["tiles", "tiles to the end"]
every_plan = pytest.mark.parametrize("plan", PLANS, ids=IDS)
PIPELINE = PLANS[0]
DICE = np.random.default_rng(0)
IMAGES = DICE.normal(size=(20, 8, 8, 3))
LABELS = (IMAGES.mean((1, 2, 3)) > 0).astype("int64")


@pytest.fixture(autouse=True)
def exact() -> Any:
    with float64():
        yield


def network() -> keras.Model:
    """A skip connection, a penalty on weights, statistics of each sample alone: plain fit has whole
    batches, and BatchNormalization would see micro-batches."""
    x = inputs = keras.Input((8, 8, 3))
    x = skip = layers.Conv2D(
        8, 3, padding="same", activation="relu", kernel_regularizer=keras.regularizers.L2(1e-2)
    )(x)
    x = layers.ReLU()(layers.GroupNormalization(2)(layers.Conv2D(8, 3, padding="same")(x)))
    x = layers.GlobalAveragePooling2D()(layers.Add()([x, skip]))
    return keras.Model(inputs, layers.Dense(3)(x))


def cross_entropy() -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def compiled(make: Callable[[], keras.Model] = network, **options: Any) -> keras.Model:
    model = fresh(make)
    optimizer = keras.optimizers.Adam(1e-2, global_clipnorm=0.5)
    options = {"loss": cross_entropy(), "metrics": ["accuracy"]} | options
    model.compile(options.pop("optimizer", optimizer), **options)
    return model


def on_ranks(plan: Plan, work: Callable[[Any, int], Any], **options: Any) -> list[Any]:
    """`work(model, rank)` on ranks that are threads: what each gave."""
    models = [compiled(**options) for _ in range(plan.world)]

    def rank(transport: Any) -> Any:
        model = gems.keras.distribute(models[transport.rank], plan, transport=transport)
        return work(model, transport.rank)

    return run(plan.world, rank, seconds=100)


def fitting(**options: Any) -> dict[str, Any]:
    """Arguments of fit. Ranks that are threads share generators, so data is not shuffled."""
    return {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0} | options


def assert_same(found: Any, expected: Any) -> None:
    assert set(found) == set(expected)
    assert worst(found, expected) < 3e-7, (found, expected)  # metrics are float32


# --- fit, evaluate, predict -----------------------------------------------------------------------


@every_plan
def test_fit_evaluate_and_predict_are_plain_keras_s(plan: Plan) -> None:
    given = fitting(validation_data=(IMAGES[:6], LABELS[:6]), class_weight={0: 1.0, 1: 2.0, 2: 0.5})
    plain = compiled()
    history = plain.fit(IMAGES, LABELS, **given).history
    evaluated = plain.evaluate(IMAGES, LABELS, verbose=0, return_dict=True)
    predicted = plain.predict(IMAGES, verbose=0)

    def work(model: Any, rank: int) -> Any:
        told = model.fit(IMAGES, LABELS, **given).history
        again = model.evaluate(IMAGES, LABELS, verbose=0, return_dict=True)
        return told, again, model.predict(IMAGES, verbose=0), model.get_weights()

    for told, again, outputs, weights in on_ranks(plan, work):
        assert_same(told, history)
        assert_same(again, evaluated)
        assert worst(outputs, predicted) < 1e-12
        assert all(worst(a, b) < 1e-12 for a, b in zip(weights, plain.get_weights(), strict=True))


class Batches(keras.utils.PyDataset):
    def __init__(self) -> None:
        super().__init__()

    def __len__(self) -> int:
        return 3

    def __getitem__(self, i: int) -> Any:
        part = slice(8 * i, 8 * i + 8)
        return IMAGES[part], LABELS[part], np.linspace(0.5, 1.5, len(LABELS[part]))


def test_inputs_of_every_kind_are_taken() -> None:
    """Sample weights, a part kept for validation, a PyDataset, a generator."""
    weights = np.linspace(0.5, 1.5, len(LABELS))
    kinds: list[Callable[[Any], Any]] = [
        lambda m: m.fit(
            IMAGES, LABELS, **fitting(sample_weight=weights, validation_split=0.25, epochs=1)
        ),
        lambda m: m.fit(Batches(), epochs=1, verbose=0, shuffle=False),
        lambda m: m.fit((Batches()[i] for i in range(3)), epochs=1, verbose=0, steps_per_epoch=3),
    ]
    plain = compiled()
    expected = [kind(plain).history for kind in kinds]
    for found in on_ranks(PIPELINE, lambda m, rank: [kind(m).history for kind in kinds]):
        for mine, theirs in zip(found, expected, strict=True):
            assert_same(mine, theirs)


def test_single_batches() -> None:
    def work(model: Any, rank: int = 0) -> Any:
        return (
            model.train_on_batch(IMAGES, LABELS, return_dict=True),
            model.test_on_batch(IMAGES, LABELS, return_dict=True),
            np.asarray(keras.ops.convert_to_numpy(model.predict_on_batch(IMAGES))),
        )

    expected = work(compiled())
    for found in on_ranks(PIPELINE, work):
        assert_same(found[0], expected[0])
        assert_same(found[1], expected[1])
        assert worst(found[2], expected[2]) < 1e-12


def test_compiling_again_keeps_the_weights() -> None:
    """As one does to train more layers after a while."""

    def work(model: Any, rank: int = 0) -> Any:
        model.get_layer(index=1).trainable = False
        model.compile(keras.optimizers.SGD(0.1), cross_entropy())
        first = model.fit(IMAGES, LABELS, **fitting(epochs=1)).history
        model.get_layer(index=1).trainable = True
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), cross_entropy())
        return first, model.fit(IMAGES, LABELS, **fitting()).history, model.get_weights()

    expected = work(compiled())
    for first, second, weights in on_ranks(PIPELINE, work):
        assert_same(first, expected[0])
        assert_same(second, expected[1])
        assert all(worst(a, b) < 1e-12 for a, b in zip(weights, expected[2], strict=True))


# --- callbacks ------------------------------------------------------------------------------------


def test_callbacks_do_the_same_on_all_ranks_and_write_on_rank_0(tmp_path: Path) -> None:
    def work(model: Any, rank: int, folder: Path) -> Any:
        listed = [
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5),
            keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=1, min_delta=9.0),
            keras.callbacks.EarlyStopping("loss", patience=2, min_delta=9.0,
                restore_best_weights=True),
            keras.callbacks.TerminateOnNaN(),
            keras.callbacks.CSVLogger(folder / "log.csv"),
            keras.callbacks.ModelCheckpoint(folder / "{epoch}.weights.h5", save_weights_only=True),
        ]  # fmt: skip
        history = model.fit(IMAGES, LABELS, **fitting(epochs=5, callbacks=listed)).history
        return history, model.get_weights(), float(model.optimizer.learning_rate.numpy())

    (tmp_path / "plain").mkdir()
    (tmp_path / "plan").mkdir()
    history, weights, rate = work(compiled(), 0, tmp_path / "plain")
    assert 1 < len(history["loss"]) < 5, "it stopped early"
    for found in on_ranks(PIPELINE, lambda m, rank: work(m, rank, tmp_path / "plan")):
        assert_same(found[0], history)
        assert found[2] == rate
        assert all(worst(a, b) < 1e-12 for a, b in zip(found[1], weights, strict=True))
    wrote = sorted(path.name for path in (tmp_path / "plan").iterdir())
    assert wrote == sorted(path.name for path in (tmp_path / "plain").iterdir())
    assert len((tmp_path / "plan" / "log.csv").read_text().splitlines()) == len(history["loss"]) + 1


# --- files ----------------------------------------------------------------------------------------


def test_a_model_file_of_a_plan_goes_on_anywhere(tmp_path: Path) -> None:
    """Saved under one plan, loaded by plain Keras and under another plan: weights, and the
    optimizer's state, so that training goes on as if it had not stopped."""
    plain = compiled()
    plain.fit(IMAGES, LABELS, **fitting())
    expected = plain.fit(IMAGES, LABELS, **fitting()).history
    path, weights = tmp_path / "model.keras", tmp_path / "run" / "model.weights.h5"

    def save(model: Any, rank: int) -> None:
        model.fit(IMAGES, LABELS, **fitting())
        model.save(path)
        model.save_weights(weights)
        model.fit(IMAGES, LABELS, **fitting(epochs=1))  # goes on after a save

    on_ranks(PIPELINE, save)
    assert sorted(p.name for p in tmp_path.rglob("*.*")) == ["model.keras", "model.weights.h5"]
    assert_same(keras.saving.load_model(path).fit(IMAGES, LABELS, **fitting()).history, expected)

    read = [keras.saving.load_model(path) for _ in range(2)]  # with a built optimizer

    def go_on(transport: Any) -> Any:
        model = gems.keras.distribute(read[transport.rank], PIPELINE, transport=transport)
        return model.fit(IMAGES, LABELS, **fitting()).history

    for history in run(2, go_on, seconds=100):
        assert_same(history, expected)

    def load(model: Any, rank: int) -> Any:
        model.fit(IMAGES[:8], LABELS[:8], **fitting(epochs=1))
        model.load_weights(weights)
        return model.fit(IMAGES, LABELS, **fitting()).history

    for history in on_ranks(PLANS[1], load):
        assert_same(history, expected)

    def load_first(model: Any, rank: int) -> Any:
        model.load_weights(weights)
        return model.predict(IMAGES, verbose=0)

    other = fresh(network)
    other.load_weights(weights)
    for outputs in on_ranks(PIPELINE, load_first):
        assert worst(outputs, other.predict(IMAGES, verbose=0)) < 1e-12


def test_weights_as_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"

    def save(model: Any, rank: int) -> Any:
        model.fit(IMAGES, LABELS, **fitting(epochs=1))
        gems.keras.save_weights(model, path)
        return model.get_weights()

    weights = on_ranks(PIPELINE, save)[0]
    other = fresh(network)
    gems.keras.load_weights(other, path)
    assert all(np.array_equal(a, b) for a, b in zip(other.get_weights(), weights, strict=True))

    def load(model: Any, rank: int) -> Any:
        model.fit(IMAGES[:8], LABELS[:8], **fitting(epochs=1))
        model.load_weights(path)
        return model.get_weights()

    for found in on_ranks(PLANS[1], load):
        assert all(np.array_equal(a, b) for a, b in zip(found, weights, strict=True))

    other = keras.Model(inputs := keras.Input((3,)), layers.Dense(4, name="dense")(inputs))
    with pytest.raises(GemsError, match=r"dense/kernel has the shape \(8, 3\), and the model"):
        gems.keras.load_weights(other, path)


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "model.weights.h5"
    path.write_text("what was there")

    def work(model: Any, rank: int) -> str:
        model.fit(IMAGES, LABELS, **fitting(epochs=1))
        with pytest.raises(GemsError) as caught:
            model.save_weights(path, max_shard_size="no size")
        with pytest.raises(GemsError, match="overwrite=False"):
            model.save_weights(path, overwrite=False)
        return str(caught.value)

    for text in on_ranks(PIPELINE, work):
        assert "failed on rank 0" in text
    assert path.read_text() == "what was there"
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


# --- what does not apply --------------------------------------------------------------------------


class OwnStep(keras.Model):
    def train_step(self, *args: Any) -> Any:
        raise AssertionError


def test_models_and_compile_arguments_that_do_not_apply_are_rejected_by_name() -> None:
    model = OwnStep(inputs := keras.Input((3,)), layers.Dense(2)(inputs))
    with pytest.raises(PlanError, match="OwnStep has a train_step of its own"):
        gems.keras.distribute(model, PIPELINE)
    with pytest.raises(PlanError, match="takes a model of Keras 3"):
        gems.keras.distribute(layers.Dense(2), PIPELINE)
    for name, value in (("run_eagerly", True), ("steps_per_execution", 4), ("jit_compile", True)):
        model = gems.keras.distribute(compiled(**{name: value}), Plan())
        with pytest.raises(PlanError, match=f"{name}={value}"):
            model.fit(IMAGES, LABELS, **fitting())
    with pytest.raises(PlanError, match="under a plan already"):
        gems.keras.distribute(model, Plan())


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"zero": 1, "data": 2}, "zero"),
        ({"offload": "activations"}, "offload"),
        ({"stages": 2, "micro_batches": 2, "schedule": "2bw"}, "2bw"),
        pytest.param(
            {"spatial": (1, 2)},
            "spatial",
            marks=pytest.mark.skipif(len(PLANS) > 3, reason="offered on TensorFlow"),
        ),
    ],
)
def test_plans_that_are_not_offered_are_rejected_by_name(
    options: dict[str, Any], name: str
) -> None:
    with pytest.raises(PlanError, match=name):
        gems.keras.distribute(compiled(), Plan(**options))


def root_of_mean_square(y: Any, output: Any) -> Any:
    return keras.ops.sqrt(keras.ops.mean(keras.ops.square(keras.ops.cast(y, "float64") - output)))


def test_metrics_that_do_not_add_up_are_rejected_by_name() -> None:
    def work(model: Any, rank: int) -> str:
        with pytest.raises(PlanError) as caught:
            model.fit(IMAGES, LABELS[:, None], **fitting())
        return str(caught.value)

    for text in on_ranks(PIPELINE, work, loss="mse", metrics=[root_of_mean_square]):
        assert "root_of_mean_square: its function gives one number for a batch" in text


def test_a_callback_that_keeps_files_of_its_own_is_rejected_by_name(tmp_path: Path) -> None:
    def work(model: Any, rank: int) -> None:
        with pytest.raises(PlanError, match=r"BackupAndRestore.*use ModelCheckpoint"):
            model.fit(
                IMAGES, LABELS,
                **fitting(callbacks=[keras.callbacks.BackupAndRestore(tmp_path / "backup")]),
            )  # fmt: skip

    on_ranks(PIPELINE, work)


def test_ranks_with_other_data_are_rejected() -> None:
    def work(model: Any, rank: int) -> str:
        with pytest.raises(GemsError) as caught:
            model.fit(IMAGES + rank, LABELS, **fitting())
        return str(caught.value)

    assert "differ" in json.dumps(on_ranks(PIPELINE, work))


# --- processes ------------------------------------------------------------------------------------

ROOT = Path(__file__).parent.parent.parent
EXAMPLE = ROOT / "examples" / "keras_fit.py"


def test_the_example_prints_the_same_on_one_process_and_on_two() -> None:
    """Shuffled, with a part for validation, built without values: histories are equal to every
    digit that is shown, over torchrun."""
    command = re.search(r"^ {4}torchrun (.*)$", EXAMPLE.read_text(), re.MULTILINE)
    assert command
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    lines = []
    for launcher in ([EXAMPLE], ["-m", "torch.distributed.run", *command[1].split()]):
        done = subprocess.run(
            [sys.executable, *map(str, launcher)], cwd=ROOT, env=environment,
            capture_output=True, text=True, timeout=110,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        lines.append([line for line in done.stdout.splitlines() if line.startswith("epoch")])
    assert len(lines[0]) == 3
    assert lines[0] == lines[1]


def test_a_model_that_is_built_lazily_has_the_weights_of_its_own_stages_only() -> None:
    plain = compiled()
    first = [np.array(w) for w in plain.get_weights()]
    history = plain.fit(IMAGES, LABELS, **fitting(epochs=1)).history

    def lazy() -> keras.Model:
        with gems.keras.lazily():
            return network()

    def work(model: Any, rank: int) -> Any:
        model.predict(IMAGES, verbose=0)
        weights = model.get_weights()
        told = model.fit(IMAGES, LABELS, **fitting(epochs=1)).history
        held = [v for v in model.weights if v._value is not None and not _is_meta(v._value)]
        return weights, told, sum(int(np.prod(v.shape)) for v in held)

    found = on_ranks(PIPELINE, work, make=lazy)
    for weights, told, _ in found:
        assert all(np.array_equal(a, b) for a, b in zip(weights, first, strict=True))
        assert_same(told, history)
    assert sum(numbers for _, _, numbers in found) == plain.count_params()


def _is_meta(value: Any) -> bool:
    return bool(getattr(value, "is_meta", False))
