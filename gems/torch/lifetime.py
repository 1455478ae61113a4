"""From connecting to closing: a session or trainer that was closed does nothing, and raises."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from gems.errors import GemsError
from gems.torch.launch import connect, device_of
from gems.transport.protocol import Transport
from gems.transport.torch_distributed import TIMEOUT

T = TypeVar("T")


def connected(
    transport: Transport | None,
    backend: str | None,
    timeout: float | None,
    device: torch.device | str | None,
) -> tuple[Transport, torch.device]:
    """The transport that was given, or the launcher's, and the device of this rank."""
    if transport is None:
        return connect(backend, TIMEOUT if timeout is None else timeout, device=device)
    if timeout is not None:
        raise GemsError(
            f"timeout is {timeout}, and a transport was given, which has its own; give one of them"
        )
    if backend is not None:
        raise GemsError(
            f"backend is {backend}, and a transport was given, which has its own; give one of them"
        )
    return transport, device_of(transport, device)


def closable(kind: type[T]) -> type[T]:
    """Let all public methods of a class raise once its `closed` is true; `close` may come again.

    If the constructor raises, the other ranks are told why, and the transport that it opened is
    closed, so that another attempt starts afresh.
    """
    for name in dir(kind):
        method = inspect.getattr_static(kind, name)
        if callable(method) and not name.startswith("_") and name != "close":
            setattr(kind, name, _while_open(name, method))
    setattr(kind, "__init__", _closing_on_error(kind.__init__))  # noqa: B010 (pyright's wish)
    return kind


def _while_open(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        if getattr(self, "closed", False):
            kind = type(self).__name__.lower()
            raise GemsError(
                f"{name}: this {kind} was closed, and has left the other ranks; call {name} "
                f"before close, or make another {kind}"
            )
        return method(self, *args, **options)

    return call


def _closing_on_error(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def call(self: Any, *args: Any, **options: Any) -> None:
        try:
            init(self, *args, **options)
        except BaseException as error:
            opened: Transport | None = getattr(self, "transport", None)
            if opened is not None and options.get("transport") is None:
                opened.fail(error)
                opened.close()
            raise

    return call
