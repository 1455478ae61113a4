"""A penalty on weights, added to the loss stage by stage: no rank has all of them.

The plain model's loss would be `loss(output, target) + penalty of all parameters`. A penalty that
is a sum over parameters is the sum over stages of that of their own. It is part of every
micro-batch's backward on a stage, with the micro-batch's share of samples, so that it counts once
in a step, with the weights that the step uses, and where they are anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from gems.distributed.ownership import Ownership
from gems.errors import ShapeError
from gems.torch.runtime.loss_parameters import PREFIX

Tensor = torch.Tensor
Named = Sequence[tuple[str, nn.Parameter]]
Regularizer = Callable[[Named], Tensor]


class Penalty:
    """A regularizer, and which parameters it is given with which stage of this rank."""

    def __init__(
        self, regularizer: Regularizer, owned: Ownership, weights: Mapping[str, Tensor]
    ) -> None:
        self.regularizer, self.owned, self.weights = regularizer, owned, weights

    def parameters(self, stage: int) -> Named:
        """Tied parameters are the first stage's that uses them."""
        stages = self.owned.stages.items()
        mine = [name for name, on in stages if on[0] == stage and not name.startswith(PREFIX)]
        pairs = [(name, self.weights[name]) for name in mine]
        return [(name, p) for name, p in pairs if isinstance(p, nn.Parameter)]

    def of(self, stage: int) -> tuple[Tensor | None, tuple[object, Tensor] | None]:
        """The penalty of a stage's parameters, and where its gradient enters, with a one."""
        named = self.parameters(stage)
        if not named:
            return None, None
        with torch.enable_grad():
            value = self.regularizer(named)
        if not isinstance(value, Tensor) or value.numel() != 1:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ShapeError(
                f"regularizer must give one number as a tensor, for (name, parameter) pairs; got "
                f"{shape} for those of stage {stage}"
            )
        edge = (get_gradient_edge(value), torch.ones_like(value)) if value.requires_grad else None
        return value.detach(), edge
