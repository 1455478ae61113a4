"""`gems.keras.distribute` with Keras on TensorFlow: see fit_cases.py."""

from tests.keras.fit_cases import *  # noqa: F403
