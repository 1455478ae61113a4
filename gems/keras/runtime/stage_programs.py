"""The recordings of a model, one for each form of its inputs and each state of its layers, and the
programs that this rank makes of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import tensorflow as tf

from gems.distributed.ownership import Ownership, ownership
from gems.errors import PlanError, TraceError
from gems.keras.runtime.microbatch import Batch, Form, describe
from gems.keras.runtime.partitioned_model import PartitionedModel, same_stages
from gems.keras.tracing.record import Recording
from gems.keras.tracing.trace import trace
from gems.keras.weight_files import named_variables
from gems.plans.plan import Plan
from gems.transport.protocol import Transport

Trainable = tuple[bool, ...]  # of each layer


class StagePrograms:
    """Records anew what was not recorded yet: another form of inputs, prediction, or layers whose
    `trainable` has changed. Stages stay what they are."""

    def __init__(
        self,
        model: Any,
        recording: Recording,
        stage_of: Sequence[int],
        plan: Plan,
        owned: Ownership,
        unordered: Collection[int],
        transport: Transport,
        form: Form,
    ) -> None:
        self.model, self.recording, self.stage_of = model, recording, stage_of
        self.plan, self.owned, self.unordered = plan, owned, unordered
        self.transport = transport
        self.identity = list(map(id, named_variables(model).values()))
        self.known: dict[tuple[Form, bool, Trainable], PartitionedModel] = {}
        part = self._partitioned(recording, stage_of)
        self.known[form, True, self.trainable] = part

    @property
    def trainable(self) -> Trainable:
        return tuple(layer.trainable for layer in self.model._flatten_layers())

    def partition(self, batch: Batch, *, training: bool) -> dict[int, PartitionedModel]:
        """By micro-batch, but for those without samples."""
        self._reject_other_variables()
        trainable = self.trainable
        found = {}
        for i, count in enumerate(batch.sizes):
            if count:
                key = (batch.form(i), training, trainable)
                if key not in self.known:
                    self.known[key] = self._record(batch, i, training)
                found[i] = self.known[key]
        return found

    def _record(self, batch: Batch, i: int, training: bool) -> PartitionedModel:
        form = batch.form(i)
        specs = [tf.TensorSpec(shape, name) for shape, name in form]
        nested = tf.nest.pack_sequence_as(batch.structure, specs)
        try:
            found = trace(self.model, nested, training=training)
        except (TraceError, PlanError):
            raise
        except Exception as error:
            raise TraceError(f"the model does not take inputs {describe(form)}: {error}") from error
        stage_of = same_stages(self.recording.graph, self.stage_of, found.graph)
        owned = ownership(found.graph, stage_of, self.plan)
        for path, ranks in owned.replica_groups.items():
            missing = set(ranks) - set(self.owned.replica_groups[path])
            used = any(path in (*b.parameters, *b.buffers) for b in found.graph.blocks)
            if used and missing:
                raise PlanError(
                    f"{path} is used on ranks {ranks} for inputs {describe(form)}, and is on ranks "
                    f"{self.owned.replica_groups[path]}; make a session for these inputs"
                )
        return self._partitioned(found, stage_of)

    def _partitioned(self, recording: Recording, stage_of: Sequence[int]) -> PartitionedModel:
        return PartitionedModel(
            recording, stage_of, self.plan, self.owned, self.unordered, self.transport
        )

    def _reject_other_variables(self) -> None:
        if list(map(id, named_variables(self.model).values())) != self.identity:
            raise TraceError(
                "the model has other variables than when it was recorded: a layer was built anew, "
                "added or removed; make another session"
            )
