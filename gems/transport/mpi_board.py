"""The board of signs of life (gems.transport.heartbeat) over MPI: each rank sends its line to each.

Messages of a few hundred bytes with a tag of their own, which MPI buffers: a rank that is stopped
holds up nobody.
"""

from __future__ import annotations

from typing import Any

from gems.transport.board import LONGEST, WORKING, parse
from gems.transport.mpi_library import Library


class MessageBoard:
    """Lines of all ranks of `comm`, on which nobody else uses the tag."""

    def __init__(self, library: Library, comm: Any, tag: int) -> None:
        self.library, self.comm, self.tag = library, comm, tag
        self.lines: list[bytes | None] = [None] * comm.size
        self.ended: set[int] = set()  # who reads no more
        self.leaving: list[tuple[Any, bytes]] = []

    def write(self, line: str) -> None:
        data = line.encode()
        with self.library.lock:
            self.lines[self.comm.rank] = data
            self.leaving = [(sent, kept) for sent, kept in self.leaving if not sent.Test()]
            for rank in range(self.comm.size):
                if rank != self.comm.rank and rank not in self.ended:
                    sent = self.comm.Isend([data, self.library.MPI.BYTE], rank, self.tag)
                    self.leaving.append((sent, data))

    def read(self) -> list[bytes | None]:
        MPI = self.library.MPI
        with self.library.lock:
            status = MPI.Status()
            while self.comm.Iprobe(MPI.ANY_SOURCE, self.tag, status):
                data = bytearray(status.Get_count(MPI.BYTE))
                source = status.Get_source()
                self.comm.Recv([data, MPI.BYTE], source, self.tag)
                self.lines[source] = bytes(data[: LONGEST + 1])
                sign = parse(self.lines[source])
                if sign is not None and sign.state != WORKING:
                    self.ended.add(source)
        return list(self.lines)

    def has_news(self) -> bool:
        """Whether a line has come that was not read."""
        with self.library.lock:
            return bool(self.comm.Iprobe(self.library.MPI.ANY_SOURCE, self.tag))
