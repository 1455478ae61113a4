"""The loss of one micro-batch on the last stage, and its weight in the loss of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

from gems.errors import ShapeError
from gems.plans.plan import Plan
from gems.torch.runtime.loss_parameters import Leaves
from gems.torch.runtime.microbatch import read_box, tensors
from gems.torch.runtime.regularizer import Penalty
from gems.torch.runtime.step_state import SavedMicrobatch, StepState
from gems.torch.spatial.tiled_stage import TiledStage
from gems.torch.tensors.rng import Draws
from gems.torch.tracing.calls import Ref, is_placeholder

Tensor = torch.Tensor
Loss = Callable[[Any, Any], Tensor]


class MicrobatchLoss:
    """The user's loss, or none for a session that only predicts, and the penalty on weights."""

    def __init__(
        self,
        function: Loss | None,
        plan: Plan,
        draws: Draws,
        device: torch.device,
        leaves: Leaves,
        penalty: Penalty | None = None,
    ) -> None:
        self.function, self.plan, self.draws, self.device = function, plan, draws, device
        self.leaves, self.penalty = leaves, penalty

    def finish_forward(
        self,
        state: StepState,
        i: int,
        results: dict[str, Tensor],
        saved: SavedMicrobatch,
        bound: TiledStage | None,
    ) -> None:
        """The last stage is done: the model's output, hence the loss or the prediction."""
        if state.training and i in state.streamed_losses:  # patches have computed it
            saved.loss = results[state.streamed_losses[i].value]
            return
        record = state.partitions[i].trace.record

        def put(x: Any) -> Any:
            return results[x.name] if isinstance(x, Ref) else x

        output = pytree.tree_map(put, record.output, is_leaf=is_placeholder)
        if not state.training or self.function is None:
            state.outputs[i] = output
            return
        loss = self.leaves.run(
            lambda: self._loss(state, i, output, bound),
            [results[name] for name in record.outputs],
            tensors((state.batch.inputs[i], state.batch.targets[i])),
        )
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ShapeError(f"loss must give one number, the mean over a micro-batch; got {shape}")
        saved.loss = loss

    def _loss(self, state: StepState, i: int, output: Any, bound: TiledStage | None) -> Any:
        assert self.function is not None
        target = state.batch.targets[i]
        if bound is not None and i in state.tiled_losses:
            return state.tiled_losses[i].run(bound, output, target, self.draws)
        return self.function(output, pytree.tree_map(self._to_device, target))

    def _to_device(self, x: Any) -> Any:
        x = read_box(x, None)
        return x.to(self.device, non_blocking=True) if isinstance(x, Tensor) else x

    def _weighted(self, value: float, state: StepState, stage: int, i: int) -> float:
        """A value times a micro-batch's share of the batch, divided among the ranks of its spatial
        group: each of them computes the loss, and their gradients are summed."""
        samples = value * state.batch.sizes[i] / state.batch.samples
        return samples / len(self.plan.spatial_group_for(stage, i))

    def seed(self, state: StepState, stage: int, i: int, saved: SavedMicrobatch) -> list[Any]:
        """Where backward starts besides received gradients: pairs of gradient edge and gradient,
        of the loss and of the stage's share of the penalty."""
        found: list[Any] = []
        if saved.loss is not None and saved.loss.requires_grad:
            weight = self._weighted(state.scale, state, self.plan.depth - 1, i)
            edge = get_gradient_edge(saved.loss)
            found.append((edge, torch.full_like(saved.loss, weight)))
        if self.penalty is not None:
            share = self._weighted(1.0, state, stage, i)
            value, root = self.penalty.of(stage)
            state.penalties += [] if value is None else [(share, value)]
            if root is not None:
                found.append((root[0], root[1] * (state.scale * share)))
        return found

    def of_step(
        self, state: StepState, losses: Sequence[float], penalties: Sequence[float] = ()
    ) -> float:
        """This rank's share of the step's loss, given the values of the state's."""
        last = self.plan.depth - 1
        found = sorted((i, value) for (i, _), value in zip(state.losses, losses, strict=True))
        shares = zip(state.penalties, penalties, strict=True)
        return sum(value * share for (share, _), value in shares) + sum(
            self._weighted(value, state, last, i) for i, value in found
        )
