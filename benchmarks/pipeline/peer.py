"""torch.distributed.pipelining over gloo, timed action by action."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from benchmarks.pipeline import balance, plain
from benchmarks.pipeline.livebytes import LiveBytes
from benchmarks.pipeline.network import BATCH, batch, loss, network
from benchmarks.pipeline.ranks import Ranks
from benchmarks.pipeline.virtual import Done, busy, spread, virtual_seconds

CHECK_PIXELS = 64  # exactness is tried in float64 on smaller images: the same layers, a quarter


def straight(ranks: int) -> tuple[int, ...]:
    """Stage s on rank s."""
    return tuple(range(ranks))


def looped(ranks: int) -> tuple[int, ...]:
    """Twice around: 0 1 0 1."""
    return straight(ranks) * 2


def folded(ranks: int) -> tuple[int, ...]:
    """There and back: 0 1 1 0."""
    return straight(ranks) + straight(ranks)[::-1]


@dataclass(frozen=True)
class Peer:
    """A schedule of torch with the placement it wants."""

    schedule: type
    owners: Callable[[int], tuple[int, ...]]


PEERS = {
    "gpipe": Peer(ScheduleGPipe, straight),
    "1f1b": Peer(Schedule1F1B, straight),
    "interleaved": Peer(ScheduleInterleaved1F1B, looped),
    "zbv": Peer(ScheduleZBVZeroBubble, folded),
    "dualpipev": Peer(ScheduleDualPipeV, folded),
}

Balance = tuple[int, ...]
KEYS = ("loss", "gradient")  # what is compared with the plain model


def measure(
    name: str, ranks: Ranks, micro_batches: int, repeats: int, cut: Balance | None = None
) -> dict[str, Any]:
    """Seconds per step: `wall`, from a barrier until the last rank is done, and `virtual`.

    `busy` is the share of virtual time in which ranks compute, `cpu` the CPU seconds per rank.
    A schedule that torch will not build comes back as `{"refused": its words}`. The first call
    for an arrangement takes a step more, in which torch settles shapes and buffers.
    """
    cut = cut or balanced(name, ranks, micro_batches)
    rejected = refusal(name, ranks, micro_batches, cut)
    if rejected:
        return {"refused": rejected}
    answers = ranks.run(timed, name, micro_batches, cut, repeats)
    steps = list(zip(*answers, strict=True))  # per repeat, what each rank saw
    laid = [[spread(row, cpu) for _, cpu, row in step] for step in steps]
    return {
        "balance": cut,
        "wall": [max(wall for wall, _, _ in step) for step in steps],
        "virtual": [virtual_seconds(rows) for rows in laid],
        "busy": [busy(rows) for rows in laid],
        "cpu": [[cpu for _, cpu, _ in step] for step in steps],
        "order": [" ".join(map(str, row)) for _, _, row in steps[0]],
    }


def peak(name: str, ranks: Ranks, micro_batches: int, cut: Balance | None = None) -> list[int]:
    """Per rank, the most bytes alive in a second step: stashes, messages, gradients and the
    receive buffers torch keeps; weights and images not."""
    return ranks.run(peak_bytes, name, micro_batches, cut or balanced(name, ranks, micro_batches))


def error(
    name: str, ranks: Ranks, micro_batches: int, cut: Balance | None = None
) -> dict[str, float]:
    """The largest difference from the plain model in float64: of the loss, and of a gradient
    relative to the largest entry of its tensor."""
    answers = ranks.run(errors, name, micro_batches, cut or balanced(name, ranks, micro_batches))
    return {key: max(answer[key] for answer in answers if key in answer) for key in KEYS}


def refusal(name: str, ranks: Ranks, micro_batches: int, cut: Balance | None = None) -> str | None:
    """What torch says if it will not build this schedule."""
    cut = cut or balanced(name, ranks, micro_batches)
    return next(filter(None, ranks.run(rejected, name, micro_batches, cut)), None)


@cache
def seconds_per_child(ranks: Ranks) -> tuple[float, ...]:
    return balance.child_seconds(ranks)


@cache
def balanced(name: str, ranks: Ranks, micro_batches: int) -> Balance:
    """The cut for this schedule from the children's seconds, measured once on these ranks."""
    return balance.cut(seconds_per_child(ranks), PEERS[name].owners(ranks.size), micro_batches)


# What follows runs on the ranks.


class Refused(Exception):
    """torch will not build this schedule; in its words."""


