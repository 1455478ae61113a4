"""Training without a flush (PipeDream-2BW): what goes before, between and after its windows.

Nothing here waits for a rank that this one does not wait for anyway. What all ranks must agree on
is sent around in one window and looked at in the next, where an update needs it:

    window t    tell the loss of batch t - 1                             (for its update)
                tell all ranks that this is a step, not a flush          (looked at in window t + 1)
                see that the stages before were given the same batch     (their digest comes first)
                run the window; in it, right before the update of batch t - 1:
                    loss of batch t - 1, was it the same everywhere
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import nn

from gems.distributed.consensus import Claim, agree, listed
from gems.distributed.key import key
from gems.distributed.ownership import Ownership
from gems.distributed.step import Step
from gems.engine.measured import Measured
from gems.engine.windows import AsynchronousPipeline
from gems.errors import GemsError, LossError, PeerError, PlanError, ShapeError, TraceError, problems
from gems.plans.plan import Plan
from gems.schedule.action import Schedule
from gems.torch.handshake import Handshake
from gems.torch.runtime.adapter import TorchAdapter
from gems.torch.runtime.begin_step import begin_step
from gems.torch.runtime.microbatch import describe, split
from gems.torch.runtime.stage_runner import StageRunner
from gems.torch.runtime.two_batches import TwoBatches
from gems.torch.state.rank_optimizer import RankOptimizer
from gems.torch.state.rank_weights import RankWeights
from gems.transport.protocol import Done, Transport, Work

Tensor = torch.Tensor
CALLS = ("none", "step", "flush")


@dataclass
class BatchReport:
    """What all ranks report of a batch: its loss, and whether to stop."""

    step: int
    given: str
    hash: tuple[int, int]
    parts: Tensor
    handle: Work


def _hash(what: int) -> tuple[int, int]:
    """Two numbers that, added up over ranks in float64, tell whether all have the same."""
    return what, what * what % 1000003


class Driver(Protocol):
    """The session, as far as its asynchronous pipeline needs it."""

    model: nn.Module
    plan: Plan
    schedule: Schedule
    transport: Transport
    owned: Ownership
    runner: StageRunner
    weights: RankWeights
    device: torch.device
    precision: str
    clip: float | None
    regularizer: Any
    batch_dim: Any
    interrupt: Any
    loss: Any
    optimizers: list[RankOptimizer]
    handshake: Handshake
    steps: int
    failed: BaseException | None
    last: Any

    def reject_unusable(self) -> None: ...

    def zero_grad(self) -> None: ...


class AsyncPipeline:
    """A session's batches, one window after the other."""

    def __init__(self, session: Driver) -> None:
        self.session, self.transport = session, session.transport
        if session.loss is not None:
            self.reject()
        self.batches = TwoBatches(session.weights, session.plan)
        adapter = TorchAdapter(session.runner, self.batches)
        self.engine = AsynchronousPipeline(
            session.plan, session.schedule, adapter, session.transport, self._update
        )
        self.reports: deque[BatchReport] = deque()  # of batches whose update is still to come
        self.unreported = False  # whether the last batch is yet to be reported
        self.loss, self.interrupted = math.nan, False  # of the last one that was updated
        self.modes = self._modes()
        self.wrong: str | None = None  # a loss that no update can be made of
        self.digests: deque[list[tuple[Work, Tensor]]] = deque()  # on their way to later stages
        self.calls: deque[tuple[Work, Tensor]] = deque()  # which call every rank has begun

    def reject(self) -> None:
        """What cannot be done without waiting for all of a batch on all ranks."""
        session = self.session
        found = []
        if session.clip is not None:
            found.append(
                f"clip={session.clip} wants the norm of all stages' gradients before any update, "
                "which would be a flush"
            )
        if session.precision == "fp16":
            found.append(
                "precision 'fp16' scales the loss by whether any stage's gradient overflowed, "
                "which would be a flush; use 'bf16'"
            )
        if session.regularizer is not None:
            found.append(
                "regularizer is added to a loss that is complete before the backwards of its batch "
                "are; use the optimizer's weight_decay"
            )
        tied = self._tied()
        if tied:
            found.append(
                f"{', '.join(tied[:3])}: used by several stages, which would have to sum their "
                "gradients at different times; put these into one stage"
            )
        if found:
            raise PlanError(problems("schedule '2bw' cannot do this; use '1f1b', or:", found))

    def _tied(self) -> list[str]:
        mine = dict(self.session.model.named_parameters())
        return [n for n in self.session.owned.tied() if n in mine and mine[n].requires_grad]

    # --- a window -----------------------------------------------------------------------------

    def step(self, inputs: Any, targets: Any) -> Step:
        """The next batch, as far as it gets; the update of the one before."""
        start, session = perf_counter(), self.session
        if self.engine.going and self._modes() != self.modes:
            raise GemsError(
                "modules went to another mode (train, eval) or weights were frozen or unfrozen "
                "while a batch is in flight; call flush() on all ranks before that, or now"
            )
        if tied := self._tied():
            raise PlanError(
                f"{tied[0]} was unfrozen, but 2bw cannot train it: several stages use it"
            )
        batch = split(inputs, targets, session.plan.total, session.batch_dim)
        first = not self.engine.going
        if not first:
            self._begin_report()
            self._announce("step")
        mode = session.runner.programs.modes()
        self._same(session.handshake.claim("step", batch, (inputs, targets), mode), first)
        try:
            self.batches.cover()
            self.batches.add(begin_step(session.runner, batch, session.steps, training=True))
        except TraceError as error:
            raise ShapeError(
                f"the model does not take inputs {describe(batch.inputs[0])}: {error}"
            ) from error
        self.modes = self._modes()
        session.last = self._carry_out(self.engine.step)
        session.steps += 1
        self.unreported = True
        if self.wrong:
            self.flush()
        loss, stop = (math.nan, False) if first else (self.loss, self.interrupted)
        return Step(loss, batch.samples, perf_counter() - start, not first, None, stop)

    def flush(self) -> Step | None:
        """What is left of the last batch, and its update; None if nothing is in flight."""
        self.session.reject_unusable()
        if not self.engine.going:
            return None
        start = perf_counter()
        self._begin_report()
        self._announce("flush")
        while self.calls:
            self._same_calls()
        with self._as_begun():
            self._carry_out(self.engine.drain)  # of which the timeline is part of no step
        for handle, _ in (sent for batch in self.digests for sent in batch):
            handle.wait()
        self.digests.clear()
        self.batches.restart()
        if self.wrong:
            wrong, self.wrong = self.wrong, None
            raise self._bad_loss(wrong)
        return Step(self.loss, 0, perf_counter() - start, True, None, self.interrupted)

    def _bad_loss(self, what: str) -> LossError:
        """Weights are as before the batch; running statistics saw it, and the one behind it."""
        partitions = self.session.runner.programs.recordings.values()
        if not any(p.touches(s) for p in partitions for s in range(self.session.plan.depth)):
            return LossError(what)
        error = LossError(
            f"{what}. Running statistics have seen both batches, so that this trainer is unusable: "
            "make a new one, and load the last checkpoint"
        )
        self.session.failed = error
        return error

    def _modes(self) -> tuple[list[bool], list[bool]]:
        """What recomputation must find as forward did: which modules train, which parameters."""
        model = self.session.model
        trains = [module.training for module in model.modules()]
        return trains, [p.requires_grad for p in model.parameters()]

    @contextmanager
    def _as_begun(self) -> Iterator[None]:
        """The batch in flight in the modes that it began with."""
        now = self._modes()
        try:
            self._set_modes(self.modes)
            yield
        finally:
            self._set_modes(now)

    def _set_modes(self, modes: tuple[list[bool], list[bool]]) -> None:
        model = self.session.model
        for module, trains in zip(model.modules(), modes[0], strict=True):
            module.training = trains
        for p, wants in zip(model.parameters(), modes[1], strict=True):
            p.requires_grad_(wants)

    def resume(self, older: Mapping[nn.Parameter, Tensor]) -> None:
        """Go on from weights that were put in place, and the version before them if it is known."""
        if older:
            self.batches.cover()
        self.batches.versions.resume(older)
        self.batches.restart()

    def _carry_out(self, window: Callable[[int, int], Measured]) -> Measured:
        try:
            return window(self.batches.begun - 1, self.session.steps)
        except BaseException as error:
            self.session.failed = error
            raise
        finally:
            self.batches.show_newest()

    # --- what ranks tell each other -----------------------------------------------------------

    def _same(self, claim: Claim, first: bool) -> None:
        """All ranks must be about to do the same. At first all compare, and wait for each other;
        then each stage sends its digest ahead of what it computes."""
        self.digest = key(claim.row()) >> 20
        self.given = claim.given
        if first:
            agree(self.transport, claim)
            return
        try:
            if not self._same_before():
                raise self._differ(self.given)
        except BaseException as error:
            self.session.failed = error
            self.transport.fail(error)
            raise

    def _announce(self, call: str) -> None:
        """Begin to tell all ranks which call this one is in. Nobody waits for it here: a rank that
        flushes waits for all others anyway, and one that steps looks when it updates."""
        table = torch.zeros(self.transport.world, dtype=torch.int64)
        table[self.transport.rank] = CALLS.index(call)
        handle = self.transport.all_reduce(table, tuple(range(self.transport.world)))
        self.calls.append((handle, table))

    def _same_calls(self) -> None:
        """Raise, and end all ranks, unless all of them have begun the same call."""
        handle, table = self.calls.popleft()
        try:
            handle.wait()
            calls = [CALLS[i] for i in table.tolist()]
            if len(set(calls)) > 1:
                raise PeerError(
                    f"ranks are in different calls: {listed(calls)}. With schedule '2bw', predict, "
                    "save, state_dict and close begin with a flush. Every rank must make the same "
                    "calls in the same order"
                )
        except BaseException as error:
            self.session.failed = error
            self.transport.fail(error)
            raise

    def _differ(self, given: str) -> ShapeError:
        return ShapeError(
            f"ranks were given different batches, or have different settings; rank "
            f"{self.transport.rank} has {given}. Give every rank the same global batch"
        )

    def _same_before(self) -> bool:
        """Whether the stages before have the same; our digest goes to those behind. (Copies of the
        pipeline find out before they update.)"""
        plan, to = self.session.plan, self.transport
        stage = plan.stages_on[to.rank][0]
        own = torch.tensor([self.digest])  # over the host, which would have to wait for a GPU
        replica = next(r for r, row in enumerate(plan.spatial_groups) if to.rank in row[stage])
        behind = [r for s in plan.sinks[stage] for r in plan.spatial_group_of(s, replica)]
        before = [r for s in plan.sources[stage] for r in plan.spatial_group_of(s, replica)]
        self.digests.append([(to.isend(digest := own.clone(), r), digest) for r in behind])
        received = [torch.zeros_like(own) for _ in before]
        for handle in [to.irecv(digest, r) for digest, r in zip(received, before, strict=True)]:
            handle.wait()
        if len(self.digests) > 2:  # received at the other end before our last batch ended
            for handle, _ in self.digests.popleft():
                handle.wait()
        return all(torch.equal(digest, own) for digest in received)

    def _begin_report(self) -> None:
        """This rank's part of what is to be known of the last batch, once its forwards are done.
        The host waits for those, not for the backwards behind them."""
        if not self.unreported:
            return
        self.unreported = False
        session, state = self.session, self.batches.newest()
        stop = session.interrupt is not None and session.interrupt.wanted
        loss = session.runner.loss.of_step(state, state.read_losses().values())
        parts = [loss, stop, *_hash(self.digest)]
        sums = torch.tensor(parts, dtype=torch.float64)
        everyone = tuple(range(self.transport.world))
        handle = self.transport.all_reduce(sums, everyone)
        report = BatchReport(session.steps - 1, self.given, _hash(self.digest), sums, handle)
        self.reports.append(report)

    # --- an update ----------------------------------------------------------------------------

    def _update(self, stage: int) -> tuple[int, Work]:
        """Of the batch whose gradients were summed, if its loss is a number."""
        report, session = self.reports.popleft(), self.session
        (own,) = session.optimizers
        while len(self.calls) > 1:
            self._same_calls()
        report.handle.wait()
        loss, stops, one, two = report.parts.tolist()
        if (one, two) != tuple(self.transport.world * x for x in report.hash):
            raise self._differ(report.given)
        if not math.isfinite(loss) and not self.wrong:
            self.wrong = (
                f"the loss is {loss} in step {report.step}; no update was made with it, nor with "
                "the batch behind it. Look at the data of this step, or lower the learning rate"
            )
        if not self.wrong:
            self.loss, self.interrupted = loss, stops > 0
            self.batches.versions.step(lambda: own.step(1.0))
            own.step_scheduler(loss)
        session.zero_grad()
        self.batches.reduced += 1
        return 0, Done()  # nothing of it is offloaded
