"""Find the other ranks: torchrun, mpirun, srun, `gems train`, or nobody."""

from __future__ import annotations

import atexit
import hashlib
import ipaddress
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gems.errors import GemsError, PeerError
from gems.transport.board import FAILED, LOST, Board, FolderBoard, StoreBoard
from gems.transport.communicators import bound, setting_up
from gems.transport.heartbeat import Heartbeat
from gems.transport.private import VARIABLE, Folder, meet
from gems.transport.protocol import Transport
from gems.transport.threads import World
from gems.transport.torch_distributed import (
    TIMEOUT,
    TorchDist,
    default_heartbeat,
    first_line,
    next_name,
)


@dataclass(frozen=True)
class Place:
    """Where this process stands among all that were started."""

    rank: int
    world: int
    local: int
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
        address = _address(launcher, environment, one_node)
        port = _port(launcher, environment, job, one_node)
        return Place(
            rank=int(environment[rank]),
            world=int(environment[world]),
            local=int(environment.get(local, environment[rank])),
            address=address,
            port=port,
            launcher=launcher,
            job=_job(environment, job, port),
            one_node=one_node and _is_loopback(address),
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


@dataclass
class Run:
    """What this process has set up once, and all its transports share.

    The store outlives trainers, because another one cannot be opened at the same address. Each
    default group has a part of the store for itself, so that none finds the addresses of another.
    """

    store: Any = None
    folder: Folder | None = None
    group: Any = None  # the default group that we started
    users: int = 0  # transports on it
    groups: int = 0  # default groups so far

    def leave(self) -> None:
        """The last transport ends the default group."""
        self.users -= 1
        ours, self.group = self.group, None if self.users == 0 else self.group
        if self.users == 0 and dist.is_initialized() and dist.group.WORLD is ours:
            dist.destroy_process_group()


_run = Run()


def connect(
    backend: str | None = None, timeout: float = TIMEOUT, patience: float | None = None
) -> Transport:
    """The transport of this process: over the launcher's ranks, or alone.

    A process group that exists is used. A rank that gives no sign of life for `timeout` seconds is
    lost; one that died is noticed at once. `patience` seconds are for the next one to come, as
    long as some have not; as many as `timeout` if left out.
    """
    if not timeout > 0:
        raise GemsError(f"timeout is {timeout}; give the seconds after which a rank is lost")
    patience = timeout if patience is None else patience
    usable(backend)
    if dist.is_initialized():
        return _on_group(timeout, patience)
    found = place()
    if found is None:
        return World(1).rank(0)
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    if backend == "nccl":
        torch.cuda.set_device(found.local % torch.cuda.device_count())
    if found.one_node:  # local ranks talk over loopback, whatever the host's name resolves to
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback())
    return _meet(found, backend, timeout, patience)


def loopback() -> str:
    """The name of this system's loopback interface."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), "lo")


def _on_group(timeout: float, patience: float) -> Transport:
    """On the default group that exists: the user's, or ours with another trainer on it."""
    ours = _run.group is not None and dist.group.WORLD is _run.group
    if ours and _run.folder is not None:
        heartbeat = _heartbeat(dist.get_rank(), dist.get_world_size(), timeout)
    else:
        heartbeat = default_heartbeat(timeout)
    if heartbeat is not None:
        _attend(heartbeat, patience)
    return _transport(timeout, heartbeat, ours=ours)


def _meet(at: Place, backend: str, timeout: float, patience: float) -> Transport:
    if _run.store is None:
        _run.store = _store(at, patience)
    heartbeat = _heartbeat(at.rank, at.world, timeout)
    _attend(heartbeat, patience)
    _run.groups += 1
    store = dist.PrefixStore(f"group-{_run.groups}", _run.store)
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=at.rank,
            world_size=at.world,
            timeout=setting_up(timeout),
            **bound(backend),
        )
    except RuntimeError as error:
        why = heartbeat.cause() or first_line(error)
        heartbeat.end(FAILED, why)
        raise PeerError(
            f"rank {at.rank} of {at.world} ({at.launcher}) could not set up the process group: "
            f"{why}. Look for a rank that ended before, and start again"
        ) from error
    _run.group, _run.users = dist.group.WORLD, 0
    return _transport(timeout, heartbeat, ours=True)


def _transport(timeout: float, heartbeat: Heartbeat | None, *, ours: bool) -> Transport:
    _run.users += ours
    try:
        return TorchDist(timeout, heartbeat=heartbeat, leave=_run.leave if ours else None)
    except BaseException as error:
        if heartbeat is not None:
            heartbeat.end(FAILED, str(error))
        if ours:
            _run.leave()
        raise


def _store(at: Place, patience: float) -> Any:
    """Where ranks meet first: a private folder on one node, else the launcher's store."""
    if at.private:
        given = os.environ.get(VARIABLE)
        if given is not None:
            _run.folder = Folder(Path(given), str(at.rank))
        else:
            _run.folder = meet(at.job, at.rank, patience)
        atexit.register(_run.folder.leave)
        return dist.FileStore(str(_run.folder.path / "store"), at.world)
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        return dist.TCPStore(
            at.address,
            at.port,
            at.world,
            is_master=at.rank == 0 and not agent,
            timeout=timedelta(seconds=patience),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except RuntimeError as error:
        raise PeerError(
            f"rank {at.rank} of {at.world} ({at.launcher}) could not meet the others at "
            f"{at.address}:{at.port} within {patience:g} seconds: {first_line(error)}. The store "
            f"there is {'the launcher' if agent else 'rank 0'}'s: see whether it has started, or "
            "ended before; if the port is taken, set MASTER_PORT to a free one, the same on all "
            "ranks"
        ) from error


def _heartbeat(rank: int, world: int, timeout: float) -> Heartbeat:
    name = next_name()
    if _run.folder is not None:
        folder = _run.folder.path / name.replace("/", "-")
        board: Board = FolderBoard(folder, rank, world)
        return Heartbeat(board, rank, world, timeout, str(folder))
    where = f"the store at {_run.store.host}:{_run.store.port}"
    board = StoreBoard(_run.store.clone(), name, rank, world)
    return Heartbeat(board, rank, world, timeout, where)


def _attend(heartbeat: Heartbeat, patience: float) -> None:
    try:
        heartbeat.attend(patience)
    except PeerError as error:
        heartbeat.end(LOST, str(error))
        raise


def usable(backend: str | None) -> None:
    """Raise if a backend cannot run here."""
    if backend == "mpi":
        raise GemsError(
            "backend mpi: torch here has no MPI backend; gloo and nccl run under mpirun, too: "
            "leave the backend out"
        )
    if backend == "nccl" and not torch.cuda.is_available():
        raise GemsError("backend nccl wants GPUs, and torch sees none here; use gloo")


def device_for(transport: Transport) -> torch.device:
    """A GPU of this node if the ranks talk over NCCL, else the CPU."""
    if isinstance(transport, TorchDist) and transport.backend == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
