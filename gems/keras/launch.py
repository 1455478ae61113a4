"""Find the other ranks, if a launcher started some: over MPI, or over gloo, which is torch's."""

from __future__ import annotations

from importlib.util import find_spec

import tensorflow as tf

from gems.distributed.launchers import Place, place
from gems.errors import GemsError
from gems.transport.heartbeat import TIMEOUT
from gems.transport.protocol import Transport
from gems.transport.threads import World

BACKENDS = ("mpi", "gloo")


def connect(backend: str | None = None, timeout: float | None = None) -> Transport:
    """The transport of this process, over the launcher's ranks or alone.

    `backend`: "mpi", which needs mpi4py, or "gloo", which needs torch. If left out, gloo under
    torchrun and where mpi4py is not installed, else MPI. A rank that gives no sign of life for
    `timeout` seconds is lost.
    """
    reject_gpus()
    if backend is not None and backend not in BACKENDS:
        raise GemsError(f"backend is {backend!r}; choose one of {', '.join(BACKENDS)}")
    timeout = TIMEOUT if timeout is None else timeout
    here = place()
    if here is None and backend != "mpi":
        return World(1).rank(0)
    if (backend or _default(here)) == "mpi":
        return _over_mpi(here, timeout)
    return _over_gloo(timeout)


def _default(here: Place | None) -> str:
    by_torch = here is not None and here.launcher == "torchrun"
    return "gloo" if by_torch or find_spec("mpi4py") is None else "mpi"


def _over_mpi(here: Place | None, timeout: float) -> Transport:
    from gems.transport.mpi import Mpi
    from gems.transport.mpi_library import library

    comm = library(timeout).MPI.COMM_WORLD
    if here is not None and (comm.rank, comm.size) != (here.rank, here.world):
        raise GemsError(
            f"to MPI this is rank {comm.rank} of {comm.size}, and to {here.launcher} it is rank "
            f"{here.rank} of {here.world}: this MPI does not know that launcher. Start ranks by "
            "the mpirun that belongs to this MPI, or by srun --mpi=... with a kind that it was "
            "built for; or use backend gloo"
        )
    return World(1).rank(0) if comm.size == 1 else Mpi(timeout)


def _over_gloo(timeout: float) -> Transport:
    if find_spec("torch") is None:
        raise GemsError(
            "backend gloo comes with torch, which is not installed; install its CPU build (pip "
            "install torch), or mpi4py, and start ranks by mpirun"
        )
    from gems.torch.launch import connect as over_gloo

    return over_gloo("gloo", timeout, device="cpu")[0]


def reject_gpus() -> None:
    """Everything here is in host memory."""
    if found := tf.config.list_logical_devices("GPU"):
        raise GemsError(
            f"gems.keras runs on CPUs, and TensorFlow sees {len(found)} GPUs, which were never "
            "tried; hide them with CUDA_VISIBLE_DEVICES=-1, or use gems.Trainer with PyTorch"
        )
