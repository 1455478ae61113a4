"""All that belongs to one batch in flight: its samples, saved activations, losses and buckets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gems.schedule.lower.reduce import overlaps, takes_over
from gems.torch.autograd.saved_tensors import Saved
from gems.torch.autograd.split_backward import Entry
from gems.torch.offload.activations import OffloadedTensors
from gems.torch.runtime.microbatch import Batch
from gems.torch.runtime.partitioned_model import PartitionedModel
from gems.torch.runtime.running_stats import Statistics
from gems.torch.runtime.sampleless_buffers import Advance
from gems.torch.runtime.streamed_loss import StreamedLoss
from gems.torch.runtime.streaming import InStore
from gems.torch.runtime.tiled_loss import TiledLoss
from gems.torch.state.grad_bucket import GradBucket
from gems.torch.state.rank_weights import RankWeights
from gems.torch.tensors.reading import Reading

Tensor = torch.Tensor


@dataclass
class SavedMicrobatch:
    """What one micro-batch saves on one stage between forward and backward."""

    deferred: list[Entry] | None  # weight gradients left to a later action
    offloaded: OffloadedTensors | None = None  # until backward
    edges: dict[str, Any] = field(default_factory=dict)  # value -> where its gradient enters
    loss: Tensor | None = None
    gradients: dict[str, Tensor] = field(default_factory=dict)  # of received values, by backward
    wants: tuple[str, ...] = ()  # the received values that need a gradient
    received: dict[str, Saved] = field(default_factory=dict)  # to recompute
    in_store: InStore | None = None  # of a streamed stage
    token: Any = None  # where backward through it enters if gradients are in a store
    before: Sequence[Tensor] = ()  # buffers that forward changes, before it did

    @property
    def known_losses(self) -> tuple[Tensor, ...]:
        """The loss, unless there is none here, or backward computes it."""
        late = self.in_store is not None and self.in_store.late
        return () if self.loss is None or late else (self.loss.detach(),)


@dataclass
class StepState:
    """One batch in flight on one rank. `scale` multiplies its loss; `update`: its gradients
    complete an accumulation, so that they are reduced and an optimizer step follows."""

    batch: Batch
    step: int
    training: bool
    scale: float = 1.0
    update: bool = True
    partitions: dict[int, PartitionedModel] = field(default_factory=dict)  # by micro-batch
    position: dict[int, int] = field(default_factory=dict)  # among micro-batches that have samples
    tiled_losses: dict[int, TiledLoss] = field(default_factory=dict)
    streamed_losses: dict[int, StreamedLoss] = field(default_factory=dict)
    advances: dict[int, Advance] = field(default_factory=dict)  # by stage
    statistics: dict[int, Statistics] = field(default_factory=dict)  # by stage
    buckets: dict[int, GradBucket] = field(default_factory=dict)  # by stage
    tied: dict[int, dict[str, Tensor]] = field(default_factory=dict)  # gradients, being reduced
    saved: dict[tuple[int, int], SavedMicrobatch] = field(default_factory=dict)
    activation_bytes: dict[tuple[int, int], int] = field(default_factory=dict)
    temporary_bytes: dict[tuple[int, int], int] = field(default_factory=dict)
    losses: list[tuple[int, Tensor]] = field(default_factory=list)
    penalties: list[tuple[float, Tensor]] = field(default_factory=list)  # on weights, with a share
    reading: Reading | None = None  # of the losses
    outputs: dict[int, Any] = field(default_factory=dict)  # of a prediction, by micro-batch

    def streamed_targets(self, i: int) -> dict[str, Any]:
        """The targets of a micro-batch that patches of the last stage read, by name."""
        loss = self.streamed_losses.get(i)
        return {} if loss is None else loss.given(self.batch.targets[i])

    def read_losses(self) -> Reading:
        """Begin to read the losses so far, unless that was begun."""
        if self.reading is None or self.reading.count != len(self.losses):
            self.reading = Reading([loss for _, loss in self.losses])
        return self.reading

    def place_gradients(self, stage: int, weights: RankWeights) -> None:
        """Allocate the bucket of a stage's gradients that will be all-reduced, if it has none."""
        if stage in self.buckets or len(weights.plan.replica_groups[stage]) == 1:
            return
        shard = weights.shards.get(stage) if self.update else None
        self.buckets[stage] = GradBucket(
            weights.parameters(stage) if self.update else [],
            self.statistics[stage].sums if stage in self.statistics else [],
            shard.allocate_grads() if shard else None,
            chunked=overlaps(weights.plan, stage),
            late=takes_over(weights.plan, stage),
            memory=weights.bucket_memory.get(stage),
        )

    def finish_reduction(self, stage: int, weights: RankWeights) -> None:
        """Gradients and statistics of a stage are summed over its replica group."""
        if stage in self.buckets:
            sums = self.buckets.pop(stage).unpack()
            if stage in self.statistics:
                self.statistics[stage].finish(sums)
        if self.update and stage in weights.shards:
            weights.shards[stage].take_reduced_grads(norm=weights.needs_norm)

    def finish_running_stats(self, weights: RankWeights) -> None:
        """Finish statistics of stages that this rank holds alone but saw out of order, and
        buffers that every replica changes by itself."""
        for stage, advance in self.advances.items():
            shard = weights.shards.get(stage)
            if not advance.states and shard is not None and shard.has_host_copy:
                for handle in shard.unshard():  # its replica ran no sample in this step
                    handle.wait()
                advance.prepare()
                weights.reshard(stage)
            advance.finish()
        for stage, statistics in self.statistics.items():
            if len(weights.plan.replica_groups[stage]) == 1:
                statistics.finish(statistics.sums)
