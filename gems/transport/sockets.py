"""The sockets that this process has open, and how to hang up on one that belongs to a library."""

from __future__ import annotations

import os
import socket

FOLDER = "/proc/self/fd"


def open_sockets() -> dict[int, str]:
    """Descriptor -> a name that no other socket has. (Linux; elsewhere none are known.)"""
    listed = os.listdir(FOLDER) if os.path.isdir(FOLDER) else ()
    named = {int(descriptor): _name(int(descriptor)) for descriptor in listed}
    return {descriptor: name for descriptor, name in named.items() if name.startswith("socket:")}


def _name(descriptor: int) -> str:
    try:
        return os.readlink(f"{FOLDER}/{descriptor}")
    except OSError:
        return ""  # closed since; the listing itself had one


def hang_up(sockets: dict[int, str]) -> None:
    """End these connections, for both sides; the descriptors stay with whoever has them."""
    for descriptor, name in sockets.items():
        try:
            copy = os.dup(descriptor)
        except OSError:
            continue  # closed since
        with socket.socket(fileno=copy) as connection:
            if _name(copy) == name:  # the number may be another socket's by now
                _shut(connection)


def _shut(connection: socket.socket) -> None:
    try:
        connection.getpeername()  # one that listens stays as it is: gloo would not bear it
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # not connected, or not any more
