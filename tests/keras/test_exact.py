"""Keras models under a plan give what plain Keras gives: losses, gradients, variables."""

from __future__ import annotations

from functools import cache
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from gems.plans.plan import Plan
from tests.keras import networks
from tests.keras.exact import Trained, float64, plain, planned, worst
from tests.keras.networks import images, loss, nested, several, unet

float64()
EXACT = 1e-10


@cache
def expected(name: str) -> Trained:
    return plain(getattr(networks, name), loss(), images(), 4)


def difference(name: str, plan: Plan, **options: Any) -> float:
    found = planned(getattr(networks, name), loss(), images(), plan, **options)
    return worst(found, expected(name))


@pytest.mark.parametrize(
    "plan",
    [
        Plan(stages=1, micro_batches=4, schedule="sequential"),
        Plan(stages=3, micro_batches=4, schedule="1f1b"),
        Plan(stages=2, micro_batches=4, schedule="gpipe"),
        Plan(stages=4, ranks=2, micro_batches=4, schedule="interleaved"),
        Plan(stages=2, micro_batches=4, schedule="zero-bubble"),
        Plan(stages=2, micro_batches=4, schedule="auto"),
        Plan(stages=2, schedule="gems", replications=2),
        Plan(stages=2, schedule="gems-zb", replications=2),
        Plan(stages=2, micro_batches=4, schedule="auto", bidirectional=True),
        Plan(stages=1, micro_batches=2, schedule="sequential", data=2),
        Plan(stages=2, schedule="gems", replications=1, data=2),
        Plan(stages=2, micro_batches=4, recompute="always"),
        Plan(stages=2, micro_batches=4, recompute=("except_last", "never")),
        Plan(stages=4, micro_batches=4, schedule="auto", placement="fold"),
        Plan(stages=2, micro_batches=4, grad_sync="end"),
    ],
    ids=lambda plan: f"{plan.schedule} {plan.depth} x {plan.data} {plan.recompute}",
)
def test_every_schedule_gives_what_plain_keras_gives(plan):
    """Dropout, BatchNormalization, a layer that is called three times."""
    assert difference("subclassed", plan) < EXACT


@pytest.mark.parametrize("name", ["unet", "nested"])
@pytest.mark.parametrize(
    "plan",
    [
        Plan(stages=3, schedule="gems-zb", replications=2),
        Plan(stages=3, micro_batches=4, schedule="auto", placement="levels"),
    ],
    ids=["gems-zb", "levels"],
)
def test_every_kind_of_network_gives_what_plain_keras_gives(name, plan):
    """Skips, transposed convolution, nested models, regularizers of weights and activities."""
    assert difference(name, plan) < EXACT


def test_named_layers_are_recomputed_in_backward():
    again = ("conv2d_1", "batch_normalization_1", "conv2d_3", "batch_normalization_3")
    plan = Plan(stages=2, micro_batches=4, recompute=again)
    found = planned(unet, loss(), images(), plan)
    assert worst(found, expected("unet")) < EXACT
    for stage, session in enumerate(found.sessions):
        graph, whole = session.part.recording.graph, session.part.programs.stage_of
        saves = graph.activations(b for b, at in enumerate(whole) if at == stage)
        (program,) = programs(session, stage)
        assert program.saved_bytes == session.costs[stage].activations
        assert program.saved_bytes + program.temporary_bytes == saves
        assert bool(program.temporary_bytes) == (stage == 0)  # where these layers are


def programs(session: Any, stage: int) -> list[Any]:
    """Of training, for all forms of inputs."""
    known = session.part.programs.known
    return [part.programs[stage] for (_, training, _), part in known.items() if training]


def several_batches() -> Any:
    numbers = np.random.default_rng(2)
    return [
        (
            [numbers.normal(size=(7, 8, 8, 3)), numbers.normal(size=(7, 12))],
            [numbers.integers(0, 5, 7), numbers.normal(size=(7, 2))],
            numbers.uniform(0.5, 2, 7),
        )
        for _ in range(2)
    ]


@pytest.mark.parametrize(
    "plan",
    [Plan(stages=2, micro_batches=4), Plan(stages=2, schedule="gems", replications=2)],
    ids=["1f1b", "gems"],
)
def test_inputs_outputs_weights_and_uneven_batches(plan):
    """Two inputs, two losses, sample weights, frozen layers; 7 samples in 4 micro-batches."""
    losses = [loss(), keras.losses.MeanSquaredError()]
    found = planned(several, losses, several_batches(), plan)
    assert worst(found, plain(several, losses, several_batches(), 4)) < EXACT


def clipped() -> Any:
    return keras.optimizers.Adam(1e-2, global_clipnorm=0.01, weight_decay=0.1)


def test_a_norm_over_all_gradients_is_over_those_of_all_ranks():
    plan = Plan(stages=2, micro_batches=4)
    found = planned(nested, loss(), images(), plan, clipped)
    assert worst(found, plain(nested, loss(), images(), 4, clipped)) < EXACT


@pytest.mark.parametrize("reduction", ["sum", "mean_with_sample_weight"])
def test_losses_that_are_sums_or_weighed_means(reduction):
    """The reference takes means over micro-batches, so it is one batch here."""
    objective = keras.losses.MeanSquaredError(reduction=reduction)
    x, (y, _), weights = several_batches()[0]
    batch = (x[1], np.eye(5)[y], weights)
    plan = Plan(stages=2, micro_batches=4)
    expected = plain(_dense, objective, [batch], 1)
    assert worst(planned(_dense, objective, [batch], plan), expected) < EXACT


def _dense() -> Any:
    inputs = keras.Input((12,))
    hidden = keras.layers.Dense(6, activation="tanh")(inputs)
    return keras.Model(inputs, keras.layers.Dense(5)(hidden))


def test_saved_bytes_are_as_predicted():
    """What each stage holds for backward, each memory once, is what the planner was told."""
    plan = Plan(stages=3, micro_batches=2, schedule="1f1b")
    found = planned(unet, loss(), images(1, 4), plan)
    for stage, session in enumerate(found.sessions):
        (program,) = programs(session, stage)
        at = {name: tf.ones(t.shape, t.dtype) for name, t in program.given.items()}
        saved = [x for name, x in program.forward(at).items() if name.startswith("k:")]
        memory = {np.from_dlpack(x).ctypes.data: np.asarray(x).nbytes for x in saved}
        assert sum(memory.values()) == program.saved_bytes == session.costs[stage].activations


def test_a_measured_step_holds_what_its_schedule_predicts():
    plan = Plan(stages=3, micro_batches=4, schedule="1f1b")
    found = planned(unet, loss(), images(2), plan)
    for rank, session in enumerate(found.sessions):
        forecast = session.forecast()
        most = max(memory.activations for _, memory in forecast.memory[rank])
        assert max(live.activations for *_, live in session.last.stamps) == most
