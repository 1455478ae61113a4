"""Which rank this process is, by the environment variables of whatever launched it.

MVAPICH, PALS, Flux, jsrun and PMIx were never run here: their variables are from their sources and
manuals. torchrun, Open MPI and MPICH were.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from gems.errors import GemsError


@dataclass(frozen=True)
class Place:
    """Where this process stands among all that were started."""

    rank: int
    world: int
    address: str
    port: int
    launcher: str
    job: str = field(default="", compare=False)  # what no other run here is called
    one_node: bool = False  # whether all ranks are surely on this one

    @property
    def private(self) -> bool:
        """Whether ranks meet in a folder of this user, and not at the launcher's store."""
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return self.one_node and not (agent and self.launcher == "torchrun")


class Launcher(NamedTuple):
    """The variables of one launcher.

    `mark` is a third one that tells it from another with the same first two. On one node the ranks
    `on_node` are all ranks, or `nodes` is 1. `job` are what name the run, `hosts` what begins with
    the host of rank 0.
    """

    rank: str
    world: str
    mark: str = ""
    on_node: str = ""
    nodes: str = ""
    job: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()


# Of the batch system that mpirun runs in. A job step of Slurm may lack the first node of the job:
# mpirun starts helpers by srun on all but its own.
BATCH = ("SLURM_JOB_NODELIST", "PBS_NODEFILE", "LSB_HOSTS")
# mpirun_rsh starts a helper on each node, whose ranks inherit its variables: where mpirun_rsh runs,
# which need not be on rank 0's node, and its process.
MPISPAWN = ("MPISPAWN_MPIRUN_HOST", "MPISPAWN_MPIRUN_ID")
SIZE = "WORLD_SIZE"  # where a launcher tells no size, people may

# In this order: a rank of mpirun in a job of Slurm inherits the variables of srun, and one of Flux
# or PALS has PMI_RANK, too. A batch script of Slurm, which is alone, has SLURM_PROCID and
# SLURM_NTASKS; `srun --mpi=pmi2` sets PMI_RANK and PMI_SIZE.
LAUNCHERS = {
    "torchrun": Launcher("RANK", SIZE, on_node="LOCAL_WORLD_SIZE", job=("TORCHELASTIC_RUN_ID",)),
    "mpirun (Open MPI)": Launcher(
        "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", on_node="OMPI_COMM_WORLD_LOCAL_SIZE",
        job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"), hosts=BATCH,
    ),
    "mpirun_rsh (MVAPICH2)": Launcher(
        "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", on_node="MV2_COMM_WORLD_LOCAL_SIZE",
        job=MPISPAWN, hosts=BATCH,
    ),
    "mpirun_rsh (MVAPICH 3)": Launcher(
        "MVP_COMM_WORLD_RANK", "MVP_COMM_WORLD_SIZE", on_node="MVP_COMM_WORLD_LOCAL_SIZE",
        job=MPISPAWN, hosts=BATCH,
    ),
    "jsrun": Launcher(
        "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", on_node="JSM_NAMESPACE_LOCAL_SIZE",
        job=("LSB_JOBID", "JSM_NAMESPACE_ID"),
    ),
    "flux run": Launcher(
        "FLUX_TASK_RANK", "FLUX_JOB_SIZE", nodes="FLUX_JOB_NNODES", job=("FLUX_JOB_ID",)
    ),
    "mpiexec (PALS)": Launcher(
        "PALS_RANKID", "PMI_SIZE", on_node="PALS_LOCAL_SIZE", job=("PALS_APID",),
        hosts=("PBS_NODEFILE",),
    ),
    "mpirun (MPICH, Intel MPI)": Launcher(
        "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", job=("PMI_JOBID",),
        hosts=BATCH,
    ),
    "mpiexec (Cray PMI)": Launcher(
        "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE", job=("PMI_JOBID",), hosts=BATCH,
    ),
    "srun": Launcher(
        "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE",
        job=("SLURM_JOB_ID", "SLURM_STEP_ID"), hosts=("SLURM_STEP_NODELIST",),
    ),
    "a launcher with PMIx": Launcher(
        "PMIX_RANK", SIZE, on_node="PMIX_LOCAL_SIZE", job=("PMIX_NAMESPACE",), hosts=BATCH
    ),
}  # fmt: skip
ALONE = "SLURM_PROCID"  # which a batch script of Slurm has as well
# A process with one of these was launched, even if no variable above tells its rank: by wrappers
# that pass some variables on, launchers of before, or on systems that nobody has tried.
SIGNS = (
    *("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK"),
    *("MVP_COMM_WORLD_LOCAL_RANK", "MPIRUN_RANK", "MPISPAWN_MPIRUN_ID", "PMI_ID", "PMI_FD"),
    *("MPI_LOCALRANKID", "PALS_LOCAL_RANKID", "FLUX_TASK_LOCAL_ID", "JSM_NAMESPACE_LOCAL_RANK"),
    *("ALPS_APP_PE", "MP_CHILD"),
)


