"""What the ranks of a session compare before each call, so that none waits for what never comes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.optim.lr_scheduler import LRScheduler

from gems.distributed.consensus import Claim, agree, agree_on_failure, listed
from gems.distributed.handshake import Comparisons
from gems.distributed.key import key
from gems.errors import PeerError, ShapeError, TraceError
from gems.plans.plan import Plan
from gems.schedule.action import Schedule
from gems.torch import fingerprint, settings
from gems.torch.runtime.microbatch import Batch, describe, split
from gems.torch.runtime.stage_runner import StageRunner
from gems.torch.state.rank_optimizer import RankOptimizer
from gems.torch.state.rank_weights import RankWeights
from gems.transport.protocol import Transport

THOROUGH, EVERY = 2, 100  # batches are compared whole in the first steps, and in every so-manieth


class Compared(Protocol):
    """The session, as far as its ranks compare it."""

    transport: Transport
    plan: Plan
    schedule: Schedule
    runner: StageRunner
    optimizers: list[RankOptimizer]
    batch_dim: Any
    clip: float | None
    seed: int
    precision: str
    master_weights: bool
    memory_format: Any
    compiling: Any
    precompiled: list[str]
    loss: Any
    regularizer: Any
    updates: bool
    settings: dict[str, Any]
    steps: int
    window: int


class Handshake(Comparisons):
    """Those of one session."""

    def __init__(self, session: Compared) -> None:
        self.session, self.transport = session, session.transport

    def start(self, model: int, sample: Any) -> None:
        session = self.session
        same = {
            "sample": describe(sample),
            "seed": session.seed,
            "precision": session.precision,
            "master weights": session.master_weights,
            "memory format": session.memory_format,
            "compile": session.compiling,
            "compiled modules": session.precompiled,
            "clip": session.clip,
            "loss": named(session.loss),
            "regularizer": named(session.regularizer),
        }
        self.begin("Trainer", model, session.plan, session.schedule, **same)

    def batch(self, call: str, inputs: Any, targets: Any, begin: Callable[[Batch], None]) -> Batch:
        """Split a batch and begin it. All ranks must be about to do the same; otherwise messages
        would not fit, or mix what does not belong together."""
        session = self.session
        try:
            batch = split(inputs, targets, session.plan.total, session.batch_dim)
            try:
                begin(batch)
            except TraceError as error:
                raise ShapeError(
                    f"the model does not take inputs {describe(batch.inputs[0])}: {error}"
                ) from error
            mode = session.runner.programs.structure.last
            claim = self.claim(call, batch, (inputs, targets), mode)
        except Exception as error:
            agree_on_failure(self.transport, call, error)
            raise
        agree(self.transport, claim)
        return batch

    def claim(self, call: str, batch: Batch, given: Any, mode: int) -> Claim:
        """What this rank is about to do, and with what, for the others to compare. `mode` is the
        model's, see Structure."""
        if self.transport.world == 1:
            return Claim(call)
        first, steps = describe(batch.inputs[0]), self.session.steps
        thorough = steps < THOROUGH or steps % EVERY == 0
        return Claim(
            call,
            progress=self._progress(),
            model=key(mode, self.session.runner.programs.recordings.digest),
            settings=self._settings(),
            batch=key(
                batch.sizes,
                first,
                fingerprint.of_batch(given, thorough=thorough, reads_gpu=thorough),
            ),
            given=f"step {steps}, {first} first of {batch.samples} samples",
        )

    def optimizers(self, weights: RankWeights) -> dict[str, Any]:
        """What of this rank's newest optimizer must be the same on all ranks."""
        own = self.session.optimizers[-1]
        several = {
            id(p): name
            for name, p in weights.stepped().items()
            if len(weights.owned.replica_groups[name]) > 1
        }
        return {
            "kinds": f"{named(own.optimizer)}, {named(own.scheduler)}",
            "groups": len(own.optimizer.param_groups),
            "comparable": settings.comparable(own.optimizer),
            "replicated": settings.by_parameter(own.optimizer, several),
        }

    def compare_optimizers(self, found: Sequence[Mapping[str, Any]]) -> None:
        """`found` has what `optimizers` gives, of all ranks."""
        kinds = [mine["kinds"] for mine in found]
        if len(set(kinds)) > 1:
            raise PeerError(
                f"ranks have different optimizers or schedulers: {listed(kinds)}. Give all ranks "
                "the same"
            )
        self.session.optimizers[-1].compared = settings.shared(found)
        for name in {name for mine in found for name in mine["replicated"]}:
            ranks = [rank for rank, mine in enumerate(found) if name in mine["replicated"]]
            if len({found[rank]["replicated"][name] for rank in ranks}) > 1:
                raise PeerError(
                    f"ranks {ranks} hold replicas of {name} with different hyper-parameters; the "
                    "optimizer must give a parameter the same ones on every rank"
                )
        agree(self.transport, Claim("Trainer", settings=self._settings()))

    def _progress(self) -> dict[str, Any]:
        return {
            "calls of step": self.session.steps,
            "samples accumulated": self.session.window,
        }

    def _settings(self) -> dict[str, Any]:
        """What may be changed between steps, and must be changed on all ranks."""
        session = self.session
        found: dict[str, Any] = {"clip": session.clip, "update": session.updates}
        for number, own in enumerate(session.optimizers):
            mine = settings.now(own.optimizer, own.compared)
            if own.scheduler is not None:
                mine["steps of the scheduler"] = getattr(own.scheduler, "last_epoch", None)
            which = f" of optimizer {number}" if number else ""
            found |= {f"{name}{which}": value for name, value in mine.items()}
        return found | session.settings


def named(thing: Any) -> str:
    """What a loss, optimizer or scheduler is, in a form that ranks can compare."""
    name = getattr(thing, "__qualname__", type(thing).__qualname__)
    if thing is None or isinstance(thing, (torch.optim.Optimizer, LRScheduler)):
        return name
    return f"{name} #{fingerprint.of_function(thing):x}"
