"""Make the values of variables that were built without: see gems.keras.lazily_built."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gems.keras.tracing.subgraph import lock


def initialize(variables: Iterable[Any]) -> None:
    """Make the values of those that have none."""
    with lock:
        for v in variables:
            if v._value is None:
                v._deferred_initialize()
