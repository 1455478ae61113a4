"""Training without a flush (PipeDream-2BW): what goes before, between and after its windows.

Nothing here waits for a rank that this one does not wait for anyway. What all ranks must agree on
is sent around in one window and looked at in the next, where an update needs it:

    window t    tell all ranks that this is a step, not a flush          (looked at in window t + 1)
                see that the stages before were given the same batch     (their word comes first)
                run the window; in it, right before the update of batch t - 1:
                    loss of batch t - 1, was it the same everywhere      (begun in window t - 1)
                tell the loss of batch t                                 (looked at in window t + 1)
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

from gems.engine.windows import AsynchronousPipeline
from gems.errors import GemsError, LossError, PeerError, PlanError, ShapeError, TraceError, problems
from gems.plans.plan import Plan
from gems.predict.timeline import Timeline
from gems.schedule.action import Schedule
from gems.torch.consensus import Claim, agree, listed
from gems.torch.runtime.adapter import TorchAdapter
from gems.torch.runtime.begin_step import begin_step
from gems.torch.runtime.microbatch import describe, split
from gems.torch.runtime.stage_runner import StageRunner
from gems.torch.runtime.two_batches import TwoBatches
from gems.torch.state.ownership import Ownership
from gems.torch.state.rank_weights import RankWeights
from gems.torch.step import Step
from gems.torch.tensors.rng import key
from gems.transport.protocol import Done, Transport, Work

Tensor = torch.Tensor
CALLS = ("none", "step", "flush")


@dataclass
class Said:
    """What all ranks say of a batch: its loss, who was told to stop."""

    step: int
    given: str
    hash: tuple[int, int]
    parts: Tensor
    handle: Work


def _hash(what: int) -> tuple[int, int]:
    """Two numbers that, added up over ranks in float64, tell whether all have the same."""
    return what, what * what % 1000003


class Driver(Protocol):
    """The trainer, as far as its asynchronous pipeline needs it."""

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
    accumulate: int
    regularizer: Any
    batch_dim: Any
    interrupt: Any
    optimizer: torch.optim.Optimizer | None
    trains: bool
    steps: int
    failed: BaseException | None
    _local: Timeline | None

    def claim(self, call: str, batch: Any, given: Any, mode: int) -> Claim: ...

    def reject_unusable(self) -> None: ...

    def _forget_gradients(self) -> None: ...

    def _step_scheduler(self, loss: float) -> None: ...


class AsyncPipeline:
    """A trainer's batches, one window after the other."""

    def __init__(self, trainer: Driver) -> None:
        self.trainer, self.transport = trainer, trainer.transport
        if trainer.trains:
            self.reject()
        self.batches = TwoBatches(trainer.weights, trainer.plan)
        adapter = TorchAdapter(trainer.runner, self.batches)
        self.engine = AsynchronousPipeline(
            trainer.plan, trainer.schedule, adapter, trainer.transport, self._update
        )
        self.said: deque[Said] = deque()  # of batches whose update is still to come
        self.loss, self.told = math.nan, False  # of the last one that was updated
        self.modes = self._modes()
        self.wrong: str | None = None  # a loss that no update can be made of
        self.words: deque[list[tuple[Work, Tensor]]] = deque()  # on their way to later stages
        self.calls: deque[tuple[Work, Tensor]] = deque()  # which call every rank has begun

    def reject(self) -> None:
        """What cannot be done without waiting for all of a batch on all ranks."""
        trainer = self.trainer
        found = []
        if trainer.clip is not None:
            found.append(
                f"clip={trainer.clip} wants the norm of all stages' gradients before any update, "
                "which would be a flush"
            )
        if trainer.precision == "fp16":
            found.append(
                "precision 'fp16' scales the loss by whether any stage's gradient overflowed, "
                "which would be a flush; use 'bf16'"
            )
        if trainer.accumulate > 1:
            found.append(
                f"accumulate={trainer.accumulate} would use weights of more than two versions; "
                "give the plan more micro-batches instead"
            )
        if trainer.regularizer is not None:
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
        mine = dict(self.trainer.model.named_parameters())
        return [n for n in self.trainer.owned.tied() if n in mine and mine[n].requires_grad]

    # --- a window -----------------------------------------------------------------------------

    def step(self, inputs: Any, targets: Any) -> Step:
        """The next batch, as far as it gets; the update of the one before."""
        start, trainer = perf_counter(), self.trainer
        if self.engine.going and self._modes() != self.modes:
            raise GemsError(
                "modules went to another mode (train, eval) or weights were frozen or unfrozen "
                "while a batch is under way; call flush() on all ranks before that, or now"
            )
        if tied := self._tied():
            raise PlanError(
                f"{tied[0]} was unfrozen, but 2bw cannot train it: several stages use it"
            )
        batch = split(inputs, targets, trainer.plan.total, trainer.batch_dim)
        first = not self.engine.going
        if not first:
            self._announce("step")
        mode = trainer.runner.programs.modes()
        self._same(trainer.claim("step", batch, (inputs, targets), mode), first)
        try:
            self.batches.cover()
            self.batches.add(begin_step(trainer.runner, batch, trainer.steps, training=True))
        except TraceError as error:
            raise ShapeError(
                f"the model does not take inputs {describe(batch.inputs[0])}: {error}"
            ) from error
        self.modes = self._modes()
        trainer._local = self._carry_out(self.engine.step)
        trainer.steps += 1
        self._tell()
        if self.wrong:
            self.flush()
        loss, told = (math.nan, False) if first else (self.loss, self.told)
        return Step(loss, batch.samples, perf_counter() - start, not first, None, told)

    def flush(self) -> Step | None:
        """What is left of the last batch, and its update; None if nothing is under way."""
        self.trainer.reject_unusable()
        if not self.engine.going:
            return None
        start = perf_counter()
        self._announce("flush")
        while self.calls:
            self._same_calls()
        with self._as_begun():
            self._carry_out(self.engine.drain)  # of which the timeline is part of no step
        for handle, _ in (word for words in self.words for word in words):
            handle.wait()
        self.words.clear()
        self.batches.restart()
        if self.wrong:
            wrong, self.wrong = self.wrong, None
            raise self._bad_loss(wrong)
        return Step(self.loss, 0, perf_counter() - start, True, None, self.told)

    def _bad_loss(self, what: str) -> LossError:
        """Weights are as before the batch; running statistics saw it, and the one behind it."""
        partitions = self.trainer.runner.programs.recordings.values()
        if not any(p.touches(s) for p in partitions for s in range(self.trainer.plan.depth)):
            return LossError(what)
        error = LossError(
            f"{what}. Running statistics have seen both batches, so that this trainer is unusable: "
            "make a new one, and load the last checkpoint"
        )
        self.trainer.failed = error
        return error

    def _modes(self) -> tuple[list[bool], list[bool]]:
        """What recomputation must find as forward did: which modules train, which parameters."""
        model = self.trainer.model
        trains = [module.training for module in model.modules()]
        return trains, [p.requires_grad for p in model.parameters()]

    @contextmanager
    def _as_begun(self) -> Iterator[None]:
        """The batch under way in the modes that it began with."""
        now = self._modes()
        try:
            self._set_modes(self.modes)
            yield
        finally:
            self._set_modes(now)

    def _set_modes(self, modes: tuple[list[bool], list[bool]]) -> None:
        model = self.trainer.model
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

    def _carry_out(self, window: Callable[[int, int], Timeline]) -> Timeline:
        try:
            return window(self.batches.begun - 1, self.trainer.steps)
        except BaseException as error:
            self.trainer.failed = error
            raise
        finally:
            self.batches.show_newest()

    # --- what ranks tell each other -----------------------------------------------------------

    def _same(self, claim: Claim, first: bool) -> None:
        """All ranks must be about to do the same. At first all say so, and wait for each other;
        then each stage sends its word ahead of what it computes."""
        self.what = key(claim.row()) >> 20
        self.given = claim.given
        if first:
            agree(self.transport, claim)
            return
        try:
            if not self._heard():
                raise self._differ(self.given)
        except BaseException as error:
            self.trainer.failed = error
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
            self.trainer.failed = error
            self.transport.fail(error)
            raise

    def _differ(self, given: str) -> ShapeError:
        return ShapeError(
            f"ranks were given different batches, or have different settings; rank "
            f"{self.transport.rank} has {given}. Give every rank the same global batch"
        )

    def _heard(self) -> bool:
        """Whether the stages before have the same; our word goes to those behind. (Copies of the
        pipeline find out before they update.)"""
        plan, to = self.trainer.plan, self.transport
        stage = plan.stages_on[to.rank][0]
        what = torch.tensor([self.what], device=self.trainer.device)
        replica = next(r for r, row in enumerate(plan.spatial_groups) if to.rank in row[stage])
        behind = [r for s in plan.sinks[stage] for r in plan.spatial_group_of(s, replica)]
        before = [r for s in plan.sources[stage] for r in plan.spatial_group_of(s, replica)]
        self.words.append([(to.isend(word := what.clone(), r), word) for r in behind])
        heard = [torch.zeros_like(what) for _ in before]
        for handle in [to.irecv(word, r) for word, r in zip(heard, before, strict=True)]:
            handle.wait()
        if (
            len(self.words) > 2
        ):  # these were waited for at the other end before our last batch ended
            for handle, _ in self.words.popleft():
                handle.wait()
        return all(torch.equal(word, what) for word in heard)

    def _tell(self) -> None:
        """This rank's part of what is to be known of a batch, once its forwards are done."""
        trainer = self.trainer
        told = trainer.interrupt is not None and trainer.interrupt.wanted
        parts = [trainer.runner.loss.of_step(self.batches.newest()), told, *_hash(self.what)]
        sums = torch.tensor(parts, dtype=torch.float64)
        everyone = tuple(range(self.transport.world))
        handle = self.transport.all_reduce(sums, everyone)
        said = Said(trainer.steps - 1, self.given, _hash(self.what), sums, handle)
        self.said.append(said)

    # --- an update ----------------------------------------------------------------------------

    def _update(self, stage: int) -> tuple[int, Work]:
        """Of the batch whose gradients were summed, if its loss is a number."""
        said, trainer = self.said.popleft(), self.trainer
        assert trainer.optimizer is not None
        while len(self.calls) > 1:
            self._same_calls()
        said.handle.wait()
        loss, tellings, one, two = said.parts.tolist()
        if (one, two) != tuple(self.transport.world * x for x in said.hash):
            raise self._differ(said.given)
        if not math.isfinite(loss) and not self.wrong:
            self.wrong = (
                f"the loss is {loss} in step {said.step}; no update was made with it, nor with the "
                "batch behind it. Look at the data of this step, or lower the learning rate"
            )
        if not self.wrong:
            self.loss, self.told = loss, tellings > 0
            self.batches.versions.step(trainer.optimizer)
            trainer._step_scheduler(loss)
        trainer._forget_gradients()
        self.batches.reduced += 1
        return 0, Done()  # nothing of it is put away
