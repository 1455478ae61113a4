"""Find the other ranks: torchrun, mpirun, srun, `gems train`, or nobody."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from gems.errors import GemsError, PeerError
from gems.transport.core import Transport
from gems.transport.local import World
from gems.transport.torchdist import TorchDist, first_line


@dataclass(frozen=True)
class Place:
    """Where this process stands among all that were started."""

    rank: int
    world: int
    local: int
    address: str
    port: int
    launcher: str


# launcher: rank, world size, rank on this node, ranks on this node, what names the job.
# The first three tell which launcher it was: a batch script of Slurm, which is alone, also has
# SLURM_PROCID and SLURM_NTASKS, and `srun --mpi=pmi2` sets PMI_RANK and PMI_SIZE.
LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", ("TORCHELASTIC_RUN_ID",)),
    "mpirun (Open MPI)": (
        "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE", ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    "mpirun (MPICH)": (
        "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", ("PMI_JOBID",),
    ),
    "srun": (
        "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE",
        ("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ),
}  # fmt: skip


def place(environment: Mapping[str, str] = os.environ) -> Place | None:
    """This process's place by the environment variables of its launcher; None if it is alone."""
    for launcher, (rank, world, local, on_node, job) in LAUNCHERS.items():
        # People set RANK and WORLD_SIZE by hand, and forget LOCAL_RANK.
        wanted = (rank, world) if launcher == "torchrun" else (rank, world, local)
        if not all(name in environment for name in wanted):
            continue
        if int(environment[world]) == 1:
            return None
        one_node = environment.get(on_node, environment[world]) == environment[world]
        return Place(
            rank=int(environment[rank]),
            world=int(environment[world]),
            local=int(environment.get(local, environment[rank])),
            address=_address(launcher, environment, one_node),
            port=_port(launcher, environment, job, one_node),
            launcher=launcher,
        )
    return None


def _address(launcher: str, environment: Mapping[str, str], one_node: bool) -> str:
    if "MASTER_ADDR" in environment:
        return environment["MASTER_ADDR"]
    if one_node:
        return "127.0.0.1"
    if launcher == "srun" and (host := first_host(environment.get("SLURM_STEP_NODELIST", ""))):
        return host
    raise GemsError(
        f"{launcher} started ranks on several nodes; set MASTER_ADDR to the host name of the first "
        "of them, e.g. mpirun -x MASTER_ADDR=$(hostname) ..."
    )


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list: `gpu[03-05,09],login1` gives `gpu03`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first.group()) if first else ""


def _port(
    launcher: str, environment: Mapping[str, str], job: tuple[str, ...], one_node: bool
) -> int:
    """A port that all ranks of one job agree on and two jobs on one node rarely share."""
    if "MASTER_PORT" in environment:
        return int(environment["MASTER_PORT"])
    named = [environment[key] for key in job if key in environment]
    if not named and not one_node:
        raise GemsError(
            f"{launcher} started ranks on several nodes and does not name the job; set MASTER_PORT "
            "to a port that is free on the first of them, the same on all"
        )
    digest = hashlib.blake2b("/".join(named or [str(os.getppid())]).encode(), digest_size=4)
    return 20000 + int.from_bytes(digest.digest(), "big") % 12000  # below those given out to anyone


def connect(
    backend: str | None = None, timeout: float = 1800.0, patience: float = 300.0
) -> Transport:
    """The transport of this process: over the launcher's ranks, or alone.

    A process group that exists is used. `timeout` seconds are for a peer that is alive but silent;
    one that died is noticed at once. `patience` seconds are for one that has not come yet.
    """
    usable(backend)
    if dist.is_initialized():
        return TorchDist(timeout)
    found = place()
    if found is None:
        return World(1).rank(0)
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    if backend == "nccl":
        torch.cuda.set_device(found.local % torch.cuda.device_count())
    if found.address in ("127.0.0.1", "localhost"):
        # Local ranks talk over loopback, whatever the host's name resolves to.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    _meet(found, backend, timedelta(seconds=timeout), timedelta(seconds=patience))
    return TorchDist(timeout, owner=True)


def usable(backend: str | None) -> None:
    """Refuse a backend that cannot run here."""
    if backend == "mpi":
        raise GemsError(
            "backend mpi: torch here has no MPI backend; gloo and nccl run under mpirun, too: "
            "leave the backend out"
        )
    if backend == "nccl" and not torch.cuda.is_available():
        raise GemsError("backend nccl wants GPUs, and torch sees none here; use gloo")


def _meet(at: Place, backend: str, timeout: timedelta, patience: timedelta) -> None:
    url = f"tcp://{at.address}:{at.port}"
    try:
        store, rank, world = next(dist.rendezvous(url, at.rank, at.world, timeout=patience))
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    except RuntimeError as error:
        raise PeerError(
            f"rank {at.rank} of {at.world} ({at.launcher}) could not meet the others at "
            f"{at.address}:{at.port} within {patience.total_seconds():g} seconds: "
            f"{first_line(error)}. Look for a rank that ended before; if the port is taken, set "
            "MASTER_PORT to a free one, the same on all ranks"
        ) from error


def device_for(transport: Transport) -> torch.device:
    """A GPU of this node if the ranks talk over NCCL, else the CPU."""
    if isinstance(transport, TorchDist) and transport.backend == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
