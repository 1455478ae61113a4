"""The board of signs of life (gems.transport.heartbeat) over MPI: each rank sends its line to each.

Messages of a few hundred bytes with a tag of their own, which MPI buffers: a rank that is stopped
holds up nobody.

[Note: nothing is left unread] MPICH's MPI_Finalize fails where a message was sent to this rank and
never received. The rank then ends without a word to its launcher: mpirun kills the others and
returns 9, and under srun they wait forever. So a rank sends one last line to every other one, also
to those that had ended before, and nothing after it; and reads until it has all their last lines,
before MPI ends.
"""

from __future__ import annotations

import os
from typing import Any

from gems.transport.board import LONGEST, WORKING, parse
from gems.transport.mpi_library import Library


class MessageBoard:
    """Lines of all ranks of `comm`, on which nobody else uses the tag."""

    def __init__(self, library: Library, comm: Any, tag: int) -> None:
        self.library, self.comm, self.tag = library, comm, tag
        self.lines: list[bytes | None] = [None] * comm.size
        self.ended: set[int] = set()  # whose last line has come
        self.told = False  # whether ours has left
        self.leaving: list[tuple[Any, bytes]] = []
        self.pid = os.getpid()

    def write(self, line: str) -> None:
        data = line.encode()
        sign = parse(data)
        with self.library.lock:
            if self.told:  # [Note: nothing is left unread]
                return
            self.told = sign is not None and sign.state != WORKING
            self.lines[self.comm.rank] = data
            self.leaving = [(sent, kept) for sent, kept in self.leaving if not sent.Test()]
            for rank in range(self.comm.size):
                if rank != self.comm.rank and (self.told or rank not in self.ended):
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

    def is_over(self) -> bool:
        """Whether the last lines of all other ranks have been read. A fork reads none, and a
        communicator that its owner has freed has none left."""
        MPI = self.library.MPI
        if os.getpid() != self.pid or MPI.Is_finalized():
            return True
        try:
            self.read()
        except MPI.Exception:
            return True
        return len(self.ended) == len(self.lines) - 1
