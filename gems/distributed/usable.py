"""Whether a session can still be used, and how it ends when its `with` block does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, TypeVar

from gems.errors import GemsError
from gems.transport.protocol import Transport

Own = TypeVar("Own", bound="Usable")


class Usable(ABC):
    """A session of any framework: `closed`, or `failed` in a way that it cannot go on from."""

    name = "session"  # in errors
    transport: Transport
    closed: bool
    failed: BaseException | None

    def reject_unusable(self) -> None:
        """Raise if this was closed, or a call failed in a way that this cannot go on from."""
        if self.closed:
            raise GemsError(
                f"this {self.name} was closed, and has left the other ranks; make another"
            )
        if self.failed is not None:
            raise GemsError(
                f"this {self.name} has failed in the middle of a step, and its state is not that "
                f"of any step ({type(self.failed).__name__}: {self.failed}); make a new one, and "
                "load the last checkpoint"
            ) from self.failed

    @abstractmethod
    def close(self) -> None:
        """Leave the other ranks."""

    def __enter__(self: Own) -> Own:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self.transport.fail(error)  # others may be in the middle of something
        self.close()
