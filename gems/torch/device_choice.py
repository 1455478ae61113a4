"""The device of each rank, and the backend: the same answer on all ranks, from what each asks for.

NCCL needs a GPU of its own for every rank, or it hangs. What a rank sees depends on its launcher:
all GPUs of the node, or (Slurm with --gpus-per-task) only its own, which is cuda:0 to each rank.
So ranks compare GPUs by UUID, and no index follows from a local rank. Never run on GPUs: tests give
`decide` what ranks of such nodes would ask for.
"""

from __future__ import annotations

import importlib.util
import logging
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gems.errors import GemsError, problems
from gems.torch import cuda_device

log = logging.getLogger(__name__)

SHARING = "device='cuda' with backend='gloo' lets ranks share a GPU, through host memory"


@dataclass(frozen=True)
class Asked:
    """What one rank was given: a device (`auto`, `cpu`, `cuda` or `cuda:1`), a backend or none, and
    the UUIDs of the GPUs that it sees."""

    host: str
    device: str
    backend: str | None
    gpus: tuple[str, ...]

    @property
    def kind(self) -> str:
        return self.device.partition(":")[0]

    @property
    def index(self) -> int | None:
        """The GPU that it asks for by number."""
        return int(self.device.partition(":")[2]) if ":" in self.device else None


@dataclass(frozen=True)
class Choice:
    """The backend, each rank's device, and what the user should know of it, if anything."""

    backend: str
    devices: tuple[str, ...]
    warning: str = ""


def asked(device: torch.device | str | None, backend: str | None) -> Asked:
    """What this rank asks for. Raises if it cannot have it."""
    name = usable(device, backend)
    host = socket.gethostname()
    gpus = range(cuda_device.count()) if name != "cpu" else ()
    return Asked(host, name, backend, tuple(_uuid(host, i) for i in gpus))


def usable(device: torch.device | str | None, backend: str | None) -> str:
    """The name of a device: `auto`, `cpu`, `cuda` or `cuda:1`. Raises if device and backend cannot
    be had here, or not together."""
    name = _name(device)
    _reject_contradiction(name, backend)
    return name


def _name(device: torch.device | str | None) -> str:
    if device is None or device == "auto":
        return "auto"
    try:
        found = torch.device(device)
    except RuntimeError:
        found = None
    if found is None or found.type not in ("cpu", "cuda"):
        raise GemsError(f"device is {str(device)!r}; give auto, cpu, cuda or cuda:N")
    return "cpu" if found.type == "cpu" else str(found)


def _reject_contradiction(device: str, backend: str | None) -> None:
    if backend == "mpi" and importlib.util.find_spec("mpi4py") is None:
        raise GemsError(
            "backend mpi needs mpi4py, which is not installed: pip install gems-hires[mpi], or "
            "leave the backend out: gloo and nccl run under mpirun, too"
        )
    seen = cuda_device.count()
    if backend == "nccl" and device == "cpu":
        raise GemsError("backend nccl moves tensors of GPUs, and device is cpu; leave out one")
    if backend == "nccl" and not seen:
        raise GemsError("backend nccl needs GPUs, and torch sees none here; use gloo")
    if device.startswith("cuda") and not seen:
        raise GemsError(
            f"device is {device}, and torch sees no GPU here; use device cpu, or see "
            "torch.cuda.is_available() and CUDA_VISIBLE_DEVICES"
        )
    index = int(device.partition(":")[2] or 0) if device.startswith("cuda") else 0
    if seen and index >= seen:
        raise GemsError(
            f"device is {device}, and this process sees {seen} GPUs, cuda:0 to cuda:{seen - 1}; "
            "choose one of them, or see CUDA_VISIBLE_DEVICES"
        )


def _uuid(host: str, index: int) -> str:
    """What no other GPU is called, on any host."""
    found = getattr(cuda_device.properties(index), "uuid", None)
    return str(found) if found is not None else f"{host} cuda:{index}"


def alone(device: torch.device | str | None, backend: str | None) -> torch.device:
    """The device of a process without others: a GPU if there is one."""
    mine = asked(device, backend)
    if mine.kind == "cpu" or not mine.gpus:
        return torch.device("cpu")
    return used(mine.device if mine.index is not None else f"cuda:{cuda_device.current()}")


def used(device: str) -> torch.device:
    """A device, made the current one if it is a GPU."""
    found = torch.device(device)
    if found.type == "cuda" and found.index is not None:
        cuda_device.use(found.index)
    return found


