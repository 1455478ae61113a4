"""What `gems doctor` asks of a set of ranks: the machine, messages, numbers, the end of a rank."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import nn

from gems.distributed.launchers import place
from gems.draw.units import seconds
from gems.errors import GemsError
from gems.files import to_json
from gems.plans.plan import Plan
from gems.torch.launch import connect
from gems.torch.parity import mean_square, verify
from gems.torch.trainer import Trainer
from gems.transport.protocol import Transport
from gems.version import __version__

SIZES = (64, 1 << 20, 16 << 20)  # bytes of the messages that are timed
REPEATS = 10
VARIABLES = ("CUDA_", "NCCL_", "GLOO_", "PYTORCH_", "TORCH_", "OMP_NUM", "UCX_", "FI_")
LOST_RANK = "lost rank"
ENDED = 3  # exit code of the rank that ends in the check of that name


@dataclass(frozen=True)
class Check:
    """What was tried, whether it held, and what was seen."""

    name: str
    passed: bool
    seen: str


def report(surroundings: Mapping[str, Any], ranks: int, checks: Sequence[Check]) -> str:
    return to_json({"environment": surroundings, "ranks": ranks, "checks": list(checks)})


# --- the machine ----------------------------------------------------------------------------------


def environment() -> dict[str, Any]:
    """Versions, devices, links and settings of this node; no host or user names."""
    here = place()
    return {
        "gems": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": os.cpu_count(),
        "launcher": here.launcher if here else "none",
        "cuda": torch.version.cuda,
        "nccl": _nccl(),
        "devices": [_device(i) for i in range(torch.cuda.device_count())],
        "peer access": _peers(torch.cuda.device_count()),
        "topology": _printed("nvidia-smi", "topo", "-m"),
        "driver": _printed("nvidia-smi", "-L"),
        "variables": {k: v for k, v in sorted(os.environ.items()) if k.startswith(VARIABLES)},
    }


def _nccl() -> str | None:
    if not (torch.cuda.is_available() and torch.distributed.is_nccl_available()):
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def _device(index: int) -> str:
    found = torch.cuda.get_device_properties(index)
    return f"{found.name}, {found.total_memory / 2**30:.1f} GiB, sm_{found.major}{found.minor}"


def _peers(count: int) -> list[str]:
    """Pairs of GPUs that cannot read each other's memory: their messages cross the host."""
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    return [f"{a} -> {b}: no" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]


def _printed(*command: str) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)


# --- checks ---------------------------------------------------------------------------------------


def plans(world: int) -> dict[str, Plan]:
    """A plan of each family on so many ranks."""
    if world == 1:
        return {
            "one rank": Plan(micro_batches=2),
            "activation checkpointing": Plan(micro_batches=2, recompute="always"),
            "offload to host": Plan(
                stages=3, ranks=1, micro_batches=2, schedule="gpipe", offload=("activations",)
            ),
            "streaming": Plan(stages=2, ranks=1, schedule="sequential", stream=((2, 2),)),
            "L2L": Plan(stages=3, ranks=1, schedule="l2l", offload=("weights",)),
        }
    return {
        "data parallel": Plan(data=world),
        "1f1b": Plan(stages=world, micro_batches=2 * world, schedule="1f1b"),
        "zero-bubble": Plan(stages=world, micro_batches=2 * world, schedule="zero-bubble"),
        "interleaved": Plan(
            stages=2 * world, ranks=world, micro_batches=2 * world, schedule="interleaved"
        ),
        "GEMS-MASTER": Plan(stages=world, schedule="gems", replications=2),
        "GEMS, split backward": Plan(stages=world, schedule="gems-zb", replications=2),
        "both directions": Plan(
            stages=world, micro_batches=2 * world, schedule="auto", bidirectional=True
        ),
        "tiles": Plan(spatial=[(1, world)], micro_batches=2),
        "tiles, fused halos": Plan(spatial=[(1, world)], halo="d2"),
        "ZeRO-1": Plan(data=world, zero=1),
        "ZeRO-3": Plan(data=world, zero=3),
        "activation checkpointing": Plan(
            stages=world, micro_batches=2, schedule="1f1b", recompute="always"
        ),
        "offload to host": Plan(
            stages=world, micro_batches=4, schedule="gpipe", offload=("activations",)
        ),
    }


def network(world: int) -> nn.Module:
    """Enough blocks for two stages per rank, with BatchNorm, a skip connection and a stride."""

    class Block(nn.Module):
        def __init__(self, stride: int) -> None:
            super().__init__()
            self.conv = nn.Conv2d(8, 8, 3, padding=1, stride=stride)
            self.norm = nn.BatchNorm2d(8)
            self.skip = nn.Identity() if stride == 1 else nn.Conv2d(8, 8, 1, stride=stride)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.norm(self.conv(x)) + self.skip(x)).relu()

    blocks = [Block(2 if i == 1 else 1) for i in range(2 * world)]
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *blocks, *head)


