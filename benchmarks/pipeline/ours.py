"""GEMS over gloo, timed the same way as the peer."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.pipeline import balance, plain
from benchmarks.pipeline.livebytes import LiveBytes
from benchmarks.pipeline.network import BATCH, CHANNELS, PIXELS, batch, loss, network
from benchmarks.pipeline.peer import CHECK_PIXELS, KEYS, folded, looped, straight
from benchmarks.pipeline.ranks import Ranks
from benchmarks.pipeline.virtual import Done, busy, spread, virtual_seconds
from gems.plans.plan import Plan
from gems.torch.trainer import Trainer

Balance = tuple[int, ...]


@dataclass(frozen=True)
class Ours:
    """A plan, by what does not depend on the numbers, and who owns the stages of its cut."""

    owners: Callable[[int], tuple[int, ...]]
    options: dict[str, Any]

    def plan(self, ranks: int, micro_batches: int, cut: Balance) -> Plan:
        options = dict(self.options)
        if options["schedule"] == "interleaved":
            options["ranks"] = ranks
        if options.get("bidirectional"):
            options["max_in_flight"] = ranks  # as many as a straight pipeline's first rank keeps
        if len(cut) == 1:  # every rank a copy
            options["data"] = ranks
            micro_batches //= ranks
        return Plan(stages=len(cut), micro_batches=micro_batches, balance=cut, **options)


def alone(ranks: int) -> tuple[int, ...]:
    return (0,)


OURS = {
    "gems one rank": Ours(alone, {"schedule": "sequential"}),
    "gems copies": Ours(alone, {"schedule": "sequential"}),
    "gems gpipe": Ours(straight, {"schedule": "gpipe"}),
    "gems 1f1b": Ours(straight, {"schedule": "1f1b"}),
    "gems interleaved": Ours(looped, {"schedule": "interleaved"}),
    "gems zero-bubble": Ours(straight, {"schedule": "zero-bubble"}),
    "gems auto, fold": Ours(folded, {"schedule": "auto", "placement": "fold"}),
    "gems MASTER": Ours(straight, {"schedule": "gems"}),
    "gems MASTER, zero bubble": Ours(straight, {"schedule": "gems-zb"}),
    "gems auto, both ways": Ours(straight, {"schedule": "auto", "bidirectional": True}),
}


class Still(torch.optim.SGD):
    """An optimizer that leaves the weights alone: nobody's update is timed."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        return None


def measure(
    name: str, ranks: Ranks, micro_batches: int, repeats: int, cut: Balance
) -> dict[str, Any]:
    """As `peer.measure`; `exchange` is the share of a step that summing gradients takes."""
    answers = ranks.run(timed, name, micro_batches, cut, repeats)
    steps = list(zip(*answers, strict=True))
    laid = [[spread(row, cpu) for _, cpu, row, _ in step] for step in steps]
    return {
        "balance": cut,
        "wall": [max(wall for wall, _, _, _ in step) for step in steps],
        "virtual": [virtual_seconds(rows) for rows in laid],
        "busy": [busy(rows) for rows in laid],
        "cpu": [[cpu for _, cpu, _, _ in step] for step in steps],
        "exchange": [max(part for _, _, _, part in step) for step in steps],
        "order": [" ".join(map(str, row)) for _, _, row, _ in steps[0]],
    }


def peak(name: str, ranks: Ranks, micro_batches: int, cut: Balance) -> list[int]:
    return ranks.run(peak_bytes, name, micro_batches, cut)


def error(name: str, ranks: Ranks, micro_batches: int, cut: Balance) -> dict[str, float]:
    answers = ranks.run(errors, name, micro_batches, cut)
    return {key: max(answer[key] for answer in answers) for key in KEYS}


# What follows runs on the ranks.


def build(
    name: str, micro_batches: int, cut: Balance, dtype: torch.dtype = torch.float32,
    pixels: int = PIXELS, optimizer: type[Still] = Still,
) -> Trainer:  # fmt: skip
    sample = torch.empty(BATCH // micro_batches, CHANNELS, pixels, pixels, dtype=dtype)
    plan = OURS[name].plan(dist.get_world_size(), micro_batches, cut)
    return Trainer(network(dtype), loss, lambda p: optimizer(p, 0.1), sample, plan, costs="measure")


@cache
def _warm(name: str, micro_batches: int, cut: Balance) -> Trainer:
    trainer = build(name, micro_batches, cut)
    trainer.step(*batch())
    return trainer


def timed(
    name: str, micro_batches: int, cut: Balance, repeats: int
) -> list[tuple[float, float, list[Done], float]]:
    """Per step: wall and CPU seconds, the compute actions in order, and the share of sums."""
    trainer = _warm(name, micro_batches, cut)
    images, labels = batch()
    seen = []
    for _ in range(repeats):
        dist.barrier()
        wall, cpu = time.perf_counter(), time.thread_time()
        trainer.step(images, labels)
        wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
        events = [(event, event.parsed()) for event in trainer.session.measured.events]
        row = [
            Done(a.stage, a.kind.value, a.micro_batch, event.cpu)
            for event, a in events
            if a.computes
        ]
        sums = sum(event.seconds for event, a in events if event.action.endswith("A"))
        seen.append((wall, cpu, row, sums / wall))
    return seen


def peak_bytes(name: str, micro_batches: int, cut: Balance) -> int:
    trainer = _warm(name, micro_batches, cut)
    trainer.session.weights.release_memory()  # what it has from the step before counts, too
    with LiveBytes() as live:
        trainer.step(*batch())
    return live.peak


def errors(name: str, micro_batches: int, cut: Balance) -> dict[str, float]:
    want, gradients = plain.reference(micro_batches, CHECK_PIXELS)
    found: dict[str, torch.Tensor] = {}

    class Noting(Still):
        """Keeps what it would step with."""

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            mine = trainer.session.weights.named_parameters()
            found.update({name: p.grad.clone() for name, p in mine.items()})

    trainer = build(name, micro_batches, cut, torch.float64, CHECK_PIXELS, Noting)
    step = trainer.step(*batch(BATCH, CHECK_PIXELS, torch.float64))
    off = [
        ((g - gradients[n]).abs().max() / gradients[n].abs().max()).item() for n, g in found.items()
    ]
    return {"loss": abs(step.loss - want) / abs(want), "gradient": max(off)}


def balanced(name: str, seconds: tuple[float, ...], ranks: int, micro_batches: int) -> Balance:
    """The peer's way of cutting, for the owners of our plan."""
    return balance.cut(seconds, OURS[name].owners(ranks), micro_batches)
