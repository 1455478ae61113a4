"""The sockets that this process has open: who is at the other end, and how to hang up on one that
belongs to a library."""

from __future__ import annotations

import os
import select
import socket
import sys
from collections.abc import Iterator

FOLDER = "/proc/self/fd"
TABLE = "/proc/net/tcp"


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
    for connection in _connections(sockets):
        _shut(connection)


def hung_up(sockets: dict[int, str]) -> bool:
    """Whether one of these connections has ended: the other end has closed it, and perhaps this one
    as well since. (Linux; elsewhere not known.)"""
    closed = getattr(select, "POLLRDHUP", 0)
    if not closed:
        return False
    seen = 0
    for connection in _connections(sockets):
        poll = select.poll()
        poll.register(connection, closed)
        if any(events & closed for _, events in poll.poll(0)):
            return True
        seen += 1
    return seen < len(sockets)


def strangers(sockets: dict[int, str]) -> set[int]:
    """Users other than this process's who are at the other end, on this node. (Linux, IPv4.)

    gloo asks nobody who he is: whoever connects first to the port where a rank expects another is
    taken for it.
    """
    ends = set()
    for connection in _connections(sockets):
        try:
            here, there = connection.getsockname(), connection.getpeername()
        except OSError:
            continue  # one that listens
        if connection.family == socket.AF_INET:
            ends.add((_spelled(there), _spelled(here)))  # as the other end has it
    if not ends or not os.path.exists(TABLE):
        return set()
    with open(TABLE) as table:
        rows = [line.split() for line in table]
    return {int(row[7]) for row in rows[1:] if (row[1], row[2]) in ends} - {os.geteuid()}


def _spelled(address: tuple[str, int]) -> str:
    """As the kernel writes it: `0100007F:1F90`."""
    number = int.from_bytes(socket.inet_aton(address[0]), sys.byteorder)
    return f"{number:08X}:{address[1]:04X}"


def _connections(sockets: dict[int, str]) -> Iterator[socket.socket]:
    for descriptor, name in sockets.items():
        try:
            copy = os.dup(descriptor)
        except OSError:
            continue  # closed since
        if _name(copy) != name:  # the number may be another socket's or file's by now
            os.close(copy)
            continue
        with socket.socket(fileno=copy) as connection:
            yield connection


def _shut(connection: socket.socket) -> None:
    try:
        connection.getpeername()  # one that listens stays as it is: gloo would not bear it
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # not connected, or not any more
