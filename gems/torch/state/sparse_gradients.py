"""Gradients by row, of `nn.Embedding(sparse=True)`: dense where ranks sum or offload them.

On a rank that has a weight by itself the gradient stays sparse, as in the plain model. Where it is
summed over ranks, sharded or offloaded it becomes dense: memory of a known size. SGD and Adagrad
come to the same numbers with either; an optimizer that wants rows is rejected before it starts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from gems.errors import PlanError

Tensor = torch.Tensor


def dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


def square_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The square of the norm of some gradients of one device, of complex numbers as well: one
    number, in float64, on that device."""
    found = [dense(gradient.detach()) for gradient in gradients]
    real = [torch.view_as_real(x) if x.is_complex() else x for x in found]
    return torch.stack(torch._foreach_norm(real, 2, torch.float64)).square().sum()


def reject_rows(optimizer: Optimizer, summed: Collection[str]) -> None:
    """`summed` are parameters of this rank whose gradients will be dense."""
    if isinstance(optimizer, torch.optim.SparseAdam) and summed:
        some = ", ".join(list(summed)[:3])
        raise PlanError(
            "SparseAdam wants sparse gradients, and those that are summed over ranks, sharded or "
            f"offloaded are dense: {some}. Use torch.optim.Adam and nn.Embedding(sparse=False), or "
            "a plan in which each stage is on one rank, without offload"
        )


def embeddings(model: nn.Module) -> list[str]:
    """The weights that have sparse gradients, by name."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    found = [(path, m) for path, m in model.named_modules() if isinstance(m, kinds) and m.sparse]
    return [f"{path}.weight" if path else "weight" for path, _ in found]
