"""Keras models under a plan, on the TensorFlow and torch backends of Keras 3.

model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
gems.keras.distribute(model, gems.Plan(stages=2, micro_batches=4))
model.fit(images, labels, epochs=2)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gems.keras.distributed_fit import distribute as distribute
    from gems.keras.lazily_built import lazily as lazily
    from gems.keras.planning import plan as plan
    from gems.keras.session import Session as Session
    from gems.keras.weight_files import load_weights as load_weights
    from gems.keras.weight_files import save_weights as save_weights

_WHERE = {
    "Session": "gems.keras.session",
    "distribute": "gems.keras.distributed_fit",
    "lazily": "gems.keras.lazily_built",
    "load_weights": "gems.keras.weight_files",
    "plan": "gems.keras.planning",
    "save_weights": "gems.keras.weight_files",
}

__all__ = ["Session", "distribute", "lazily", "load_weights", "plan", "save_weights"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'gems.keras' has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return __all__
