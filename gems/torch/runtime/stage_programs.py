"""Record and partition the model for each input signature, and generate the code of its stages."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from gems.distributed.ownership import Ownership
from gems.hardware import Machine
from gems.plans.plan import Plan
from gems.torch.autograd.split_backward import WeightGradStore
from gems.torch.offload.stored_value import ValueStore
from gems.torch.runtime.activation_checkpoint import Recomputation
from gems.torch.runtime.codegen import Program, write
from gems.torch.runtime.compiled_calls import CompileOptions
from gems.torch.runtime.microbatch import describe, signature, stand_ins
from gems.torch.runtime.partitioned_model import PartitionedModel, partition_model
from gems.torch.runtime.sampleless_buffers import free_buffers
from gems.torch.runtime.stored_messages import StoredMessages
from gems.torch.runtime.streamed_loss import StreamedLoss
from gems.torch.runtime.streaming import Stream
from gems.torch.runtime.validate import reject_misplaced
from gems.torch.spatial.group import SpatialGroup
from gems.torch.spatial.patch_layout import StreamLayout
from gems.torch.spatial.tiled_stage import TiledStage
from gems.torch.state.ownership import reject_unordered
from gems.torch.tensors.memory_format import MemoryFormat
from gems.torch.tensors.rng import Draws
from gems.torch.tracing.calls import Record
from gems.torch.tracing.guards import Guards, Structure, apply_assigned
from gems.torch.tracing.recordings import Recordings
from gems.torch.tracing.trace import Trace, trace
from gems.transport.protocol import Transport

log = logging.getLogger(__name__)
AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
PRECISIONS = {**AUTOCAST, "int8": None}  # whose weights are computed when a layer runs


class StagePrograms:
    """The model of one rank as stages that can run, for each signature of inputs seen so far."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        owned: Ownership,
        unordered: set[int],
        *,
        device: torch.device,
        precision: str,
        memory_format: MemoryFormat,
        compiling: CompileOptions,
        seed: int,
        machine: Machine,
        transport: Transport,
        storages: Set[int],
        deferred: Set[int],
        leaves: tuple[str, ...] = (),
        values: ValueStore | None = None,
    ) -> None:
        """`storages` are those of this rank's weights; `deferred` the stages that compute weight
        gradients apart from input gradients; `values` has what streamed stages hand each other, if
        that is in a store."""
        self.model, self.plan, self.owned, self.unordered = model, plan, owned, unordered
        self.device, self.machine, self.transport = device, machine, transport
        self.storages, self.deferred, self.leaves = storages, deferred, leaves
        self.values = values
        self.stored_messages = None if values is None else StoredMessages(transport, values)
        self.precision, self.memory_format = precision, memory_format
        self.compiling, self.told = compiling, set[str]()
        self.draws = Draws(seed, device)
        self.weight_grads = WeightGradStore()
        self.recomputation = Recomputation()
        self.recordings: Recordings[PartitionedModel] = Recordings()
        self.structure = Structure(model)
        states = enumerate(plan.residency)
        self.sharded = {s for s, state in states if state.zero or state.weights_offload}

    def autocast(self) -> AbstractContextManager[Any]:
        dtype = PRECISIONS[self.precision]
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)

    # --- recordings ---------------------------------------------------------------------------

    def modes(self) -> int:
        """A hash of what else a recording depends on: which modules and parameters train."""
        return self.structure.mode()

    def remember(self, inputs: Any, traced: Trace) -> None:
        """Take a recording that was made already."""
        key = signature(inputs), self.modes()
        self.recordings.add(key, Guards(self.model, traced.record), self._partition(inputs, traced))

    def partition(self, inputs: Any, mode: int) -> PartitionedModel:
        """The model recorded on inputs of this signature and partitioned; cached while its guards
        hold."""
        key = signature(inputs), mode
        if (found := self.recordings.find(key)) is None:
            with self.autocast():
                given = self.memory_format.stand_ins(stand_ins(inputs))
                traced = trace(self.model, given, device=self.device, leaves=self.leaves)
            found = self._partition(inputs, traced)
            free = self.free_buffers(found)
            reject_unordered(self.model, traced, self.owned, self.unordered, free)
            self.recordings.add(key, Guards(self.model, traced.record), found)
        apply_assigned(self.model, found.trace.record)
        return found

    def _partition(self, inputs: Any, traced: Trace) -> PartitionedModel:
        found = partition_model(
            traced, self.plan, self.model, self.draws, self.machine, describe(inputs)
        )
        reject_misplaced(found, self.owned, self.sharded, self.unordered)
        return found

    def free_buffers(self, partitioned: PartitionedModel) -> set[str]:
        """The buffers that replicas can keep equal although each runs some of the samples."""
        if self.plan.asynchronous:
            return set()
        record = partitioned.trace.record
        if record.free is None:
            record.free = free_buffers(record, self.model)
        return record.free

    def norms(self, stage: int, partitioned: PartitionedModel) -> list[tuple[nn.Module, int]]:
        """The layers of a stage that have running statistics, with how often each is called."""
        uses = Counter(path for call in partitioned.calls(stage) for path in call.norms)
        return [(self.model.get_submodule(path), times) for path, times in uses.items()]

    # --- programs -----------------------------------------------------------------------------

    def bound(self, partitioned: PartitionedModel, stage: int, i: int) -> TiledStage | None:
        """A tiled stage as this rank runs it for a micro-batch; None if it is not tiled."""
        if stage not in partitioned.laid:
            return None
        group = self.plan.spatial_group_for(stage, i)
        return partitioned.bind(stage, group, self.transport.rank, self.transport)

    def program(self, partitioned: PartitionedModel, stage: int, i: int) -> Program | Stream:
        """The code of a stage, as this rank runs it for a micro-batch."""
        if stage in partitioned.streamed:
            return self.stream(partitioned, stage, i)
        bound = self.bound(partitioned, stage, i)
        key = (stage,) if bound is None else (stage, *self.plan.spatial_group_for(stage, i))
        if key not in partitioned.programs:
            partitioned.programs[key] = self._generate(partitioned, stage, bound)
        return partitioned.programs[key]

    def _generate(
        self, partitioned: PartitionedModel, stage: int, bound: TiledStage | None
    ) -> Program:
        calls = partitioned.calls(stage)
        run_of = partitioned.recomputed_runs(stage)
        program = write(
            partitioned.trace.record,
            self.model,
            calls,
            tuple(partitioned.sent(stage)),
            self.draws,
            self.weight_grads.deferral if stage in self.deferred else None,
            bound.runs if bound else None,
            (self.recomputation, run_of),
            bound if bound is not None and self.plan.activations[stage].partitioned else None,
            self.compiling,
        )
        self._tell(f"stage {stage}: {program.pieces}" if program.pieces else "")
        if twice := [n for c in calls if c.region is not None for n in c.norms]:
            log.info(
                "%s: running statistics inside torch.utils.checkpoint are updated once per "
                "micro-batch; plain PyTorch updates them again when it recomputes",
                ", ".join(dict.fromkeys(twice)),
            )
        if run_of or any(c.region is not None or c.norms not in ((), (c.module,)) for c in calls):
            norms = self.norms(stage, partitioned)
            partitioned.recomputed[stage] = [module for module, _ in norms]
        return program

    def _tell(self, text: str) -> None:
        """Log something once."""
        if text and text not in self.told:
            self.told.add(text)
            log.info("%s", text)

    def stream(self, partitioned: PartitionedModel, stage: int, i: int) -> Stream:
        """A stage that runs one patch after the other, those of this rank's tile."""
        key, group = self._group(partitioned, stage, i)
        if key not in partitioned.streams:
            if self.compiling.enabled:
                self._tell(f"stage {stage} runs by patches and is not compiled")
            partitioned.streams[key] = self._streamed(
                partitioned.trace.record, self.model, partitioned.sent(stage),
                partitioned.streamed[stage], group, partitioned,
            )  # fmt: skip
        return partitioned.streams[key]

    def stream_with_loss(self, partitioned: PartitionedModel, i: int, loss: StreamedLoss) -> Stream:
        """The last stage, with a loss that is computed patch by patch."""
        key, group = self._group(partitioned, self.plan.depth - 1, i)
        # Without a flush, losses are reported before their backwards.
        waits = not self.plan.asynchronous
        if key not in loss.streams:
            loss.streams[key] = self._streamed(
                loss.record, loss.model, [loss.value], loss.layout, group, partitioned, loss=waits
            )
        return loss.streams[key]

    def _group(
        self, partitioned: PartitionedModel, stage: int, i: int
    ) -> tuple[tuple[int, ...], SpatialGroup | None]:
        bound = self.bound(partitioned, stage, i)
        return ((stage,), None) if bound is None else ((stage, *bound.group.ranks), bound.group)

    def _streamed(
        self, record: Record, model: nn.Module, outputs: Sequence[str], layout: StreamLayout,
        group: SpatialGroup | None, partitioned: PartitionedModel, *, loss: bool = False,
    ) -> Stream:  # fmt: skip
        return Stream(
            record, model, outputs, layout, self.draws, device=self.device,
            memory_format=self.memory_format, weights=self.storages, around=self.autocast,
            group=group, store=self.values, stored=partitioned.stored,
            handed_on=partitioned.handed_on, loss=loss,
        )  # fmt: skip
