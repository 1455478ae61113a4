"""Work that succeeds on every rank or fails on every rank, with the same message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from gems.errors import CheckpointError, GemsError
from gems.transport.core import Transport

T = TypeVar("T")


def together(transport: Transport, doing: str, work: Callable[[], T]) -> list[T]:
    """What `work` gave on each rank. If it failed on one, all raise what the first of them said.

    A rank that fails still meets the others here, so that none waits for it.
    """
    failure: Exception | None = None
    told: Any = None
    try:
        told = (True, work())
    except GemsError as error:
        failure, told = error, (False, type(error), str(error))
    except Exception as error:
        failure, said = error, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        told = (False, CheckpointError, f"{doing} failed on rank {transport.rank}: {said}")
    outcomes = transport.gather(told)
    for good, *rest in outcomes:
        if not good:
            kind, message = rest
            raise kind(message) from failure
    return [given for _, given in outcomes]
