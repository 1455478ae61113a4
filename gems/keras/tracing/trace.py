"""From a Keras model and the form of its inputs to a recording with blocks and costs in bytes."""

from __future__ import annotations

from typing import Any

from gems.keras.tracing.blocks import add_blocks
from gems.keras.tracing.record import Recording, record


def trace(model: Any, specs: Any, *, training: bool) -> Recording:
    """A model on inputs like `specs`, tf.TensorSpecs in the structure of its inputs."""
    found = record(model, specs, training=training)
    add_blocks(found)
    return found
