"""What the ranks of a session compare before each call, so that none waits for what never comes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from gems.distributed.consensus import Claim, agree, agree_on_failure
from gems.distributed.handshake import Comparisons
from gems.distributed.key import key
from gems.keras import fingerprint
from gems.keras.runtime.microbatch import Batch, describe, split
from gems.plans.plan import Plan
from gems.schedule.action import Schedule
from gems.transport.protocol import Transport

Given = tuple[Any, Any, Any]  # inputs, targets, sample weights


class Compared(Protocol):
    """The session, as far as its ranks compare it."""

    transport: Transport
    plan: Plan
    schedule: Schedule
    optimizers: list[Any]
    settings: dict[str, Any]
    steps: int


class Handshake(Comparisons):
    """Those of one session."""

    def __init__(self, session: Compared) -> None:
        self.session, self.transport = session, session.transport

    def start(self, model: int, sample: str) -> None:
        session = self.session
        self.begin("Session", model, session.plan, session.schedule, sample=sample)

    def batch(self, call: str, given: Given, begin: Callable[[Batch], None]) -> Batch:
        """Split a batch and begin it. All ranks must be about to do the same; otherwise
        messages would not fit, or mix what does not belong together."""
        session = self.session
        try:
            batch = split(*given, session.plan.total)
            begin(batch)
            claim = self._claim(call, batch, given)
        except Exception as error:
            agree_on_failure(self.transport, call, error)
            raise
        agree(self.transport, claim)
        return batch

    def _claim(self, call: str, batch: Batch, given: Given) -> Claim:
        if self.transport.world == 1:
            return Claim(call)
        first = describe(batch.form(0))
        return Claim(
            call,
            progress=self._progress(),
            settings=self._settings(),
            batch=key(batch.sizes, first, *map(fingerprint.of_batch, given)),
            given=f"step {self.session.steps}, {first} first of {batch.samples} samples",
        )

    def _progress(self) -> dict[str, Any]:
        return {"batches so far": self.session.steps}

    def _settings(self) -> dict[str, Any]:
        """What may be changed between steps, and must be changed on all ranks."""
        rates = {
            f"learning rate of optimizer {number}": float(own.learning_rate)
            for number, own in enumerate(self.session.optimizers)
        }
        return rates | self.session.settings
