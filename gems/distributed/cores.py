"""Cores of a host, and the ranks that share them."""

from __future__ import annotations

import os
import socket

from gems.transport.protocol import Transport


def own_cores() -> list[int]:
    """Those that this process may run on."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def have_spare_cores(transport: Transport, threads: int) -> bool:
    """Whether beside each rank a core is left, of those that it may run on, by the `threads` that
    it and the ranks that share them compute on: for what the transport does meanwhile."""
    found = transport.all_gather_object((socket.gethostname(), own_cores(), threads))
    return all(_spare(host, cores, found) > 0 for host, cores, _ in found)


def _spare(host: str, cores: list[int], ranks: list[tuple[str, list[int], int]]) -> int:
    sharing = [n for at, theirs, n in ranks if at == host and not set(cores).isdisjoint(theirs)]
    return len(cores) - sum(sharing)