def _sample(world: int) -> torch.Tensor:
    return torch.empty(2, 3, 16, 8 * max(world, 2))


def parity(world: int, name: str, **options: Any) -> Check:
    """Two steps under a plan against the plain loop, in float64."""
    plan = plans(world)[name]
    found = verify(network(world), _sample(world), plan, costs="estimate", **options)
    seen = f"largest relative difference from {found.oracle}: {found.error:.1e}"
    return Check(name, found.passed, seen if found.passed else f"{seen} ({found.worst})")


def half_precision(world: int, **options: Any) -> Check:
    """A step under bf16 autocast beside one in fp32."""
    plan, losses = Plan(data=world), []
    model, image = network(world), _sample(world).fill_(0.5).repeat(world, 1, 1, 1)
    for precision in ("fp32", "bf16"):
        with Trainer(
            model, mean_square, _sgd, _sample(world), plan,
            precision=precision, costs="estimate", **options,
        ) as trainer:  # fmt: skip
            losses.append(trainer.step(image).loss)
    error = abs(losses[1] - losses[0]) / abs(losses[0])
    return Check("bf16", error < 0.1, f"loss {losses[1]:.4g}, in fp32 {losses[0]:.4g}")


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.0)


def messages(world: int, **options: Any) -> Check:
    """Set up all links, then time messages between neighbours and an all-reduce of all ranks."""
    transport, device = connect(options.get("backend"), device=options.get("device"))
    everyone = tuple(range(world))
    pairs = sorted({tuple(sorted((rank, (rank + 1) % world))) for rank in everyone})
    links = [link for x, y in pairs for link in ((x, y), (y, x))]
    start = perf_counter()
    transport.prepare([everyone], links)
    seen = [f"links set up in {seconds(perf_counter() - start)}"]
    for a, b in pairs:
        seen.append(f"ranks {a} and {b}: " + _rates(transport, device, (a, b), _swap))
    seen.append("all-reduce: " + _rates(transport, device, everyone, _sum))
    transport.close()
    return Check("messages", True, "\n".join(seen))


Move = Callable[[Transport, torch.Tensor, Sequence[int]], None]


def _rates(transport: Transport, device: Any, ranks: Sequence[int], move: Move) -> str:
    """Seconds of the smallest, rate of the largest; the same on all ranks."""
    found = []
    for size in SIZES:
        buffer = torch.zeros(size // 4, device=device)
        took = 0.0
        if transport.rank in ranks:
            move(transport, buffer, ranks)
            _synchronize(buffer)
            start = perf_counter()
            for _ in range(REPEATS):
                move(transport, buffer, ranks)
            _synchronize(buffer)
            took = (perf_counter() - start) / REPEATS
        found.append(max(transport.all_gather_object(took)))
    return f"{seconds(found[0])}, {SIZES[-1] / found[-1] / 1e9:.3g} GB/s"


def _swap(transport: Transport, buffer: torch.Tensor, ranks: Sequence[int]) -> None:
    """One message each way at the same time, as neighbours do."""
    (other,) = (rank for rank in ranks if rank != transport.rank)
    arriving = transport.irecv(torch.empty_like(buffer), other)
    transport.isend(buffer, other).wait()
    arriving.wait()


def _sum(transport: Transport, buffer: torch.Tensor, ranks: Sequence[int]) -> None:
    transport.all_reduce(buffer, tuple(ranks)).wait()


def _synchronize(buffer: torch.Tensor) -> None:
    if buffer.device.type == "cuda":
        torch.cuda.synchronize(buffer.device)


def lost_rank(world: int, **options: Any) -> Check:
    """The last rank ends in the middle of a step; the others must, too, and name it."""

    def loss(output: torch.Tensor, target: Any = None) -> torch.Tensor:
        if steps == 1 and trainer.session.rank == world - 1:
            os._exit(ENDED)
        return mean_square(output)

    steps, plan = 0, Plan(stages=1, data=world)
    sample = _sample(world)
    trainer = Trainer(network(world), loss, _sgd, sample, plan, costs="estimate", **options)
    for steps in range(2):  # noqa: B007 (the loss reads it)
        trainer.step(sample.fill_(0.5).repeat(world, 1, 1, 1))
    raise GemsError("a rank ended in the middle of a step, and nobody noticed")


def names(world: int) -> list[str]:
    """All checks on so many ranks, in order."""
    more = ["messages", LOST_RANK] if world > 1 else []
    return [*more[:1], *plans(world), "bf16", *more[1:]]


def run(world: int, name: str, **options: Any) -> Check:
    torch.manual_seed(0)
    special = {"messages": messages, "bf16": half_precision, LOST_RANK: lost_rank}
    if name in special:
        return special[name](world, **options)
    return parity(world, name, **options)
