"""The part of a model that one rank holds and runs under a plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import tensorflow as tf

from gems.distributed.links import exchanges_inside_stages, links_between_stages
from gems.distributed.ownership import ownership, unordered
from gems.engine.executor import Engine
from gems.keras.runtime.adapter import KerasAdapter
from gems.keras.runtime.microbatch import Batch, Form
from gems.keras.runtime.microbatch_loss import MicrobatchLoss
from gems.keras.runtime.partitioned_model import PartitionedModel
from gems.keras.runtime.running_stats import Sampleless
from gems.keras.runtime.stage_programs import StagePrograms
from gems.keras.runtime.stage_runner import StageRunner
from gems.keras.runtime.step_state import StepState, begin_step
from gems.keras.setup import Setup, Surroundings
from gems.keras.state.deferred_init import initialize
from gems.keras.state.rank_weights import RankWeights
from gems.keras.state.replicate import replicate
from gems.keras.weight_files import named_variables
from gems.schedule.lower.passes import forward_only
from gems.transport.protocol import Link


class RankModel:
    """Weights in place, the same on all ranks that hold them, and what runs its stages."""

    def __init__(
        self,
        model: Any,
        loss: MicrobatchLoss | None,
        found: Setup,
        where: Surroundings,
        form: Form,
    ) -> None:
        self.plan, self.schedule, self.loss = found.plan, found.schedule, loss
        self.transport, self.recording = where.transport, found.recording
        self.owned = ownership(found.recording.graph, found.stage_of, found.plan)
        rank = where.transport.rank
        several = unordered(found.plan, found.schedule)
        self.weights = RankWeights(named_variables(model), found.plan, self.owned, rank)
        initialize(self.weights.variables.values())
        self.programs = StagePrograms(
            model,
            found.recording,
            found.stage_of,
            found.plan,
            self.owned,
            several,
            where.transport,
            form,
        )
        self.links: set[Link] = set()  # that are set up
        self.adapter = KerasAdapter(StageRunner(found.plan, self.weights, loss))
        self.sampleless: dict[int, Sampleless] = {}
        self.predictors: dict[int, Engine] = {}

    def connect(self) -> None:
        """Set up groups, and replicate initial values. All ranks call it, once each of them has
        its part."""
        groups = {*self.plan.replica_groups}
        groups |= {self.owned.replica_groups[path] for path in self.owned.tied()}
        self.transport.prepare(sorted(groups), [], exchanges_inside_stages(self.plan))
        replicate(self.weights.variables, self.owned.replica_groups, self.transport)

    def trained(self) -> list[str]:
        """The paths of the weights that this rank's optimizer steps."""
        return [path for path in self.recording.weights if path in self.weights.variables]

    def begin(self, batch: Batch, *, training: bool, targets: bool) -> StepState:
        """The state of a batch before its first action."""
        partitions = self.programs.partition(batch, training=training)
        first = next(iter(partitions.values()))
        if targets and self.loss is not None:
            flat = [tf.zeros(t.shape, t.dtype) for t in first.recording.outputs]
            outputs = tf.nest.pack_sequence_as(first.recording.structure, flat)
            self.loss.build(batch, next(iter(partitions)), outputs)
        known = None
        if training:
            known = self.sampleless.get(id(first))
            if known is None:
                known = self.sampleless[id(first)] = Sampleless(first, self.weights.variables)
        self.adapter.state = begin_step(
            batch, partitions, self.weights, known, training=training, targets=targets
        )
        return self.adapter.state

    def connect_stages(self, state: StepState) -> None:
        """Set up the links of ranks that send each other messages if the model is partitioned like
        this. All ranks call it, once they know that they have the same."""
        new: set[Link] = set()
        for part in state.partitions.values():
            if part.links is None:
                schedule = self.schedule if state.training else self._predicting(part)
                part.links = links_between_stages(part.message_transfers, self.plan, [schedule])
            new |= part.links - self.links
        if new:
            self.transport.prepare([], sorted(new))
            self.links |= new

    def predictor(self, state: StepState) -> Engine:
        """Runs forward only."""
        first = next(iter(state.partitions.values()))
        if id(first) not in self.predictors:
            schedule, plan = self._predicting(first), _with_edges(self.plan, first)
            engine = Engine(plan, schedule, self.adapter, self.transport)
            self.predictors[id(first)] = engine
        return self.predictors[id(first)]

    def _predicting(self, part: PartitionedModel) -> Any:
        return forward_only(_with_edges(self.plan, part))


def _with_edges(plan: Any, part: PartitionedModel) -> Any:
    """In inference mode stages may send each other other things."""
    return replace(plan, edges=tuple(part.crossing))
