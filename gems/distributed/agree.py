"""Work that succeeds on every rank or fails on every rank, with the same message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from gems import errors
from gems.errors import CheckpointError, GemsError
from gems.transport.protocol import Transport

T = TypeVar("T")
# An error is sent as its name, so that a rank can only make one of these.
KINDS: dict[str, type[GemsError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, GemsError)
}


def on_all_ranks(transport: Transport, doing: str, work: Callable[[], T]) -> list[T]:
    """What `work` returned on each rank. If it failed on one, all raise the error of the first.

    A rank that fails takes part in the all-gather, so that none waits for it.
    """
    failure: Exception | None = None
    mine: Any = None
    try:
        mine = (True, work())
    except GemsError as error:
        failure, mine = error, (False, _kind(error), str(error))
    except Exception as error:
        failure, text = error, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        mine = (False, CheckpointError.__name__, f"{doing} failed on rank {transport.rank}: {text}")
    outcomes = transport.all_gather_object(mine)
    for good, *rest in outcomes:
        if not good:
            kind, message = rest
            raise KINDS.get(kind, GemsError)(message) from failure
    return [given for _, given in outcomes]


def _kind(error: GemsError) -> str:
    """The name of the nearest of its classes that all ranks know."""
    known = (kind.__name__ for kind in type(error).__mro__ if KINDS.get(kind.__name__) is kind)
    return next(known)