class Pipeline:
    """One schedule on this rank, over the children that are its own."""

    def __init__(self, name: str, micro_batches: int, cut: Balance, model: nn.Sequential) -> None:
        owners = PEERS[name].owners(dist.get_world_size())
        if len(cut) != len(owners) or sum(cut) != len(model):
            raise ValueError(
                f"balance {cut} has {len(cut)} stages and {sum(cut)} children; "
                f"{name} takes {len(owners)} stages and the network has {len(model)} children"
            )
        self.row: list[Done] = []
        mine = [s for s, owner in enumerate(owners) if owner == dist.get_rank()]
        parts = {s: model[sum(cut[:s]) : sum(cut[: s + 1])] for s in mine}
        stages = [PipelineStage(parts[s], s, len(owners), torch.device("cpu")) for s in mine]
        self.parameters = {key: p for part in parts.values() for key, p in part.named_parameters()}
        several = len(set(owners)) < len(owners)
        self.first, self.last = 0 in mine, len(owners) - 1 in mine
        try:
            self.schedule = PEERS[name].schedule(
                stages if several else stages[0], micro_batches, loss_fn=loss
            )
        except Exception as words:
            raise Refused(f"{type(words).__name__}: {' '.join(str(words).split())}") from words
        for stage in stages:
            self._stamp(stage)

    def step(self, images: Tensor, labels: Tensor) -> list[Tensor]:
        """The micro-batches' losses, on the rank of the last stage."""
        self.row.clear()
        losses: list[Tensor] = []
        self.schedule.step(
            *([images] if self.first else []),
            **({"target": labels, "losses": losses} if self.last else {}),
            return_outputs=False,
        )
        return losses

    def zero_grad(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def _stamp(self, stage: PipelineStage) -> None:
        forward, backward = stage.forward_one_chunk, stage.backward_one_chunk
        weight = stage.backward_weight_one_chunk

        def stamped(kind: str, micro_batch: int, run: Callable[[], Any]) -> Any:
            start = time.thread_time()
            result = run()
            seconds = time.thread_time() - start
            self.row.append(Done(stage.stage_index, kind, micro_batch, seconds))
            return result

        def forward_one_chunk(i: int, *args: Any, **kwargs: Any) -> Any:
            return stamped("F", i, lambda: forward(i, *args, **kwargs))

        def backward_one_chunk(
            i: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
        ) -> Any:
            kind = "B" if full_backward else "I"
            return stamped(kind, i, lambda: backward(i, loss, full_backward, last_backward))

        def backward_weight_one_chunk(i: int, *args: Any, **kwargs: Any) -> Any:
            return stamped("W", i, lambda: weight(i, *args, **kwargs))

        stage.forward_one_chunk = forward_one_chunk
        stage.backward_one_chunk = backward_one_chunk
        stage.backward_weight_one_chunk = backward_weight_one_chunk


@cache
def _model() -> nn.Sequential:
    return network()


@cache
def _pipeline(name: str, micro_batches: int, cut: Balance) -> Pipeline:
    return Pipeline(name, micro_batches, cut, _model())


@cache
def _warm(name: str, micro_batches: int, cut: Balance) -> None:
    _pipeline(name, micro_batches, cut).step(*batch())


def rejected(name: str, micro_batches: int, cut: Balance) -> str | None:
    try:
        _pipeline(name, micro_batches, cut)
    except Refused as words:
        return str(words)
    return None


def timed(
    name: str, micro_batches: int, cut: Balance, repeats: int
) -> list[tuple[float, float, list[Done]]]:
    """Per step: wall seconds, CPU seconds of this thread, and the actions in order."""
    pipeline = _pipeline(name, micro_batches, cut)
    _warm(name, micro_batches, cut)
    images, labels = batch()
    seen = []
    for _ in range(repeats):
        pipeline.zero_grad()
        dist.barrier()
        wall, cpu = time.perf_counter(), time.thread_time()
        pipeline.step(images, labels)
        wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
        seen.append((wall, cpu, list(pipeline.row)))
    pipeline.zero_grad()
    return seen


def peak_bytes(name: str, micro_batches: int, cut: Balance) -> int:
    images, labels = batch()
    model = _model()
    with LiveBytes() as live:
        pipeline = Pipeline(name, micro_batches, cut, model)
        pipeline.step(images, labels)  # makes the receive buffers, and tries shapes
        pipeline.zero_grad()
        live.reset()
        pipeline.step(images, labels)
    pipeline.zero_grad()
    return live.peak


def errors(name: str, micro_batches: int, cut: Balance) -> dict[str, float]:
    want, gradients = plain.reference(micro_batches, CHECK_PIXELS)
    pipeline = Pipeline(name, micro_batches, cut, network(torch.float64))
    losses = pipeline.step(*batch(BATCH, CHECK_PIXELS, torch.float64))
    found = {"gradient": 0.0}
    if pipeline.last:
        found["loss"] = abs(torch.stack(losses).mean().item() - want) / abs(want)
    for key, parameter in pipeline.parameters.items():
        if parameter.grad is None:
            raise ValueError(f"rank {dist.get_rank()}: {name} left no gradient for {key}")
        worst = (parameter.grad - gradients[key]).abs().max() / gradients[key].abs().max()
        found["gradient"] = max(found["gradient"], worst.item())
    return found
