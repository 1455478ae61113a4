"""keras.applications: `keras/ResNet50` and its sisters, on Keras's backend.

They give logits, take normalised images, and have random weights. On the torch backend images have
channels first, as in PyTorch; on TensorFlow channels come last.
"""

from __future__ import annotations

import importlib
import inspect
import os
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # errors only
if threads := os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]:  # of a rank beside others
    os.environ.setdefault("TF_NUM_INTRAOP_THREADS", threads)
    os.environ.setdefault("TF_NUM_INTEROP_THREADS", "1")
keras: Any = importlib.import_module("keras")

BACKENDS = ("tensorflow", "torch")
SHARED = ("num_classes", "in_channels", "image_size")
# Given by our words, or about weights and heads that are not for training from random weights.
OWN = {
    *("include_top", "weights", "input_tensor", "input_shape", "pooling", "classes"),
    *("classifier_activation", "include_preprocessing", "name"),
}


def backend() -> str:
    """The one that Keras was imported with: KERAS_BACKEND, or Keras's own configuration."""
    found = keras.backend.backend()
    if found not in BACKENDS:
        raise ValueError(
            f"KERAS_BACKEND is {found}; Keras models run on {' and '.join(BACKENDS)}: set it to "
            "one of them"
        )
    return found


def names() -> list[str]:
    """The functions of keras.applications, which are named like classes."""
    found = vars(keras.applications).items()
    return sorted(name for name, x in found if name[0].isupper() and callable(x))


def options(name: str) -> tuple[str, ...]:
    return (*SHARED, *(each for each in _arguments(name) if each not in OWN))


def _arguments(name: str) -> list[str]:
    return list(inspect.signature(getattr(keras.applications, name)).parameters)


def build(name: str, options: dict[str, Any]) -> Any:
    """A keras.Model."""
    more = dict(options)
    side, channels = more.pop("image_size", 224), more.pop("in_channels", 3)
    before, first = keras.config.image_data_format(), backend() == "torch"
    shape = (channels, side, side) if first else (side, side, channels)
    if "include_preprocessing" in _arguments(name):
        more["include_preprocessing"] = False  # it expects numbers from 0 to 255
    keras.config.set_image_data_format("channels_first" if first else "channels_last")
    try:
        return getattr(keras.applications, name)(
            weights=None, input_shape=shape, classes=more.pop("num_classes", 1000),
            classifier_activation=None, **more,
        )  # fmt: skip
    finally:
        keras.config.set_image_data_format(before)
