"""Carry out an asynchronous pipeline, one window per batch; what is in flight stays so."""

from __future__ import annotations

from gems.engine.adapter import Adapter
from gems.engine.executor import Engine, Update
from gems.engine.measured import Measured
from gems.plans.plan import Plan
from gems.schedule.action import Schedule
from gems.schedule.async_window import AT_ONCE, Window, windows
from gems.schedule.lower.messages import receipts
from gems.transport.protocol import Transport


class AsynchronousPipeline:
    """One rank of a flush-free pipeline. The adapter has two batches at a time, with micro-batches
    numbered as in `plan.on_end(2)`."""

    def __init__(
        self,
        plan: Plan,
        schedule: Schedule,
        adapter: Adapter,
        transport: Transport,
        update: Update,
    ) -> None:
        proofs = receipts(schedule, plan.unrolled)[transport.rank]
        self.windows = windows(schedule.ranks[transport.rank], proofs, plan)
        nothing = Schedule(((),) * plan.world)
        self.engine = Engine(plan.on_end(AT_ONCE), nothing, adapter, transport, update)
        self.going = False

    def step(self, batch: int, number: int = 0) -> Measured:
        """The window of a batch."""
        if not self.going:
            self.engine.clear()
        part = self.windows.next if self.going else self.windows.first
        self.going = True
        return self._run(part[batch % AT_ONCE], number, ends=False)

    def drain(self, batch: int, number: int = 0) -> Measured:
        """Run the rest of the last batch. Nothing is in flight then."""
        found = self._run(self.windows.drain[batch % AT_ONCE], number, ends=True)
        self.going = False
        return found

    def _run(self, window: Window, number: int, *, ends: bool) -> Measured:
        self.engine.adapter.start_clock()
        return self.engine.run(window.actions, window.proofs, number, ends=ends)
