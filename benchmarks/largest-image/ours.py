"""One step by GEMS under a plan: the published schemes, and what the planner chooses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache

import torch
from torch import nn

from benchmarks.pipeline.livebytes import LiveBytes
from gems.errors import PlanError
from gems.hardware import machine
from gems.planner.request import Request
from gems.plans.plan import Plan
from gems.torch.planning import STEP, Study
from gems.torch.trainer import Trainer

from .networks import NETWORKS
from .plain import resident, sgd

Tensor = torch.Tensor


class Images:
    """Pixels that are made when they are asked for, as a file's are read."""

    dtype = "float32"

    def __init__(self, images: int, side: int) -> None:
        self.shape = (images, 3, side, side)

    def __getitem__(self, box: tuple[slice, ...]) -> Tensor:
        return torch.ones([len(range(n)[s]) for n, s in zip(self.shape, box, strict=True)])


class Masks:
    """Classes of pixels that are made when they are asked for."""

    dtype = "int64"

    def __init__(self, images: int, side: int) -> None:
        self.shape = (images, side, side)

    def __getitem__(self, box: tuple[slice, ...]) -> Tensor:
        box = box if isinstance(box, tuple) else (box,)
        box = (*box, *(slice(None),) * (len(self.shape) - len(box)))
        return torch.zeros(
            [len(range(n)[s]) for n, s in zip(self.shape, box, strict=True)], dtype=torch.int64
        )


def trained(name: str, images: int, side: int, plan: Plan, boxes: bool = False) -> int:
    """On this rank of the plan. With `boxes`, of masks too only boxes are ever there."""
    network = NETWORKS[name]
    model, target = network.make(), network.target(images, side if not boxes else 1)
    wanted = Masks(images, side) if boxes and target.dim() > 1 else target
    target = target if wanted is target else torch.empty(0)
    sample = torch.empty(1, 3, side, side, device="meta")
    trainer = Trainer(model, network.loss, sgd, sample, plan, costs="estimate")
    comes_and_goes = bool(plan.residency[0].weights_offload)
    with LiveBytes() as live:
        if comes_and_goes:
            hold_weights(trainer, live)
        trainer.step(Images(images, side), wanted)
    if not comes_and_goes:
        return live.peak + resident(model, target)
    # What an update brings back from disk, when all else is gone, is the engine's count.
    return max(live.peak + resident(nn.Module(), target), trainer.peak)


def hold_weights(trainer: Trainer, live: LiveBytes) -> None:
    """Let weights that come and go count while they are there, by the engine's account: no
    operation makes their memory."""
    session = trainer.session
    counted = session.engine._count_state

    def count() -> None:
        counted()
        live.hold(session.weights.resident_memory().weights)

    session.engine._count_state = count  # type: ignore[method-assign]
    live.hold(session.weights.resident_memory().weights)


# --- the published schemes -----------------------------------------------------------------------


def published(name: str, ranks: int, images: int) -> Plan:
    """GEMS-MAST: two directions over the same ranks, an equal number of layers to a stage."""
    even = _even(_layers(name), ranks)
    return Plan(stages=ranks, schedule="gems", micro_batches=images, balance=even)


def published_spatial(name: str, ranks: int, images: int) -> Plan:
    """The same, and the first stage is cut into two tiles, as `--num-spatial-parts 2` does."""
    stages = ranks - 1
    if stages < 2:
        raise PlanError(f"two tiles and a stage behind them take 3 ranks or more, not {ranks}")
    even = _even(_layers(name), stages)
    return Plan(
        stages=stages, schedule="gems", micro_batches=images, balance=even, spatial=((1, 2),)
    )


@cache
def _layers(name: str) -> int:
    return len(_study(name, 64).graph[0].layers)


def _even(layers: int, stages: int) -> tuple[int, ...]:
    return tuple(layers * (s + 1) // stages - layers * s // stages for s in range(stages))


# --- the planner ----------------------------------------------------------------------------------

HARD = 1.2  # of the cap: beyond that the planner's account would have to be far off


def plans(name: str, ranks: int, images: int, side: int, cap: float) -> Iterator[Plan]:
    """What the planner chooses for this side, given the cap, then less, down to the leanest that it
    knows; and if it knows none for the cap, the leanest for a little more.

    Its account is not what the dispatcher sees: that counts the inside of a layer's backward as it
    is, the account as an estimate on top. See the README.
    """
    study, target = _study(name, side), NETWORKS[name].target(1, 1).element_size()
    target *= images * side * side if NETWORKS[name].target(1, 2).dim() > 1 else images

    def plan(part: float) -> Plan | None:
        request = Request(ranks, part * cap - target, images, state=0.0)
        found = study.search(request)
        return found.best.plan if found.fitting else None

    part, seen = 1.0, []
    found = plan(part)
    if found is None:  # the least part of the cap for which there is a plan
        low, high, best = part, HARD, plan(HARD)
        if best is None:
            return
        while high - low > 0.03:
            middle = (low + high) / 2
            less = plan(middle)
            low, high, best = (low, middle, less) if less else (middle, high, best)
        yield best
        return
    while found is not None:
        if found not in seen:
            seen.append(found)
            yield found
        part *= 0.85
        found = plan(part) if len(seen) < 4 and part > 0.1 else None


def largest(
    name: str, ranks: int, images: int, cap: float, store: float, most: int | None = None
) -> tuple[int, Plan, str]:
    """The largest side that the planner knows a plan for, with so many bytes on each rank's disk,
    or the one that is the `most` to be tried; the plan, and what it says of the next side."""
    study, target = _study(name, 256), NETWORKS[name].target(1, 1)
    here = 0 if target.dim() > 1 else images * target.element_size()  # masks are read in boxes
    request = Request(ranks, cap - here, images, "image", state=0.0, store=store)
    by_time = replace(request, objective="time")
    if most is not None:
        with suppress(PlanError):  # then the largest is smaller
            return most, study.at(most).plan(by_time), "not tried, a step would take too long here"
    plan, found = study.choose(request)
    side = found.images[0].shape[-1]
    try:
        found.at(side + STEP).plan(by_time)
    except PlanError as error:
        return side, plan, str(error).split(". ")[0]
    raise AssertionError(f"the planner has a plan for {side + STEP}, and called {side} the largest")


@cache
def _study(name: str, side: int) -> Study:
    sample = torch.empty(1, 3, side, side, device="meta")
    return Study(NETWORKS[name].make(), sample, machine("cpu"), costs="estimate")
