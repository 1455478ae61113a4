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
from gems.transport.torchdist import TorchDist


@dataclass(frozen=True)
class Place:
    """Where this process stands among all that were started."""

    rank: int
    world: int
    local: int
    address: str
    port: int
    launcher: str


# launcher: rank, world size, rank on this node, ranks on this node, what names the job
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
        "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_TASKS_PER_NODE",
        ("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ),
}  # fmt: skip


def place(environment: Mapping[str, str] = os.environ) -> Place | None:
    """This process's place by the environment variables of its launcher; None if it is alone."""
    for launcher, (rank, world, local, on_node, job) in LAUNCHERS.items():
        if rank in environment and int(environment.get(world, "1")) > 1:
            return Place(
                rank=int(environment[rank]),
                world=int(environment[world]),
                local=int(environment.get(local, environment[rank])),
                address=_address(launcher, environment, world, on_node),
                port=_port(environment, job),
                launcher=launcher,
            )
    return None


def _address(launcher: str, environment: Mapping[str, str], world: str, on_node: str) -> str:
    if "MASTER_ADDR" in environment:
        return environment["MASTER_ADDR"]
    if launcher == "srun":
        nodes = environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_JOB_NODELIST", ""))
        return first_host(nodes) or "127.0.0.1"
    if environment.get(on_node, environment[world]) == environment[world]:
        return "127.0.0.1"
    raise GemsError(
        f"{launcher} started {environment[world]} ranks on several nodes; set MASTER_ADDR to the "
        "host name of the first of them, e.g. mpirun -x MASTER_ADDR=$(hostname) ..."
    )


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list: `gpu[03-05,09],login1` gives `gpu03`."""
    match = re.match(r"([^,\[]+)(?:\[(\d+))?", nodes)
    return "".join(part for part in match.groups() if part) if match else ""


def _port(environment: Mapping[str, str], job: tuple[str, ...]) -> int:
    """A port that all ranks of one job agree on and two jobs on one node rarely share."""
    if "MASTER_PORT" in environment:
        return int(environment["MASTER_PORT"])
    named = [environment[key] for key in job if key in environment] or [str(os.getppid())]
    digest = hashlib.blake2b("/".join(named).encode(), digest_size=4).digest()
    return 20000 + int.from_bytes(digest, "big") % 20000


def connect(backend: str | None = None, timeout: float = 1800.0) -> Transport:
    """The transport of this process: over the launcher's ranks, or alone.

    A process group that exists is used. `timeout` seconds are for a peer that is alive but silent;
    one that died is noticed at once.
    """
    if not dist.is_initialized():
        found = place()
        if found is None:
            return World(1).rank(0)
        backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
        if backend == "nccl":
            torch.cuda.set_device(found.local % torch.cuda.device_count())
        if found.address in ("127.0.0.1", "localhost"):
            # Local ranks talk over loopback, whatever the host's name resolves to.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        try:
            dist.init_process_group(
                backend,
                init_method=f"tcp://{found.address}:{found.port}",
                rank=found.rank,
                world_size=found.world,
                timeout=timedelta(seconds=timeout),
            )
        except RuntimeError as error:
            raise PeerError(
                f"rank {found.rank} of {found.world} ({found.launcher}) could not meet the others "
                f"at {found.address}:{found.port}: {error}"
            ) from error
    return TorchDist(timeout)


def device_for(transport: Transport) -> torch.device:
    """A GPU of this node if the ranks talk over NCCL, else the CPU."""
    if isinstance(transport, TorchDist) and transport.backend == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
