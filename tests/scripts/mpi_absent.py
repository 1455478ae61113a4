"""One rank of two fails before it comes to MPI; the other waits there."""

from __future__ import annotations

from gems.distributed.launchers import place
from gems.transport.mpi import Mpi

here = place()
assert here is not None
if here.rank == 1:
    raise OSError("no weights on this node")
Mpi(patience=2)
