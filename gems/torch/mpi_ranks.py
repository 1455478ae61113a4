"""The transport of this process over MPI, and its device: asked for, or where torch has no gloo."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict

import torch
import torch.distributed as dist

from gems.distributed.launchers import place
from gems.errors import GemsError
from gems.torch.device_choice import Asked, alone, asked, decide, used
from gems.transport.mpi import Mpi
from gems.transport.mpi_library import library
from gems.transport.protocol import Transport
from gems.transport.threads import World

log = logging.getLogger(__name__)


def is_meant(backend: str | None) -> bool:
    """Whether ranks talk over MPI: if that is asked for, if the process group that exists does, or
    if others were launched and this torch has no gloo (Spack builds it so by default)."""
    if backend is not None:
        return backend == "mpi"
    if dist.is_initialized():
        return dist.get_backend() == "mpi"
    return not dist.is_gloo_available() and place() is not None


def connect(
    device: torch.device | str | None, timeout: float, patience: float
) -> tuple[Transport, torch.device]:
    """Over all ranks of MPI. No process group of torch is needed, or used."""
    mine = asked(device, "mpi")
    comm = library(patience).MPI.COMM_WORLD
    _require_world(comm.rank, comm.size)
    if comm.size == 1:
        return World(1).rank(0), alone(device, "mpi")
    transport = Mpi(timeout, patience=patience)
    try:
        told = transport.all_gather_object(asdict(mine))
        choice = decide([_asked(one) for one in told])
    except BaseException as error:
        transport.fail(error)
        transport.close()
        raise
    if choice.warning and transport.rank == 0:
        log.warning("%s", choice.warning)
    return transport, used(choice.devices[transport.rank])


def _asked(told: Mapping[str, object]) -> Asked:
    return Asked(**{**told, "gpus": tuple(told["gpus"])})  # type: ignore[arg-type]


def _require_world(rank: int, size: int) -> None:
    """Raise unless MPI counts ranks as the launcher and the process group do."""
    others = []
    if (here := place()) is not None:
        others.append((here.launcher, here.rank, here.world))
    if dist.is_initialized():
        others.append(("the process group", dist.get_rank(), dist.get_world_size()))
    for name, its_rank, world in others:
        if (rank, size) != (its_rank, world):
            raise GemsError(
                f"to MPI this is rank {rank} of {size}, and to {name} it is rank {its_rank} of "
                f"{world}: this MPI does not know that launcher, or ranks are in another order. "
                "Start ranks by the mpirun that belongs to this MPI, or by srun --mpi=... with a "
                "kind that it was built for; or use backend gloo or nccl"
            )
