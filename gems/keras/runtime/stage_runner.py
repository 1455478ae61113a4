"""Run the stages of one rank: forward, recomputation, backward whole or in halves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from gems.keras.arrays import size
from gems.keras.runtime.microbatch_loss import MicrobatchLoss
from gems.keras.runtime.step_state import Saved, StepState
from gems.keras.spatial.tiled_stage import TiledStage
from gems.keras.state.rank_weights import RankWeights
from gems.keras.tracing.stage_program import StageProgram
from gems.plans.plan import Plan

Tensors = dict[str, Any]
Program = StageProgram | TiledStage


class StageRunner:
    """It keeps nothing between batches: what belongs to one is in its StepState."""

    def __init__(self, plan: Plan, weights: RankWeights, loss: MicrobatchLoss | None) -> None:
        self.plan, self.weights, self.loss = plan, weights, loss

    def forward(self, state: StepState, stage: int, i: int, received: Tensors) -> Tensors:
        """The stage's outputs, by name."""
        program = state.partitions[i].programs[stage]
        seen, saved = state.state_for(stage, i), Saved()
        again = self.plan.recomputes(stage, i)
        run = program.forward if state.training and not again else program.plain
        found = run(_inputs(state, program, i, received, seen))
        if state.training:
            state.update(stage, i, found, self.weights)
            share = state.share(i) / state.partitions[i].tiles(stage)
            state.losses += [(share, found[name]) for name in program.losses]
            if again:
                saved.received, saved.state = received, seen
            self._keep(state, stage, i, saved, found, again)
        outputs = {name: found[name] for name in program.outputs}
        if stage == self.plan.depth - 1:
            self._arrive(state, i, outputs, saved)
        return outputs

    def _keep(
        self, state: StepState, stage: int, i: int, saved: Saved, found: Tensors, again: bool
    ) -> None:
        program = state.partitions[i].programs[stage]
        saved.tensors = {name: found[name] for name in program.saved if name in found}
        bytes_ = sum(map(size, saved.received.values())) if again else program.saved_bytes
        state.saved[stage, i] = saved
        state.activation_bytes[stage, i] = bytes_

    def _arrive(self, state: StepState, i: int, outputs: Tensors, saved: Saved) -> None:
        """The outputs of the model: the loss, and where backward starts from."""
        part, last = state.partitions[i], self.plan.depth - 1
        recording = part.recording
        flat = [outputs[t.name] for t in recording.outputs]
        if part.first_tile(last):
            state.outputs[i] = flat
        if not state.targets:
            return
        assert self.loss is not None
        nested = tf.nest.pack_sequence_as(recording.structure, flat)
        targets, weights = state.batch.targets_of(i), state.batch.weights_of(i)
        value, gradients = self.loss(nested, targets, weights)
        share = self.loss.share(state.batch, i) / part.tiles(last)
        state.losses.append((share, value))
        if state.training:
            for t, g in zip(recording.outputs, gradients, strict=True):
                _add(saved.grad_ys, f"y:{t.name}", g * tf.constant(share, g.dtype))

    def recompute(self, state: StepState, stage: int, i: int) -> None:
        program, saved = state.partitions[i].programs[stage], state.saved[stage, i]
        found = program.forward(_inputs(state, program, i, saved.received, saved.state))
        saved.received, saved.state = {}, {}
        self._keep(state, stage, i, saved, found, again=False)

    def backward(
        self,
        state: StepState,
        stage: int,
        i: int,
        gradients: Sequence[Tensors],
        *,
        whole: bool,
    ) -> Tensors:
        """Gradients of the inputs that want one, by name."""
        program, saved = state.partitions[i].programs[stage], state.saved[stage, i]
        ys = dict(saved.grad_ys)
        for part in gradients:
            for name, g in part.items():
                _add(ys, f"y:{name}", g)
        share = state.share(i) / state.partitions[i].tiles(stage)
        for name, t in program.grad_ys.items():
            if name[2:] in program.losses:
                ys[name] = tf.constant(share, t.dtype)
            elif name not in ys:
                ys[name] = tf.zeros(t.shape, t.dtype)
        at = saved.tensors | ys | _weights(state, program)
        found = (program.backward if whole else program.first)(at)
        self._accumulate(stage, found)
        state.temporary_bytes[stage, i] = program.temporary_bytes
        if whole:
            del state.saved[stage, i]
        else:
            late = program.second.feeds
            saved.tensors = {n: t for n, t in (at | found).items() if n in late and n[:2] != "w:"}
            saved.grad_ys = {}
        return {name: found[f"d:{name}"] for name in program.wants}

    def weight_gradients(self, state: StepState, stage: int, i: int) -> None:
        """The deferred half."""
        program, saved = state.partitions[i].programs[stage], state.saved.pop((stage, i))
        self._accumulate(stage, program.second(saved.tensors | _weights(state, program)))

    def _accumulate(self, stage: int, found: Mapping[str, Any]) -> None:
        for name, g in found.items():
            if name.startswith("g:"):
                self.weights.add(stage, name[2:], g)


def _inputs(
    state: StepState, program: Program, i: int, received: Tensors, seen: Tensors
) -> Tensors:
    names = program.recording.graph.inputs
    found = {
        name: state.batch.input(names.index(name), i) if name in names else received[name]
        for name in program.inputs
    }
    return found | _weights(state, program) | {f"s:{path}": x for path, x in seen.items()}


def _weights(state: StepState, program: Program) -> Tensors:
    return {f"w:{path}": state.read[path] for path in program.weights}


def _add(found: Tensors, name: str, more: Any) -> None:
    found[name] = found[name] + more if name in found else more
