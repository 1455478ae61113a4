"""Find the other ranks, if a launcher started some, and the device of this one."""

from __future__ import annotations

import atexit
import json
import logging
import os
import socket
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gems.distributed.launchers import Place, place
from gems.errors import GemsError, PeerError
from gems.torch import cuda_device, mpi_ranks
from gems.torch.device_choice import Asked, alone, asked, decide, reject_shared, used
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

log = logging.getLogger(__name__)


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
    backend: str | None = None,
    timeout: float = TIMEOUT,
    patience: float | None = None,
    device: torch.device | str | None = None,
) -> tuple[Transport, torch.device]:
    """The transport of this process, over the launcher's ranks or alone, and its device.

    A process group that exists is used. A rank that gives no sign of life for `timeout` seconds is
    lost; one that died is noticed at once. `patience` seconds are for the next one to come, as
    long as some have not; as many as `timeout` if left out. A `device` that is left out, or "auto",
    is a GPU if each rank can have one, else the CPU; with backend "gloo" the CPU. Backend "mpi"
    needs no process group.
    """
    if not timeout > 0:
        raise GemsError(f"timeout is {timeout}; give the seconds after which a rank is lost")
    patience = timeout if patience is None else patience
    if mpi_ranks.is_meant(backend):
        return mpi_ranks.connect(device, timeout, patience)
    if dist.is_initialized():
        return _on_group(asked(device, backend), timeout, patience)
    found = place()
    if found is None:
        return World(1).rank(0), alone(device, backend)
    mine = asked(device, backend)
    if found.one_node:  # local ranks talk over loopback, whatever the host's name resolves to
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback())
    return _meet(found, mine, timeout, patience)


def loopback() -> str:
    """The name of this system's loopback interface."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), "lo")


def _on_group(mine: Asked, timeout: float, patience: float) -> tuple[Transport, torch.device]:
    """On the default group that exists: the user's, or ours with another trainer on it."""
    backend, device = _of_group(mine)
    ours = _run.group is not None and dist.group.WORLD is _run.group
    if ours and _run.folder is not None:
        heartbeat = _heartbeat(dist.get_rank(), dist.get_world_size(), timeout)
    else:
        heartbeat = default_heartbeat(timeout)
    if heartbeat is not None:
        _attend(heartbeat, patience)
    transport = _transport(timeout, heartbeat, backend, ours=ours)
    if backend == "nccl":
        try:
            gpu = mine.gpus[device.index or 0]
            reject_shared(transport.all_gather_object((mine.host, gpu)))
        except BaseException as error:
            transport.fail(error)
            transport.close()
            raise
    return transport, device


def _of_group(mine: Asked) -> tuple[str, torch.device]:
    """The backend and the device of a rank on the default group that exists. Ours are groups of
    their own, but where nothing is asked for, they are as the user's: on GPUs if that has NCCL,
    as one made without a backend has where there are GPUs."""
    world: Any = dist.group.WORLD
    nccl = "cuda:nccl" in dist.get_backend_config(world).split(",")
    on_gpu = mine.kind == "cuda" or (mine.kind == "auto" and nccl and mine.backend != "gloo")
    if not on_gpu:
        return "gloo", torch.device("cpu")
    bound = getattr(world, "bound_device_id", None)
    index = mine.index
    if index is None:
        index = bound.index if bound is not None else cuda_device.current()
    return mine.backend or ("nccl" if nccl else "gloo"), used(f"cuda:{index}")


def _meet(
    at: Place, mine: Asked, timeout: float, patience: float
) -> tuple[Transport, torch.device]:
    if _run.store is None:
        _run.store = _store(at, patience)
    heartbeat = _heartbeat(at.rank, at.world, timeout)
    _attend(heartbeat, patience)
    _run.groups += 1
    store = dist.PrefixStore(f"group-{_run.groups}", _run.store)
    try:
        backend, device = _chosen(store, at, mine)
        dist.init_process_group(
            backend,
            store=store,
            rank=at.rank,
            world_size=at.world,
            timeout=setting_up(timeout),
            **bound(backend),
        )
    except GemsError as error:
        heartbeat.end(FAILED, str(error))
        raise
    except RuntimeError as error:
        why = heartbeat.cause() or first_line(error)
        heartbeat.end(FAILED, why)
        raise PeerError(
            f"rank {at.rank} of {at.world} ({at.launcher}) could not set up the process group: "
            f"{why}. Look for a rank that ended before, and start again"
        ) from error
    _run.group, _run.users = dist.group.WORLD, 0
    return _transport(timeout, heartbeat, backend, ours=True), device


def _chosen(store: Any, at: Place, mine: Asked) -> tuple[str, torch.device]:
    """The backend, and the device of this rank, once all ranks have told what they ask for."""
    keys = [f"device/{rank}" for rank in range(at.world)]
    store.set(keys[at.rank], json.dumps(asdict(mine)))
    told = [json.loads(text) for text in store.multi_get(keys)]
    choice = decide([Asked(**one | {"gpus": tuple(one["gpus"])}) for one in told])
    if choice.warning and at.rank == 0:
        log.warning("%s", choice.warning)
    return choice.backend, used(choice.devices[at.rank])


def _transport(
    timeout: float, heartbeat: Heartbeat | None, backend: str, *, ours: bool
) -> Transport:
    _run.users += ours
    leave = _run.leave if ours else None
    try:
        return TorchDist(timeout, heartbeat=heartbeat, leave=leave, backend=backend)
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
            f"ranks; if rank 0 is not on {at.address}, set MASTER_ADDR to its host"
        ) from error


def _heartbeat(rank: int, world: int, timeout: float) -> Heartbeat:
    name = next_name()
    if _run.folder is not None:
        folder = _run.folder.path / name.replace("/", "-")
        board: Board = FolderBoard(folder, rank, world)
        return Heartbeat(board, rank, world, timeout, str(folder))
    where = f"the store at {_run.store.host}:{_run.store.port}"
    board = StoreBoard(_own_connection(_run.store), name, rank, world)
    return Heartbeat(board, rank, world, timeout, where)


def _own_connection(store: Any) -> Any:
    """Another connection to a TCPStore; torch 2.6 cannot clone one."""
    if hasattr(store, "clone"):
        return store.clone()
    return dist.TCPStore(store.host, store.port, is_master=False, wait_for_workers=False)


def _attend(heartbeat: Heartbeat, patience: float) -> None:
    try:
        heartbeat.attend(patience)
    except PeerError as error:
        heartbeat.end(LOST, str(error))
        raise


def device_of(transport: Transport, device: torch.device | str | None) -> torch.device:
    """The device of a rank whose transport was given: a GPU if it is asked for, or if ranks talk
    over NCCL; else the CPU."""
    nccl = isinstance(transport, TorchDist) and transport.backend == "nccl"
    mine = asked(device, "nccl" if nccl else None)
    if mine.kind == "cuda" or (mine.kind == "auto" and nccl):
        index = mine.index if mine.index is not None else cuda_device.current()
        return used(f"cuda:{index}")
    return torch.device("cpu")
