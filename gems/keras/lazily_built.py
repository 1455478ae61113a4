"""Models whose weights no rank has as a whole: built without values, which each rank makes of its
own. Initializers of Keras have their seeds from when they were made, so the values are those that
plain Keras makes, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import keras
from keras.src.backend.common import global_state

WAITING = "uninitialized_variables"  # where Keras notes what its next scope initializes


@contextmanager
def lazily() -> Iterator[None]:
    """Build a model inside, and its variables have no values yet:

    with gems.keras.lazily():
        model = keras.applications.ResNet50(weights=None)
    """
    before = list(global_state.get_global_attribute(WAITING) or [])
    try:
        with keras.StatelessScope(initialize_variables=False):
            yield
    finally:
        # Else the next scope of Keras, wherever it is, would make the values of all.
        global_state.set_global_attribute(WAITING, before)
