"""Run families for a few steps each; what the last step of each asked of the GPU."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch

from gems.engine.executor import Engine
from gems.torch.offload import activations
from gems.torch.trainer import Trainer
from gems.transport import threads, torch_distributed
from tests.simulated_gpu.cuda import Device, FakeTensor, SimulatedCuda
from tests.simulated_gpu.distributed import World
from tests.simulated_gpu.families import FAMILIES, MISTAKES, Family, batches, trainer
from tests.simulated_gpu.record import Record


def run(device: Device, world: World, names: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """By name, of all if none is named."""
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # recording searches all objects for those that hold its tensors
    chosen = {n: f for n, f in (FAMILIES | MISTAKES).items() if not names or n in names}
    with (
        mock.patch.object(activations, "Tensor", FakeTensor),  # which it tells from subclasses
        mock.patch.object(torch_distributed, "default_heartbeat", lambda timeout: None),
        mock.patch.object(Engine, "run", _marked(device, Engine.run)),
    ):
        return {name: _measured(device, world, family) for name, family in chosen.items()}


def _marked(device: Device, actions: Callable[..., Any]) -> Callable[..., Any]:
    """The engine's actions, from the first to the last."""

    def marking(self: Any, *given: Any, **options: Any) -> Any:
        device.record.acting = True
        try:
            return actions(self, *given, **options)
        finally:
            device.record.acting = False

    return marking


def _measured(device: Device, world: World, family: Family) -> dict[str, Any]:
    record = device.restart()
    world.start(family.rank, family.plan.world)
    alone = family.plan.world == 1
    transport = threads.World(1).rank(0) if alone else torch_distributed.TorchDist()
    found: dict[str, Any] = {}
    try:
        with SimulatedCuda(), family.mistake():
            own = trainer(family, transport)
            for images, labels in batches(family):
                record.begin_step()
                own.step(images, labels)
            found = _asked(record, world) | _reported(own)
    except Exception as error:  # of a mistake
        found = _asked(record, world) | {"error": f"{type(error).__name__}: {error}"}
    return found


def _asked(record: Record, world: World) -> dict[str, Any]:
    counts = record.counts
    return {
        "error": None,
        "syncs": dict(counts.syncs),
        "inside": dict(counts.inside),
        "launches": dict(counts.launches),
        "messages": dict(counts.messages),
        "copies": dict(counts.copies),
        "communicators": world.communicators,
        "races": list(record.races),
        "misplaced": list(record.misplaced),
        "allocated": counts.peak,
        "pinned": sum(record.pinned.values()) + sum(record.registered.values()),
    }


def _reported(own: Trainer) -> dict[str, Any]:
    """What the trainer itself counted; and its timeline, which is read now."""
    last = own.session.last
    assert last is not None
    seconds = [event.seconds for event in last.timeline.events]
    return {
        "counted": own.peak,
        "offloaded": max(live.offloaded for *_, live in last.stamps),
        "events": len(seconds),
        "ordered": min(seconds, default=0.0) >= 0,
    }
