"""Models and comparisons that the tests of gems.keras share. Not a test itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import keras
import numpy as np
from keras.src.backend.common import dtypes


@contextmanager
def float64() -> Iterator[None]:
    """Keras in float64, which it otherwise demotes to float32 wherever types meet."""
    before = keras.config.floatx()
    keras.config.set_floatx("float64")
    with mock.patch.dict(dtypes.BIT64_TO_BIT32_DTYPE, clear=True):
        try:
            yield
        finally:
            keras.config.set_floatx(before)


def fresh(make: Callable[[], keras.Model]) -> keras.Model:
    """The same model every time: weights, and names of layers."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    return make()


def worst(found: Any, expected: Any) -> float:
    """The largest difference, relative to the largest value where that is above one."""
    if isinstance(found, Mapping):
        return max(worst(found[key], expected[key]) for key in expected)
    a, b = np.asarray(found, dtype="float64"), np.asarray(expected, dtype="float64")
    assert a.shape == b.shape
    return float(np.abs(a - b).max() / max(1.0, np.abs(b).max())) if a.size else 0.0
