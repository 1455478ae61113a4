"""An optimizer of Keras on the variables of one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from gems.distributed.key import key
from gems.errors import PlanError
from gems.keras.arrays import array_of
from gems.keras.state.rank_weights import RankWeights
from gems.keras.tracing.subgraph import lock
from gems.transport.protocol import Transport


class RankOptimizer:
    """Steps the optimizer in one TensorFlow function, as `fit` does. A norm over all gradients is
    over those of all ranks."""

    def __init__(
        self,
        optimizer: Any,
        variables: Sequence[str],
        weights: RankWeights,
        transport: Transport,
    ) -> None:
        self.optimizer, self.weights, self.transport = optimizer, weights, transport
        self.paths = list(variables)
        _reject(optimizer)
        mine = [weights.variables[path] for path in self.paths]
        if not optimizer.built:
            with lock:
                optimizer.build(mine)
        elif list(map(id, optimizer._trainable_variables)) != list(map(id, mine)):
            raise PlanError(
                f"{optimizer.name} was built for {len(optimizer._trainable_variables)} variables, "
                f"and this rank has {len(mine)} of the model's; give an optimizer that was not "
                "built yet"
            )
        self.run: dict[tuple[str, ...], Any] = {}

    @property
    def settings(self) -> str:
        """In a form that ranks can compare."""
        config = self.optimizer.get_config()
        config.pop("name", None)
        return f"{type(self.optimizer).__name__} #{key(sorted(map(str, config.items()))):x}"

    def step(self, gradients: Mapping[str, Any]) -> None:
        """With gradients by path; variables without one are left as they are."""
        paths = tuple(path for path in gradients)
        new = [path for path in paths if path not in self.paths]
        if new:
            raise PlanError(
                f"{new[0]} has become trainable, and the optimizer was made without it; add the "
                "optimizer again after changing `trainable` (in Keras: call compile again)"
            )
        scale = self._clip(gradients)
        if not paths:
            self.optimizer._iterations.assign_add(1)
            return
        given = [gradients[path] for path in paths]
        if paths not in self.run:
            self.run[paths] = self._function(paths)
            with lock, self._unclipped():
                self.run[paths](given, scale)
            return
        self.run[paths](given, scale)

    def _function(self, paths: Sequence[str]) -> Any:
        variables = [self.weights.variables[path] for path in paths]
        clips = bool(self.optimizer.global_clipnorm)

        def apply(given: list[Any], scale: Any) -> None:
            if clips:
                given = [g * tf.cast(scale, g.dtype) for g in given]
            self.optimizer.apply(given, variables)

        return tf.function(apply)

    @contextmanager
    def _unclipped(self) -> Any:
        """Keras would clip by the norm of this rank's gradients."""
        most, self.optimizer.global_clipnorm = self.optimizer.global_clipnorm, None
        try:
            yield
        finally:
            self.optimizer.global_clipnorm = most

    def _clip(self, gradients: Mapping[str, Any]) -> Any:
        """What gradients are multiplied by so that their norm over all ranks is no larger than the
        optimizer's `global_clipnorm`."""
        most = self.optimizer.global_clipnorm
        if not most:
            return tf.constant(1.0, tf.float64)
        groups, rank = self.weights.owned.replica_groups, self.transport.rank
        own = [array_of(g) for path, g in gradients.items() if groups[path][0] == rank]
        total = np.array([sum(float(np.vdot(x, x)) for x in own)], np.float64)
        self.transport.all_reduce(total, tuple(range(self.transport.world))).wait()
        norm = float(total[0]) ** 0.5
        return tf.constant(most / max(norm, most), tf.float64)


def _reject(optimizer: Any) -> None:
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise PlanError(
            "LossScaleOptimizer scales losses by what one device saw overflow; use float32, or "
            "keras.mixed_precision 'mixed_bfloat16', which needs no scale"
        )
    if optimizer.gradient_accumulation_steps and optimizer.global_clipnorm:
        raise PlanError(
            f"gradient_accumulation_steps={optimizer.gradient_accumulation_steps} with "
            f"global_clipnorm={optimizer.global_clipnorm}: the norm is of several batches, and "
            "ranks know it of one; leave out one of them, or give the plan more micro_batches"
        )
    if optimizer.loss_scale_factor is not None:
        raise PlanError(
            f"loss_scale_factor={optimizer.loss_scale_factor} is applied inside Keras's own "
            "train_step; leave it out, and multiply the loss instead"
        )
