"""A Keras model under a plan, driven by the caller's own loop and optimizers."""

from __future__ import annotations

import math
from time import perf_counter
from typing import Any

from gems.distributed.consensus import attempt
from gems.distributed.step import Step
from gems.engine.executor import Engine
from gems.errors import GemsError, LossError
from gems.keras.distributed_model import BatchResult, DistributedModel
from gems.keras.state.rank_optimizer import RankOptimizer
from gems.transport.protocol import Done, Work


class Session(DistributedModel):
    """A Keras model under a plan, without a loop. Every rank makes one, with the same arguments,
    and all ranks must make the same calls.

        session = Session(model, "mse", sample, gems.Plan(stages=2, micro_batches=4))
        session.add_optimizer(keras.optimizers.Adam(1e-3))
        for images, targets in batches:
            session.forward_backward(images, targets)
            session.optimizer_step()

    model      any keras.Model on the TensorFlow backend, built or not, or built `lazily()`
    loss       as `compile` takes it; the compiled model's own if left out
    sample     inputs of one micro-batch, for their shapes: arrays, tensors or tf.TensorSpecs
    plan       a gems.Plan, a file of one, or "auto"
    memory     bytes per rank, e.g. "16GiB": a limit for "auto" plans, schedules and `recompute`
    costs      what blocks cost: "estimate", "measure", gems.Costs, or "auto", which measures for
               plan="auto"
    machine    what estimates and "auto" plans are for: a preset, a file of one, or a Machine
    schedule   an order of one's own, instead of the plan's
    backend    what ranks talk over; see gems.keras.launch
    timeout    seconds without a sign of life after which a rank is lost
    interrupt  signals to hear
    settings   of the caller's loop: compared among ranks for every batch
    """

    rank_optimizer: RankOptimizer

    def _prepare_training(self) -> None:
        transport, adapter = self.transport, self.part.adapter
        self.engine = Engine(self.plan, self.schedule, adapter, transport, self._step_stage)

    # --- a batch --------------------------------------------------------------------------------

    def forward_backward(
        self, inputs: Any, targets: Any = None, sample_weight: Any = None
    ) -> BatchResult:
        """Forward and backward of a whole batch, given to every rank."""
        self.reject_unusable()
        if self.loss is None:
            raise GemsError("this session has no loss; give it one, or compile the model with one")
        if self.complete:
            raise GemsError(
                "the gradients of the last batch are complete; call optimizer_step() or zero_grad()"
            )
        batch = self._begin("step", (inputs, targets, sample_weight), training=True, targets=True)
        self._run(self.engine)
        loss, interrupted = self._agree_on_loss()
        if not math.isfinite(loss):
            self.zero_grad()
            raise LossError(
                f"the loss is {loss} in step {self.steps}; no update was made, and all is as "
                "before the step. Look at the data of this step, lower the learning rate, or clip "
                "gradients"
            )
        self.state.finish(self.weights)
        self.steps += 1
        self.complete = True
        return BatchResult(loss, batch.samples, interrupted)

    # --- an optimizer step ----------------------------------------------------------------------

    def add_optimizer(self, optimizer: Any) -> Any:
        """Let the session step an optimizer of Keras, which was not built yet. On each rank it has
        the variables that this rank holds. All ranks must call it. Returns it."""
        self.reject_unusable()
        variables = self.part.trained()

        def add() -> str:
            own = RankOptimizer(optimizer, variables, self.weights, self.transport)
            self.rank_optimizer = own
            return own.settings

        told = attempt(self.transport, add)
        self.handshake.call("add_optimizer", **{"the optimizer": told[self.rank]})
        self.optimizers = [optimizer]
        self.weights.optimized_by(optimizer)
        return optimizer

    def optimizer_step(self) -> None:
        """Step the optimizer with the gradients of the last batch, and free them."""
        self.reject_unusable()
        if not self.complete or not self.optimizers:
            raise GemsError(
                "optimizer_step: there are no gradients or no optimizer; call add_optimizer once, "
                "and forward_backward before each step"
            )
        self.state.read = {}  # variables that are read elsewhere would be copied
        try:
            self.last = self.engine.finish(self.steps)
        except BaseException as error:  # some weights have made their step, and some have not
            self.failed = error
            raise
        self.zero_grad()

    def _step_stage(self, stage: int) -> tuple[int, Work]:
        """One call steps all stages of the rank."""
        if stage == self.weights.stages[-1]:
            self.rank_optimizer.step(self.gradients())
        return 0, Done()

    def gradients(self) -> dict[str, Any]:
        """Of this rank's variables, by path, while there are any. A variable that the loss does not
        depend on has none."""
        recording = next(iter(self.state.partitions.values())).recording
        return {
            path: self.weights.gradient(path)
            for path in recording.weights
            if path in self.weights.variables and path not in recording.unconnected
        }

    def zero_grad(self) -> None:
        """Forget all gradients."""
        self.weights.clear()
        self.complete = False

    def step(self, inputs: Any, targets: Any = None, sample_weight: Any = None) -> Step:
        """A batch and the optimizer step after it."""
        start = perf_counter()
        found = self.forward_backward(inputs, targets, sample_weight)
        self.optimizer_step()
        seconds = perf_counter() - start
        return Step(found.loss, found.samples, seconds, True, interrupted=found.interrupted)