def place(environment: Mapping[str, str] = os.environ) -> Place | None:
    """This process's place by the environment variables of its launcher; None if it is alone."""
    for name, launcher in LAUNCHERS.items():
        told = launcher.world in environment or launcher.rank == ALONE
        world = launcher.world if told else SIZE
        if all(key in environment for key in filter(None, (launcher.rank, world, launcher.mark))):
            return _place(name, launcher, environment, world)
    for launcher in LAUNCHERS.values():
        if launcher.rank in environment and launcher.rank != ALONE:
            raise GemsError(
                f"{launcher.rank} is {environment[launcher.rank]}, so this is one of several "
                "processes, but nothing tells how many; each would train by itself. Set WORLD_SIZE "
                f"to their number on all of them, and RANK, if {launcher.rank} is not their "
                f"number; or unset {launcher.rank} if this process is alone"
            )
    if found := next((sign for sign in SIGNS if sign in environment), None):
        raise GemsError(
            f"{found} is {environment[found]}, so a launcher started this process, but nothing "
            "tells which of how many it is; each would train by itself. Set RANK and WORLD_SIZE on "
            f"all of them, or unset {found} if this process is alone"
        )
    return None


def _place(
    name: str, launcher: Launcher, environment: Mapping[str, str], size: str
) -> Place | None:
    rank, world = (_number(environment, key) for key in (launcher.rank, size))
    if not 0 <= rank < world:
        raise GemsError(
            f"{launcher.rank} is {rank} and {size} is {world}; ranks are 0 to {size} - 1"
        )
    if world == 1:
        return None
    one_node = _is_one_node(launcher, environment, world)
    address = _address(name, launcher, environment, one_node)
    port = _port(name, environment, launcher.job, one_node)
    return Place(
        rank=rank,
        world=world,
        address=address,
        port=port,
        launcher=name,
        job=_job(environment, launcher.job, port),
        one_node=one_node and _is_loopback(address),
    )


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise GemsError(
            f"{name} is {environment[name]!r}, not a whole number; set or unset it"
        ) from None


def _is_one_node(launcher: Launcher, environment: Mapping[str, str], world: int) -> bool:
    """As far as the variables tell: people set RANK and WORLD_SIZE by hand, and no more."""
    if launcher.nodes:
        return environment.get(launcher.nodes) == "1"
    return environment.get(launcher.on_node, str(world)) == str(world)


def _address(name: str, launcher: Launcher, environment: Mapping[str, str], one_node: bool) -> str:
    if "MASTER_ADDR" in environment:
        return environment["MASTER_ADDR"]
    if one_node:
        return "127.0.0.1"
    for variable in launcher.hosts:
        if host := HOSTS[variable](environment.get(variable, "")):
            return host
    raise GemsError(
        f"{name} started ranks on several nodes; set MASTER_ADDR to the host name of the first "
        "of them, e.g. mpirun -x MASTER_ADDR=$(hostname) ..."
    )


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list: `gpu[03-05,09],login1` gives `gpu03`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first.group()) if first else ""


def _first_line(file: str) -> str:
    """The first host of a file with one per line."""
    try:
        lines = Path(file).read_text().split() if file else []
    except OSError:
        return ""
    return lines[0] if lines else ""


def _first_word(hosts: str) -> str:
    return hosts.split()[0] if hosts.split() else ""


HOSTS = {
    "SLURM_JOB_NODELIST": first_host,
    "SLURM_STEP_NODELIST": first_host,
    "PBS_NODEFILE": _first_line,
    "LSB_HOSTS": _first_word,
}


def _port(name: str, environment: Mapping[str, str], job: tuple[str, ...], one_node: bool) -> int:
    """A port that all ranks of one job agree on and two jobs on one node rarely share."""
    if "MASTER_PORT" in environment:
        return _number(environment, "MASTER_PORT")
    named = [environment[key] for key in job if key in environment]
    if not named and not one_node:
        raise GemsError(
            f"{name} started ranks on several nodes and does not name the job; set MASTER_PORT "
            "to a port that is free on the first of them, the same on all"
        )
    digest = hashlib.blake2b("/".join(named or [str(os.getppid())]).encode(), digest_size=4)
    return 20000 + int.from_bytes(digest.digest(), "big") % 12000  # below those given out to anyone


def _job(environment: Mapping[str, str], job: tuple[str, ...], port: int) -> str:
    named = [environment[key] for key in job if key in environment]
    digest = hashlib.blake2b("/".join([*named, str(port)]).encode(), digest_size=8)
    return digest.hexdigest()


def _is_loopback(address: str) -> bool:
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