def decide(ranks: Sequence[Asked]) -> Choice:
    """The choice for all ranks, by what each asked for; the same on every rank."""
    for name in ("kind", "backend"):
        values = [getattr(rank, name) for rank in ranks]
        if other := [i for i, value in enumerate(values) if value != values[0]]:
            raise GemsError(
                f"rank 0 was given {'device' if name == 'kind' else name} {values[0]} and rank "
                f"{other[0]} {values[other[0]]}; give all ranks the same"
            )
    kind, backend = ranks[0].kind, ranks[0].backend
    on_cpu = Choice("mpi" if backend == "mpi" else "gloo", ("cpu",) * len(ranks))
    if kind == "cpu" or (kind == "auto" and backend == "gloo"):
        return on_cpu
    if kind == "auto" and backend != "nccl" and not any(rank.gpus for rank in ranks):
        return on_cpu
    found = assigned(ranks)
    lacking = [i for i, index in enumerate(found) if index is None]
    if lacking and kind == "auto" and backend != "nccl":
        on = f"all ranks run on CPUs, over {on_cpu.backend}"
        warning = f"{_too_few(ranks, lacking)}; {on}. {_remedy(ranks)}"
        return Choice(on_cpu.backend, on_cpu.devices, warning)
    if lacking and backend not in ("gloo", "mpi"):
        raise GemsError(f"{_too_few(ranks, lacking)}. {_remedy(ranks)}")
    if bare := [i for i, rank in enumerate(ranks) if not rank.gpus]:
        raise GemsError(
            f"device is cuda, and rank {bare[0]} on {ranks[bare[0]].host} sees no GPU; give each "
            "node GPUs, or use device cpu"
        )
    places = [_turn(ranks, i) if index is None else index for i, index in enumerate(found)]
    chosen = Choice(backend or "nccl", tuple(f"cuda:{index}" for index in places))
    if chosen.backend == "nccl":
        reject_shared([(r.host, r.gpus[i]) for r, i in zip(ranks, places, strict=True)])
    return chosen


def assigned(ranks: Sequence[Asked]) -> list[int | None]:
    """For each rank the index of a GPU that no other rank has; None where all that it sees are
    taken. Ranks that ask for one by number have it. (Augmenting paths: ranks of a node may see all
    of its GPUs, one each, or any of them.)"""
    owner: dict[str, int] = {}

    def find(rank: int, tried: set[str]) -> bool:
        for gpu in sorted(ranks[rank].gpus, key=lambda gpu: gpu in owner):  # free ones first
            if gpu in tried:
                continue
            tried.add(gpu)
            if gpu not in owner or (ranks[owner[gpu]].index is None and find(owner[gpu], tried)):
                owner[gpu] = rank
                return True
        return False

    for i, rank in enumerate(ranks):
        if rank.index is not None:
            owner.setdefault(rank.gpus[rank.index], i)
    for i, rank in enumerate(ranks):
        if rank.index is None:
            find(i, set())
    found: list[int | None] = [rank.index for rank in ranks]
    for gpu, i in owner.items():
        found[i] = ranks[i].gpus.index(gpu)
    return found


def _turn(ranks: Sequence[Asked], rank: int) -> int:
    """The GPU of a rank that shares it: those of a host in order, again and again."""
    mine = ranks[rank]
    before = sum(other.host == mine.host for other in ranks[:rank])
    return before % len(mine.gpus)


def _too_few(ranks: Sequence[Asked], lacking: Sequence[int]) -> str:
    """`gpu03 has 4 ranks and 2 GPUs for them`, of the first host that has too few."""
    host = ranks[lacking[0]].host
    there = [rank for rank in ranks if rank.host == host]
    seen = len({gpu for rank in there for gpu in rank.gpus})
    return (
        f"{host} has {len(there)} ranks, which see {seen} GPUs there, and NCCL needs one for each"
    )


def _remedy(ranks: Sequence[Asked]) -> str:
    hosts = Counter(rank.host for rank in ranks)
    gpus = min(len({g for r in ranks if r.host == host for g in r.gpus}) for host in hosts)
    fewer = f"Start at most {gpus} ranks per node, " if gpus else "Start ranks where GPUs are, "
    return (
        f"{fewer}let them see more GPUs (CUDA_VISIBLE_DEVICES, --gpus-per-task), or use device "
        f"'cpu'; {SHARING}"
    )


def reject_shared(used: Sequence[tuple[str, str]]) -> None:
    """Raise if two ranks have the same GPU, given each one's host and UUID: NCCL would hang."""
    ranks: dict[str, list[int]] = {}
    for rank, (_, gpu) in enumerate(used):
        ranks.setdefault(gpu, []).append(rank)
    found = [
        f"ranks {', '.join(map(str, on))} are on GPU {gpu} of {used[on[0]][0]}"
        for gpu, on in ranks.items()
        if len(on) > 1
    ]
    if found:
        raise GemsError(
            problems("NCCL needs a GPU of its own for each rank, or it hangs:", found)
            + "\nLeave the device out, so that each rank gets its own; before init_process_group, "
            f"call torch.cuda.set_device(LOCAL_RANK); or share: {SHARING}"
        )
