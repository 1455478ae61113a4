"""Transports one after the other, closed by each rank when it has the time; the last stays open.

MPI is ended here, and not by mpi4py, which would not tell whether it could be.
"""

from __future__ import annotations

import atexit
import sys
import time

from mpi4py import MPI


@atexit.register  # first, so that it comes last
def finalize() -> None:
    MPI.Finalize()
    sys.stdout.write("ended\n")


from gems.transport.mpi import Mpi  # noqa: E402

for turn in range(8):
    transport = Mpi()
    time.sleep(0.01 * ((transport.rank + turn) % transport.world))
    if turn < 7:
        transport.close()
