"""One rank of a training run of a Keras model on TensorFlow: its trainer, loss and optimizer."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from gems.cli.keras_models import built, reject_data
from gems.cli.model_options import micro_batch, model_from
from gems.cli.reject import as_gems_error
from gems.cli.training_loop import TrainingLoop
from gems.errors import GemsError
from gems.keras import checkpoint
from gems.keras.optimizers import optimizer
from gems.keras.trainer import Trainer
from gems.plans.plan import Plan

if TYPE_CHECKING:
    from gems.data.source import Source

files = checkpoint
LOSSES = {"classify": ("cross-entropy",), "regress": ("mse", "mae", "huber")}  # by task


class Job(TrainingLoop):
    """A run whose network is a Keras model."""

    files = checkpoint

    def _trainer(self, plan: Plan | str) -> Trainer:
        factor, given = self._factor(), self.given
        with as_gems_error():
            made = optimizer(
                given.optimizer, given.learning_rate, given.weight_decay, given.momentum, given.clip
            )
        return trainer_from(
            given,
            plan,
            self.train,
            loss=_loss(given.loss, self.train.task),
            optimizer=made,
            learning_rate=lambda step: given.learning_rate * factor(step),
            interrupt=self.interrupt,
        )

    def _begin(self) -> None:
        begin(self.trainer, self.start, self._take_position)

    def _apply_options(self) -> None:
        """The learning rate is set in each step; all else is the optimizer's from the start."""

    @property
    def _rate(self) -> float:
        return self.trainer.rate


def _loss(name: str | None, task: str) -> Any:
    known = LOSSES[task]
    if (name or known[0]) not in known:
        raise GemsError(f"--loss {name} does not fit the task {task}; give {' or '.join(known)}")
    if task == "regress":
        return name or known[0]
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Images(Trainer):
    """Takes images as gems.data has them, with channels first, and gives outputs as metrics of the
    command line take them."""

    def step(self, inputs: Any, targets: Any) -> Any:
        return super().step(_channels_last(inputs), np.asarray(targets))

    def predict(self, inputs: Any) -> Any:
        import torch

        found = tf.cast(super().predict(_channels_last(inputs)), tf.float32)
        return torch.from_numpy(np.array(found))


def _channels_last(images: Any) -> np.ndarray:
    return np.ascontiguousarray(np.moveaxis(np.asarray(images), 1, -1))


def trainer_from(given: argparse.Namespace, plan: Plan | str, source: Source, **more: Any) -> Any:
    """A trainer of the model of the options, for samples like the source's."""
    reject_data(given, source)
    channels, *sides = source.shape
    return Images(
        built(given, lambda: model_from(given)),
        sample=tf.TensorSpec((micro_batch(given), *sides, channels), "float32"),
        plan=plan,
        memory=given.memory,
        costs=given.costs,
        machine="cpu" if given.machine == "auto" else given.machine,
        backend=given.backend,
        timeout=given.timeout,
        **more,
    )


def begin(trainer: Trainer, path: Path | None, position: Any = None) -> None:
    """Take a checkpoint, or weights alone; `position` is called with what is known of the data."""
    if path is None:
        return
    if path.is_dir():
        extra = trainer.load(path)
        if position is not None and extra:
            position(extra)
    else:
        trainer.load_weights(path)
