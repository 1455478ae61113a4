"""A model under a plan, driven by the caller's own loop and optimizers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from gems.distributed.consensus import attempt
from gems.distributed.step import Step
from gems.engine.executor import Engine, nothing
from gems.errors import GemsError, LossError, PlanError
from gems.schedule.lower.reduce import overlaps
from gems.torch.async_pipeline import AsyncPipeline
from gems.torch.distributed_model import DistributedModel
from gems.torch.gpu_memory import explained
from gems.torch.lifetime import closable
from gems.torch.offload.malloc import trim
from gems.torch.runtime.begin_step import begin_step, changed_buffers
from gems.torch.runtime.microbatch import Batch
from gems.torch.state.loss_scale import LossScale
from gems.torch.state.optimizer_step import TIED
from gems.torch.state.rank_optimizer import (
    MakeOptimizer,
    MakeScheduler,
    RankOptimizer,
    reject_shared,
)
from gems.torch.state.rollback import Rollback
from gems.torch.tensors.reading import Reading
from gems.transport.protocol import Done, Work


@dataclass(frozen=True)
class BatchResult:
    """What `Session.forward_backward` gives, the same on every rank. `norm` is the gradient's,
    before clipping, if there is a clip; `interrupted`: a rank received a signal to stop."""

    loss: float
    samples: int
    norm: float | None = None
    interrupted: bool = False


@closable
class Session(DistributedModel):
    """A model under a plan, without a loop: `forward_backward` and `optimizer_step` are for the
    caller's loop, with the caller's optimizers. Every rank makes one, with the same arguments, and
    all ranks must make the same calls. `gems.Trainer` is the loop that most need.

        session = gems.Session(model, loss, sample, plan)
        adam = session.add_optimizer(torch.optim.Adam(model.parameters()))
        for images, targets in batches:
            result = session.forward_backward(images, targets)
            session.optimizer_step()

    Arguments are those of gems.Trainer, but for its optimizer, scheduler and accumulate; `settings`
    are of the caller's loop, and compared among ranks for every batch. It may be used by `with`,
    which closes it. A closed one raises GemsError.
    """

    failed: BaseException | None

    def _prepare_training(self) -> None:
        self.scale = LossScale() if self.precision == "fp16" else None
        self.complete = False  # whether gradients are, and wait for an optimizer step
        self.unstepped: list[RankOptimizer] = []  # with them
        self.result = BatchResult(math.nan, 0)  # of the last batch
        self.scaled = 1.0  # its loss, by so much (fp16)
        self.norm = 0.0  # of its gradients, scaled
        self.chosen: list[RankOptimizer] = []  # that the engine steps
        self.factor = 1.0  # of the gradients that they step with
        self.async_pipeline = AsyncPipeline(self) if self.plan.asynchronous else None
        if self.async_pipeline is None:
            update = self._step_stage
            self.engine = Engine(self.plan, self.schedule, self.adapter, self.transport, update)

    def add_optimizer(
        self, optimizer: MakeOptimizer | Optimizer, scheduler: MakeScheduler | None = None
    ) -> Optimizer:
        """Let the session step an optimizer: one of the model's parameters, made after the session,
        or a function of the parameters of this rank. All ranks must call it. Returns it: on each
        rank it has the parameters that this rank holds, and with zero=1 and above its shards.

        `scheduler`, a function of the optimizer, is stepped after every optimizer step.
        """
        self.reject_unusable()

        def add() -> dict[str, Any]:
            own = RankOptimizer(optimizer, scheduler, self.weights, self.device, self.part.store)
            reject_shared([*self.optimizers, own], self.weights)
            if self.plan.asynchronous and self.optimizers:
                raise PlanError("schedule '2bw' steps one optimizer; give it several groups")
            self.optimizers.append(own)
            self.weights.optimizers.append(own.optimizer)
            return self.handshake.optimizers(self.weights)

        self.handshake.compare_optimizers(attempt(self.transport, add))
        return self.optimizers[-1].optimizer

    # --- a batch --------------------------------------------------------------------------------

    def forward_backward(
        self, inputs: Any, targets: Any = None, *, update: bool = True
    ) -> BatchResult:
        """Forward and backward of a whole batch, given to every rank.

        With update=False another batch follows before the optimizer step, and its gradients are
        added. The step averages over all samples of these batches: gradients of `parameters()` are
        what it steps with once they are multiplied by `gradient_factor`.
        """
        self.reject_unusable()
        _reject_batch(self)
        self.updates = update
        before = Rollback.at(self, self.weights.parameters_here)
        try:
            batch = self._begin(inputs, targets, before)
        except BaseException:
            before.undo(self)
            raise
        try:
            whole = LossSum(self, update)
            with self._stepping():
                self.last = self.engine.step(self.steps, whole.begin if whole.early else nothing)
            self.state.finish_running_stats(self.weights)
            self.window, self.steps = self.window + batch.samples, self.steps + 1
            loss, self.norm, interrupted = whole.finish()
        except BaseException as error:
            self._break_off(error, before)
            raise
        if not math.isfinite(loss):
            self._clear_gradients()
            before.undo(self)
            raise LossError(
                f"the loss is {loss} in step {self.steps}; no update was made, and all is as "
                "before the step. Look at the data of this step, lower the learning rate, or clip "
                "gradients"
            )
        self.complete, self.unstepped = update, list(self.optimizers) if update else []
        shown = self.norm * self.gradient_factor if update and self.clip is not None else None
        self.result = BatchResult(loss, batch.samples, shown, interrupted)
        return self.result

    @property
    def gradient_factor(self) -> float:
        """What the optimizer step multiplies gradients by: they were averaged over the first
        batch's samples, and may be scaled (fp16)."""
        return self.first / self.window / self.scaled

    def _begin(self, inputs: Any, targets: Any, before: Rollback) -> Batch:
        """Get ready for a batch, and see that all ranks are about to run the same one."""

        def begin(batch: Batch) -> None:
            if not self.window:
                self.first = batch.samples
            # Losses are weighed so that gradients are averaged over all samples of the window; the
            # first batch does not know their number, so the optimizer step mends it.
            self.scaled = self.scale.value if self.scale else 1.0
            scale = batch.samples / self.first * self.scaled
            self.weights.needs_norm = self.clip is not None or self.scale is not None
            self.batches.state = begin_step(
                self.runner, batch, self.steps, training=True, scale=scale, update=self.updates
            )
            before.save_buffers(changed_buffers(self.state, self.weights))

        batch = self.handshake.batch("step", inputs, targets, begin)
        self.part.connect_stages(self.state.partitions.values())
        for own in self.optimizers:
            own.begin()
        return batch

    def _break_off(self, error: BaseException, before: Rollback) -> None:
        """A batch failed half-way. One rank alone, with all of its state in place, can go on from
        before it; others cannot know how far their peers came."""
        before.undo(self)
        whole = all(own.by_stage is None for own in self.optimizers) and not self.weights.shards
        if self.transport.world > 1 or not whole or self.runner.activation_store is not None:
            self.failed = error

    # --- an optimizer step ----------------------------------------------------------------------

    def optimizer_step(self, optimizer: Optimizer | None = None) -> bool:
        """Step one optimizer, or all, with the gradients of the last batches, clipped, and clear
        them. All ranks must call it. False if an fp16 gradient overflowed: nothing was stepped."""
        self.reject_unusable()
        chosen = [x for x in self.unstepped if optimizer is None or x.optimizer is optimizer]
        if not chosen:
            raise GemsError(
                "optimizer_step: this optimizer has no gradients to step with; call add_optimizer "
                "for it, and forward_backward before each step"
            )
        if any(state.gathers_updates for state in self.plan.residency):
            self.handshake.call("optimizer_step")  # which all-gathers
        return self.step_optimizers(chosen)

    def step_optimizers(self, chosen: list[RankOptimizer]) -> bool:
        """The same, where all ranks are known to do it."""
        factor = self.gradient_factor
        norm = self.norm * factor
        if self.clip is not None and norm > self.clip:
            factor *= self.clip / (norm + 1e-6)
        try:
            with self._stepping():
                later = len(self.unstepped) < len(self.optimizers)  # than another, which looked
                updated = self.scale is None or later or self.scale.accepts(norm)
                if updated:
                    self._update(chosen, factor)
        except BaseException as error:  # some weights have made their step, and some have not
            self.failed = error
            raise
        self.unstepped = [own for own in self.unstepped if updated and own not in chosen]
        if not self.unstepped:
            self.zero_grad()
        self.weights.release_leaked_views()
        if self.on_disk:
            trim()
        return updated

    def _update(self, chosen: list[RankOptimizer], factor: float) -> None:
        for own in chosen if self.plan.residency[0].eager else ():
            assert own.by_stage is not None  # the step of tied weights is left
            for stage in own.by_stage.unstepped():
                own.by_stage.step(stage, factor)
        self.chosen, self.factor = chosen, factor
        self.last = self.engine.finish(self.steps)
        for own in chosen:
            own.step_scheduler(self.result.loss)

    def _step_stage(self, stage: int) -> tuple[int, Work]:
        """The engine's optimizer step of a stage: bytes that are loaded for it, and its handle. At
        the end one call steps all stages of the rank, unless something is offloaded."""
        if self.plan.residency[stage].eager:
            return self._step_early(stage)
        stages, loaded = self.weights.stages, 0
        for own in self.chosen:
            if own.by_stage is not None:
                loaded = own.by_stage.step(stage, self.factor)
            elif stage == stages[0]:
                own.step(self.factor)
            if stage == stages[-1] and own.by_stage is not None:
                loaded = max(loaded, own.by_stage.step(TIED, self.factor))
        if stage == stages[-1]:
            for own in self.chosen:
                own.optimizer.zero_grad(set_to_none=True)
            if self.chosen == self.unstepped:
                self.weights.clear_gradients()
        return loaded, Done()

    def _step_early(self, stage: int) -> tuple[int, Work]:
        """A stage's gradients are complete, and its step need not wait for the others'."""
        if not self.updates:  # more batches will add to these gradients
            return 0, Done()
        values = self.state.read_losses().values()
        for (i, _), loss in zip(self.state.losses, values, strict=True):
            if not math.isfinite(loss):
                raise LossError(
                    f"the loss of micro-batch {i} is {loss} in step {self.steps}; no update was "
                    "made on this rank. Look at the data of this step, or lower the learning rate"
                )
        (own,) = self.optimizers
        assert own.by_stage is not None
        factor = self.first / (self.window + self.state.batch.samples)
        return own.by_stage.step_async(stage, factor)

    @contextmanager
    def _stepping(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(explained(self))
            for own in self.optimizers:
                stack.enter_context(own.allowed())
            yield

    def zero_grad(self) -> None:
        """Forget all gradients; all ranks must call it."""
        self._clear_gradients()
        self.complete, self.unstepped, self.window = False, [], 0

    def _clear_gradients(self) -> None:
        for own in self.optimizers:
            own.optimizer.zero_grad(set_to_none=True)
        self.weights.clear_gradients()

    # --- asynchronous training ------------------------------------------------------------------

    def flush(self) -> Step | None:
        """Finish what `Trainer.step` left in flight with schedule "2bw", and make its update; all
        ranks must call it. The next batch uses the weights before the newest, as without it.

        All that needs the model as it is, such as `predict` and `save`, does it first. None if
        nothing is in flight, as always with other schedules.
        """
        if self.async_pipeline is None:
            return None
        with self._stepping():
            return self.async_pipeline.flush()

    def step_async(self, inputs: Any, targets: Any) -> Step:
        """With schedule "2bw": the next batch, as far as it gets; the update of the one before."""
        assert self.async_pipeline is not None
        with self._stepping():
            return self.async_pipeline.step(inputs, targets)

    # --- checkpoints ----------------------------------------------------------------------------

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if self.async_pipeline is not None:
            self.async_pipeline.resume({})

    load_state_dict.__doc__ = DistributedModel.load_state_dict.__doc__

    def save(self, path: str | Path, *, extra: Any = None, keep: int = 0) -> Path:
        """Write a checkpoint of all that training goes on from; all ranks must call it.

        It appears at `path` in one move, when it is complete; what has the name already is
        replaced. `extra` is what you need besides, of numbers, texts, lists, dicts, tensors and
        arrays (rank 0's is saved): where the data is, say. `keep=3` leaves the newest three of
        `step-100`, `step-200`, ... All ranks must see the same folder.

        It may be called between any two steps, also while several batches make one update.
        """
        from gems.torch.checkpoint import (
            save_load as checkpoint,  # loads DCP, for which those who do not save need not wait
        )

        _begin_checkpoint(self, "save")
        with self.weights.unsharded():
            return checkpoint.save(self, path, extra, keep)

    def load(self, path: str | Path, *, strict: bool = True) -> Any:
        """Go on from a checkpoint, saved under this or any other plan; gives its `extra`.

        All ranks must call it. Under the same plan training goes on bit for bit. Options of the
        optimizer, the seed and random generators become the checkpoint's. One that is damaged, of
        another model, optimizer or scheduler is rejected on all ranks, and nothing was changed
        then; `strict=False` takes the weights that fit, and starts training afresh where optimizer
        or scheduler do not. Nothing in the file can run code.
        """
        from gems.torch.checkpoint import save_load as checkpoint

        if self.int8 is not None:
            return _load_rounded(self, Path(path))
        _begin_checkpoint(self, "load")
        with self.weights.unsharded():
            return checkpoint.load(self, path, strict)


def _begin_checkpoint(session: Session, call: str) -> None:
    session.reject_unusable()
    if session.complete:
        raise GemsError(f"{call}: gradients wait for optimizer_step(); call it, or zero_grad()")
    session._meet(call)


def _load_rounded(session: Session, path: Path) -> Any:
    """The weights of a checkpoint, of which int8 ones are rounded as a whole."""
    from gems.torch.checkpoint import save_load as checkpoint

    session.load_state_dict(checkpoint.weights_in(path))
    return checkpoint.extra_in(path)


def _reject_batch(session: Session) -> None:
    """Raise unless a batch may begin."""
    if session.loss is None:
        raise GemsError("this session has no loss; it can only predict")
    if session.async_pipeline is not None:
        raise PlanError(
            "schedule '2bw' takes optimizer steps inside of its windows, not after a batch; "
            "use gems.Trainer, or another schedule"
        )
    if session.complete:
        raise GemsError(
            "the gradients of the last batch are complete, and others cannot be added to them; "
            "call optimizer_step() or zero_grad() on all ranks, or forward_backward(..., "
            "update=False) for all batches but the last"
        )
    if session.plan.residency[0].eager and not session.optimizers:
        raise GemsError("optimizer_step='eager' needs an optimizer first; call add_optimizer")


class LossSum:
    """The batch's loss, the gradient's norm, whether a rank was told to stop: each rank has a part
    of them, and the sum is begun when this rank's are there. The one place of a step where the host
    waits for a GPU."""

    def __init__(self, session: Session, update: bool) -> None:
        self.session = session
        self.wants_norm = update and session.weights.needs_norm
        self.work: Work | None = None

    @property
    def early(self) -> bool:
        """Whether it may begin before gradients are reduced: nothing of it is of gradients, the
        host need not wait for a GPU, and on all ranks the same collectives came before."""
        session, plan = self.session, self.session.plan
        groups = [plan.replica_groups[s] for s in range(plan.depth) if not overlaps(plan, s)]
        apart = plan.depth == 1 or all(len(ranks) < session.transport.world for ranks in groups)
        return apart and not self.wants_norm and session.device.type == "cpu"

    def begin(self) -> None:
        session, state = self.session, self.session.state
        squares = session.weights.square_norms() if self.wants_norm else []
        losses = state.read_losses()  # begun after the last forward
        others = Reading([*(value for _, value in state.penalties), *squares]).values()
        stop = session.interrupt is not None and session.interrupt.wanted
        count = len(state.penalties)
        loss = session.runner.loss.of_step(state, losses.values(), others[:count])
        self.parts = torch.tensor([loss, sum(others[count:]), stop], dtype=torch.float64)
        world = tuple(range(session.transport.world))
        self.work = session.transport.all_reduce(self.parts, world)

    def finish(self) -> tuple[float, float, bool]:
        if self.work is None:
            self.begin()
        assert self.work is not None
        self.work.wait()
        loss, square, stops = self.parts.tolist()
        return loss, math.sqrt(square) if square >= 0 else math.nan, stops > 0
