"""All that belongs to one batch while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from gems.keras.runtime.microbatch import Batch
from gems.keras.runtime.partitioned_model import PartitionedModel
from gems.keras.runtime.running_stats import Sampleless, final, term
from gems.keras.state.grad_bucket import Form
from gems.keras.state.rank_weights import RankWeights, sum_of

Key = tuple[int, int]  # stage, micro-batch


@dataclass
class Saved:
    """What a forward leaves for its backward: saved tensors, or the inputs that it is recomputed
    from, with the state that it saw; on the last stage the gradients of the outputs."""

    tensors: dict[str, Any] = field(default_factory=dict)
    received: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    grad_ys: dict[str, Any] = field(default_factory=dict)


@dataclass
class StepState:
    """`current` is state as the samples so far have left it; variables get it when all is well, so
    that a step that fails has changed nothing."""

    batch: Batch
    training: bool
    partitions: dict[int, PartitionedModel]
    read: dict[str, Any]  # weights, as they are during the step
    current: dict[str, Any]
    sampleless: list[dict[str, Any]] = field(default_factory=list)
    targets: bool = False  # whether there is a loss
    saved: dict[Key, Saved] = field(default_factory=dict)
    losses: list[tuple[float, Any]] = field(default_factory=list)  # how much each counts
    outputs: dict[int, list[Any]] = field(default_factory=dict)
    activation_bytes: dict[Key, int] = field(default_factory=dict)
    temporary_bytes: dict[Key, int] = field(default_factory=dict)

    @property
    def position(self) -> dict[int, int]:
        """Of each micro-batch that has samples, in their order."""
        return {i: at for at, i in enumerate(self.partitions)}

    def share(self, i: int) -> float:
        return self.batch.sizes[i] / self.batch.samples

    def state_for(self, stage: int, i: int) -> dict[str, Any]:
        """State as plain Keras has it when this micro-batch comes; of running averages that several
        ranks update, nothing: they are sums."""
        part = self.partitions[i]
        sums = part.slopes.get(stage, {})
        known = self.sampleless[self.position[i]] if self.sampleless else {}
        found = {}
        for path in part.programs[stage].state:
            value = known.get(path, self.current[path])
            found[path] = value * 0 if path in sums and self.training else value
        return found

    def update(self, stage: int, i: int, found: Mapping[str, Any], weights: RankWeights) -> None:
        """Take what a forward has made of the state."""
        part, later = self.partitions[i], len(self.partitions) - 1 - self.position[i]
        sums = part.slopes.get(stage, {})
        for path in part.programs[stage].updates:
            new = found[f"u:{path}"]
            if path in sums:
                part_of_sum = term(sums[path], new, later) / part.tiles(stage)
                weights.buckets[stage].add(sum_of(path), part_of_sum)
            else:
                self.current[path] = new

    def finish(self, weights: RankWeights) -> None:
        """All micro-batches have run, and sums are reduced."""
        count = len(self.partitions)
        first = next(iter(self.partitions.values()))
        for stage, sums in first.slopes.items():
            for path, slope in sums.items():
                total = weights.buckets[stage].tensor(sum_of(path))
                self.current[path] = final(slope, self.current[path], total, count)
        changed = {path for p in self.partitions.values() for path in p.recording.updates}
        last = self.sampleless[-1] if self.sampleless else {}
        for path, variable in weights.variables.items():
            if path in changed:
                variable.assign(last.get(path, self.current[path]))


def sums_of(partitions: Mapping[int, PartitionedModel]) -> dict[int, dict[str, Form]]:
    """The running statistics that are summed, by stage."""
    first = next(iter(partitions.values()))
    return {
        stage: {path: (tuple(first.recording.state[path].shape), "float64") for path in sums}
        for stage, sums in first.slopes.items()
    }


def begin_step(
    batch: Batch,
    partitions: dict[int, PartitionedModel],
    weights: RankWeights,
    sampleless: Sampleless | None,
    *,
    training: bool,
    targets: bool,
) -> StepState:
    """The state of a batch before its first action."""
    recording = next(iter(partitions.values())).recording
    values = {path: tf.convert_to_tensor(v.value) for path, v in weights.variables.items()}
    state = StepState(
        batch,
        training,
        partitions,
        {path: values[path] for path in recording.weights if path in values},
        {path: values[path] for path in recording.state if path in values},
        targets=targets,
    )
    if training:
        weights.begin(recording.weights, sums_of(partitions))
        if sampleless is not None:
            state.sampleless = sampleless.states(values, len(partitions))
    return state
