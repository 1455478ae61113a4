"""`gems.keras.distribute` with Keras on TensorFlow: see fit_corners.py."""

from tests.keras.fit_corners import *  # noqa: F403
