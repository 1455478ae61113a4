"""`gems.keras.distribute` with Keras on torch: see fit_corners.py."""

from tests.keras.fit_corners import *  # noqa: F403
