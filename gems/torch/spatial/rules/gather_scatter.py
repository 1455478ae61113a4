"""Cells picked by number along a dim that is not tiled: gather, scatter, one-hot, embedding."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from gems.torch.spatial.op import NotTileable, Op
from gems.torch.spatial.rule import Rule, rule, unchanged
from gems.torch.spatial.rules.elementwise import pointwise
from gems.torch.tracing.calls import is_placeholder

Tensor = torch.Tensor


def _picked(input: Any, dim: int, index: Any, *rest: Any, **options: Any) -> None: ...


@rule(("gather", "scatter", "scatter_add"))
def picked(op: Op) -> Rule:
    """All tensors are as long as each other along the dims that are tiled."""
    a = op.named(_picked)
    found = pointwise(op)
    cut = found.outs[op.out].dims
    if a["dim"] % len(op.shape(op.out)) in cut:
        raise NotTileable(f"picks cells along dim {a['dim']}, which is tiled")
    for place in pytree.tree_leaves(op.call.args, is_leaf=is_placeholder):
        shape = op.shape(place) if is_placeholder(place) or isinstance(place, Tensor) else ()
        if shape and any(shape[d] != op.shape(op.out)[d] for d in cut):
            raise NotTileable(f"picks only some of the cells of {shape}")
    return found


@rule(("one_hot",))
def one_hot(op: Op) -> Rule:
    """A new last dim, whose length must be given: no rank sees the largest class."""
    x, *rest = (*op.call.args, *op.call.kwargs.values())
    if not rest or not isinstance(rest[0], int) or rest[0] < 1:
        raise NotTileable("does not say how many classes there are")
    return unchanged(op, x)


@rule((), (nn.Embedding,))
def embedding(op: Op) -> Rule:
    """A new last dim."""
    x = op.call.args[0]
    if op.module is not None and (op.module.max_norm or op.module.scale_grad_by_freq):
        raise NotTileable("looks at which words the whole batch has")
    return unchanged(op, x)
