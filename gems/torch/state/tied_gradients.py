"""Gradients of weights that several stages use, which are summed over the ranks of all of them."""

from __future__ import annotations

import torch

from gems.torch.state.grad_bucket import restored
from gems.torch.state.rank_weights import RankWeights
from gems.torch.state.sparse_gradients import dense

Tensor = torch.Tensor


def pack_tied(weights: RankWeights, stage: int) -> dict[str, Tensor]:
    """By name, gradients to all-reduce of the weights that a stage shares with later ones, each
    with a last number that counts the ranks which have one."""
    owned, parameters = weights.owned, weights.named_parameters()
    tied = next(stages for stages in weights.plan.tied if stages[0] == stage)
    found: dict[str, Tensor] = {}
    for name in owned.tied():
        p = parameters.get(name)
        if p is not None and weights.trains(p) and owned.stages[name][0] in tied:
            gradient = torch.zeros_like(p) if p.grad is None else dense(p.grad)
            present = gradient.new_tensor([p.grad is not None])
            found[name] = torch.cat((gradient.reshape(-1), present))
    return found


def unpack_tied(weights: RankWeights, reduced: dict[str, Tensor]) -> None:
    """The sums are there. A weight that no rank has a gradient for has none."""
    parameters = weights.named_parameters()
    for name, flat in reduced.items():
        p = parameters[name]
        p.grad = restored(flat[:-1], p) if flat[-1].item() else None
