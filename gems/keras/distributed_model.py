"""A model whose stages are on the ranks of a plan: what it predicts, and its weights as a whole."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from gems import hardware
from gems.distributed.consensus import attempt
from gems.distributed.interrupt import Interrupt
from gems.distributed.usable import Usable
from gems.engine.executor import Engine
from gems.engine.measured import Measured
from gems.errors import GemsError, ShapeError
from gems.keras import fingerprint
from gems.keras.handshake import Handshake
from gems.keras.launch import connect
from gems.keras.planning import specs_of
from gems.keras.rank_model import RankModel
from gems.keras.runtime.microbatch import Batch, Form, describe
from gems.keras.runtime.microbatch_loss import MicrobatchLoss, compiled_loss
from gems.keras.runtime.step_state import StepState
from gems.keras.setup import Setup, Surroundings, set_up
from gems.model.costs import Costs
from gems.plans.plan import Plan
from gems.predict.simulate import simulate
from gems.predict.timeline import Timeline, merged
from gems.schedule.action import Schedule
from gems.transport.protocol import Transport


@dataclass(frozen=True)
class BatchResult:
    """What a batch gives, the same on every rank; `interrupted`: one was told to stop."""

    loss: float
    samples: int
    interrupted: bool = False


class DistributedModel(Usable):
    """The part of `Session` that needs no gradients. The arguments are Session's."""

    state: StepState  # of the last batch that began
    machine: hardware.Machine
    where: Surroundings
    setup: Setup
    plan: Plan
    costs: Costs
    schedule: Schedule
    loss: MicrobatchLoss | None
    part: RankModel

    def __init__(
        self,
        model: Any,
        loss: Any = None,
        sample: Any = None,
        plan: Plan | str | Path = "auto",
        *,
        loss_weights: Any = None,
        memory: str | float | None = None,
        costs: str | Costs = "auto",
        machine: str | Path | hardware.Machine = "cpu",
        schedule: Schedule | None = None,
        backend: str | None = None,
        transport: Transport | None = None,
        timeout: float | None = None,
        interrupt: Interrupt | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        given = transport is not None
        self.transport = transport if transport is not None else connect(backend, timeout)
        self.rank, self.model, self.interrupt = self.transport.rank, model, interrupt
        self.settings, self.optimizers = dict(settings or {}), []
        self.steps, self.closed, self.complete = 0, False, False
        self.failed: BaseException | None = None
        self.last: Measured | None = None

        try:
            self._prepare(loss, loss_weights, sample, plan, costs, schedule, machine, memory)
        except BaseException as error:
            if not given:
                self.transport.fail(error)
                self.transport.close()
            raise

    def _prepare(
        self,
        loss: Any,
        loss_weights: Any,
        sample: Any,
        plan: Plan | str | Path,
        costs: str | Costs,
        schedule: Schedule | None,
        machine: str | Path | hardware.Machine,
        memory: str | float | None,
    ) -> None:
        """What may fail on one rank alone is attempted apart from what all ranks do jointly."""
        specs = _specs(sample)
        form: Form = tuple((tuple(s.shape), s.dtype.name) for s in tf.nest.flatten(specs))

        def plan_stages() -> None:
            self.machine = _machine(machine)
            budget = None if memory is None else hardware.bytes_of(memory)
            self.where = Surroundings(self.transport, self.machine, budget)
            self.setup = found = set_up(self.model, specs, plan, costs, schedule, self.where)
            self.plan, self.costs, self.schedule = found.plan, found.costs, found.schedule
            compiled = compiled_loss(self.model, loss, loss_weights)
            self.loss = None if compiled is None else MicrobatchLoss(compiled)

        def build_stages() -> None:
            self.part = RankModel(self.model, self.loss, self.setup, self.where, form)

        attempt(self.transport, plan_stages)
        self.handshake = Handshake(self)
        same = fingerprint.of_graph(self.setup.recording.graph, self.model)
        self.handshake.start(same, describe(form))
        attempt(self.transport, build_stages)
        self.part.connect()
        self.weights = self.part.weights
        self._prepare_training()

    def _prepare_training(self) -> None:
        """What a session needs besides."""

    # --- a batch without gradients ----------------------------------------------------------

    def evaluate(self, inputs: Any, targets: Any = None, sample_weight: Any = None) -> BatchResult:
        """The loss of a whole batch in inference mode, given to every rank. Outputs are in
        `outputs` after that."""
        self.reject_unusable()
        targeted = self.loss is not None and targets is not None
        given = (inputs, targets, sample_weight)
        batch = self._begin("evaluate", given, training=False, targets=targeted)
        self._run(self.part.predictor(self.state))
        loss, interrupted = self._agree_on_loss()
        return BatchResult(loss if targeted else math.nan, batch.samples, interrupted)

    def predict(self, inputs: Any) -> Any:
        """The model's output in inference mode, for a whole batch, on every rank."""
        self.evaluate(inputs)
        told = {i: [np.asarray(x) for x in flat] for i, flat in self.state.outputs.items()}
        found = {i: x for mine in self.transport.all_gather_object(told) for i, x in mine.items()}
        recording = next(iter(self.state.partitions.values())).recording
        flat = [
            np.concatenate(parts) for parts in zip(*(found[i] for i in sorted(found)), strict=True)
        ]
        return tf.nest.pack_sequence_as(recording.structure, flat)

    @property
    def outputs(self) -> dict[int, Any]:
        """Of the last batch: the model's output for each micro-batch that this rank has run on the
        last stage."""
        parts, found = self.state.partitions, self.state.outputs
        return {
            i: tf.nest.pack_sequence_as(parts[i].recording.structure, flat)
            for i, flat in found.items()
        }

    def scored(self) -> list[tuple[Any, Any, Any]]:
        """Of the last batch: targets, outputs and sample weights of each micro-batch that this rank
        has run on the last stage."""
        batch = self.state.batch
        return [
            (batch.targets_of(i), output, batch.weights_of(i))
            for i, output in sorted(self.outputs.items())
        ]

    def output_form(self, inputs: Any) -> Any:
        """Shapes and types of the output for one micro-batch."""
        recording = self.part.recording
        flat = [
            keras.KerasTensor(tuple(t.shape), tf.as_dtype(t.dtype).name) for t in recording.outputs
        ]
        return tf.nest.pack_sequence_as(recording.structure, flat)

    @property
    def holds_all(self) -> bool:
        """Whether this rank has all variables of the model."""
        return self.part.owned.replica_groups.keys() <= self.weights.variables.keys()

    def first_here(self) -> set[str]:
        """The paths of the variables that this rank is the first to hold."""
        return {p for p, on in self.part.owned.replica_groups.items() if on[0] == self.rank}

    @property
    def extra_losses(self) -> int:
        """How many losses the model adds in training: of regularizers and of add_loss."""
        return len(self.part.recording.losses)

    def _begin(
        self, call: str, given: tuple[Any, Any, Any], *, training: bool, targets: bool
    ) -> Batch:
        """Get ready for a batch, and see that all ranks are about to run the same one."""

        def begin(batch: Batch) -> None:
            self.state = self.part.begin(batch, training=training, targets=targets)

        batch = self.handshake.batch(call, given, begin)
        self.part.connect_stages(self.state)
        return batch

    def _run(self, engine: Engine) -> None:
        try:
            self.last = engine.step(self.steps)
        except BaseException as error:
            self.weights.clear()
            self.failed = None if self.transport.world == 1 else error
            raise

    def _agree_on_loss(self) -> tuple[float, bool]:
        """The batch's loss, whether a rank was told to stop: each rank has a part of them."""
        mine = sum(share * float(value) for share, value in self.state.losses)
        stop = self.interrupt is not None and self.interrupt.wanted
        parts = np.array([mine, stop], np.float64)
        try:
            self.transport.all_reduce(parts, tuple(range(self.transport.world))).wait()
        except BaseException as error:
            self.failed = error
            raise
        return float(parts[0]), bool(parts[1])

    # --- weights --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, np.ndarray]:
        """All variables of the model by path, on every rank. All ranks must call it."""
        self.reject_unusable()
        self.handshake.call("state_dict")
        first = {path: ranks[0] for path, ranks in self.part.owned.replica_groups.items()}
        variables = self.weights.variables
        mine = {p: np.asarray(variables[p].value) for p in variables if first[p] == self.rank}
        told = self.transport.all_gather_object(mine)
        found = {path: value for part in told for path, value in part.items()}
        return {path: found[path] for path in first}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take values by path; each rank takes its part. All ranks must call it with the same."""
        self.reject_unusable()
        missing = set(self.part.owned.replica_groups) - set(state)
        if missing:
            raise ShapeError(f"the state has no values for {', '.join(sorted(missing)[:8])}")
        same = fingerprint.of_batch([state[path] for path in self.part.owned.replica_groups])
        self.handshake.call("load_state_dict", **{"state dict": f"#{same:x}"})
        for path, variable in self.weights.variables.items():
            variable.assign(state[path])

    # --- seconds and bytes ----------------------------------------------------------------------

    def forecast(self) -> Timeline:
        """What a step of this plan should take: seconds by the costs, and live bytes over time."""
        self.reject_unusable()
        return simulate(self.schedule, self.plan, self.costs, self.machine)

    def timeline(self) -> Timeline:
        """The last step as all ranks measured it. All ranks must call it."""
        if self.last is None:
            raise GemsError("nothing has run yet; call step first")
        self.reject_unusable()
        self.handshake.call("timeline")
        return merged(self.transport.all_gather_object(self.last.timeline))

    @property
    def peak(self) -> int:
        """Most live bytes of this rank in the last step or prediction."""
        return 0 if self.last is None else self.last.peak.total

    # --- the end --------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave the other ranks; those that still need this one raise PeerError."""
        if not self.closed:
            self.closed = True
            if (error := sys.exc_info()[1]) is not None:
                self.transport.fail(error)
            self.transport.close()


def _machine(given: str | Path | hardware.Machine) -> hardware.Machine:
    return given if isinstance(given, hardware.Machine) else hardware.machine(given)


def _specs(sample: Any) -> Any:
    if sample is None:
        raise ShapeError(
            "sample must have the shapes of one micro-batch of inputs, e.g. np.empty((1, 224, 224, "
            "3), 'float32')"
        )
    return specs_of(sample)
