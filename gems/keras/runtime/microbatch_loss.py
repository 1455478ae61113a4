"""The loss of a micro-batch, its gradient, and how much it counts in that of the batch."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from gems.errors import PlanError
from gems.keras.runtime.microbatch import Batch
from gems.keras.tracing.subgraph import lock

MEANS = ("sum_over_batch_size", "mean")


class MicrobatchLoss:
    """A compiled loss of Keras. The last stage's ranks run it once per micro-batch, in the order
    in which they run them."""

    def __init__(self, loss: Any) -> None:
        self.loss = loss
        self.run = tf.function(self._run, reduce_retracing=True)

    def build(self, batch: Batch, i: int, outputs: Any) -> None:
        """Once all is known that Keras makes losses of, on every rank; `outputs` are zeros."""
        if self.loss.built:
            return
        with lock:
            self.loss(batch.targets_of(i), outputs, batch.weights_of(i))
            for metric in self.loss.metrics:
                metric.reset_state()

    @property
    def reductions(self) -> set[str]:
        return {str(each.loss.reduction) for each in self.loss._flat_losses}

    def share(self, batch: Batch, i: int) -> float:
        """What the loss of a micro-batch counts in that of the whole batch."""
        kinds = self.reductions
        if kinds <= set(MEANS) or (batch.weights is None and kinds <= {*MEANS, WEIGHED}):
            return batch.sizes[i] / batch.samples
        if kinds == {"sum"}:
            return 1.0
        weights = [] if batch.weights is None else tf.nest.flatten(batch.weights)
        if kinds == {WEIGHED} and len(weights) == 1:
            part, whole = (float(tf.reduce_sum(x)) for x in (batch.weights_of(i), weights[0]))
            return part / whole if whole else 0.0
        raise PlanError(
            f"losses have the reductions {', '.join(sorted(kinds))}, so that the loss of a batch "
            "does not follow from those of its micro-batches; use reduction "
            "'sum_over_batch_size' for all, or 'sum' for all"
        )

    def __call__(self, outputs: Any, targets: Any, weights: Any) -> tuple[Any, list[Any]]:
        """The value, and the gradients of the flat outputs."""
        return self.run(outputs, targets, weights)

    def _run(self, outputs: Any, targets: Any, weights: Any) -> tuple[Any, list[Any]]:
        flat = tf.nest.flatten(outputs)
        with tf.GradientTape() as tape:
            tape.watch([x for x in flat if x.dtype.is_floating])
            value = self.loss(targets, outputs, weights)
        zero = tf.UnconnectedGradients.ZERO
        return value, tape.gradient(value, flat, unconnected_gradients=zero)


WEIGHED = "mean_with_sample_weight"


def compiled_loss(model: keras.Model, loss: Any, loss_weights: Any = None) -> Any:
    """A loss as `compile` takes it, or the model's own, as Keras runs it."""
    from keras.src.trainers.compile_utils import CompileLoss

    if loss is None:
        return model._compile_loss if model.compiled else None
    return CompileLoss(loss, loss_weights, output_names=getattr(model, "output_names", None))
