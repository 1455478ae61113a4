"""Prepare one rank for a batch: the partitioned model for its shapes, losses and buffers."""

from __future__ import annotations

from typing import Any

from gems.errors import PlanError
from gems.torch.runtime.microbatch import Batch, signature
from gems.torch.runtime.microbatch_loss import MicrobatchLoss
from gems.torch.runtime.running_stats import Statistics
from gems.torch.runtime.sampleless_buffers import Advance
from gems.torch.runtime.stage_programs import StagePrograms
from gems.torch.runtime.stage_runner import StageRunner
from gems.torch.runtime.step_state import StepState
from gems.torch.runtime.streamed_loss import StreamedLoss
from gems.torch.runtime.streamed_loss import prepare as prepare_streamed
from gems.torch.runtime.tiled_loss import TiledLoss, prepare
from gems.torch.state.rank_weights import RankWeights, entry


def begin_step(
    runner: StageRunner,
    batch: Batch,
    step: int,
    *,
    training: bool,
    scale: float = 1.0,
    update: bool = True,
) -> StepState:
    """The state of a batch before its first action."""
    programs, weights = runner.programs, runner.weights
    if training:
        weights.begin(update=update)
    real = [i for i, size in enumerate(batch.sizes) if size]
    mode = programs.modes()
    programs.recordings.begin()
    state = StepState(
        batch,
        step,
        training,
        scale,
        update,
        {i: programs.partition(batch.inputs[i], mode) for i in real},
        {i: at for at, i in enumerate(real)},
    )
    if training:
        state.streamed_losses = _streamed_losses(programs, runner.loss, state)
        state.tiled_losses = _tiled_losses(programs, runner.loss, state)
    unordered = programs.unordered.intersection(weights.stages)
    state.advances = _advances(programs, state, unordered)
    plan = programs.plan
    for stage in unordered if training and real else ():
        # All ranks of a spatial group compute the same statistics, which are then summed.
        norms = programs.norms(stage, state.partitions[real[0]])
        state.statistics[stage] = Statistics(norms, len(real), 1 / plan.sizes[stage])
    # Otherwise when the first gradient arrives: earlier ones may still occupy the memory.
    if training and not (plan.residency[0].frees_gradients or plan.asynchronous):
        for stage in weights.stages:
            state.place_gradients(stage, weights)
    return state


def changed_buffers(state: StepState, weights: RankWeights) -> list[tuple[dict[str, Any], str]]:
    """The buffers of this rank that the forwards of a step change: the dict of each, its key."""
    partitions = {id(p): p for p in state.partitions.values()}.values()
    names = (name for p in partitions for stage in weights.stages for name in p.touches(stage))
    found = [entry(weights.model, name) for name in dict.fromkeys(names)]
    return [(own, key) for own, key in found if id(own[key]) not in weights.in_shards]


def _tiled_losses(
    programs: StagePrograms, loss: MicrobatchLoss, state: StepState
) -> dict[int, TiledLoss]:
    """The losses of tiled outputs. What has no exact one raises on all ranks, before any action."""
    found: dict[int, TiledLoss] = {}
    if loss.function is None:
        return found
    targets = state.batch.targets
    for i, partitioned in state.partitions.items():
        last = partitioned.laid.get(programs.plan.depth - 1)
        model = partitioned.trace.record
        if last is None or not any(n in last.layouts for n in model.outputs):
            continue
        if i in state.streamed_losses:
            continue
        alike = (
            found[j]
            for j in found
            if partitioned is state.partitions[j] and signature(targets[i]) == signature(targets[j])
        )
        if (known := next(alike, None)) is None:
            with programs.autocast():
                known = prepare(
                    loss.function, model, last, targets[i], programs.draws, partitioned.losses
                )
        found[i] = known
    return found


def _streamed_losses(
    programs: StagePrograms, loss: MicrobatchLoss, state: StepState
) -> dict[int, StreamedLoss]:
    """The losses that patches of the last stage compute, where there are such."""
    found: dict[int, StreamedLoss] = {}
    for i, partitioned in state.partitions.items():
        if loss.function is None or programs.plan.depth - 1 not in partitioned.streamed:
            continue
        with programs.autocast():
            one = prepare_streamed(
                loss.function, partitioned, programs.model, state.batch.targets[i],
                programs.draws, partitioned.streamed_losses,
            )  # fmt: skip
        if one is not None:
            found[i] = one
    return found


def _advances(programs: StagePrograms, state: StepState, unordered: set[int]) -> dict[int, Advance]:
    """For the stages of which this rank does not run all micro-batches in order."""
    found: dict[int, Advance] = {}
    partitions = list({id(p): p for p in state.partitions.values()}.values())
    for stage in unordered:
        made = [
            Advance(
                p.trace.record,
                programs.model,
                p.calls(stage),
                free,
                programs.draws,
                len(state.position),
            )
            for p in partitions
            if (free := programs.free_buffers(p))
        ]
        made = [advance for advance in made if advance.names]
        if not made:
            continue
        if len(made) != len(partitions) or any(m.names != made[0].names for m in made):
            raise PlanError(
                f"the micro-batches of a step change different buffers: {made[0].names}"
            )
        if not state.training:
            raise PlanError(
                f"forward changes {made[0].names} in evaluation mode, and stage {stage} is on "
                "several ranks; change buffers in training mode only (if self.training)"
            )
        found[stage] = made[0]
    return found
