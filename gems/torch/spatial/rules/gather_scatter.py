"""Cells picked by number along a dim that is not cut: gather, scatter, one-hot, embedding."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from gems.torch.spatial.rule import Ask, NotTileable, Rule, rule
from gems.torch.spatial.rules.elementwise import pointwise
from gems.torch.spatial.rules.reshape import fetched
from gems.torch.tracing.calls import is_placeholder

Tensor = torch.Tensor


def _picked(input: Any, dim: int, index: Any, *rest: Any, **options: Any) -> None: ...


@rule(("gather", "scatter", "scatter_add"))
def picked(ask: Ask) -> Rule:
    """All tensors are as long as each other along the dims that are cut."""
    a = ask.named(_picked)
    found = pointwise(ask)
    cut = found.outs[ask.out].dims
    if a["dim"] % len(ask.shape(ask.out)) in cut:
        raise NotTileable(f"picks cells along dim {a['dim']}, which is cut")
    for place in pytree.tree_leaves(ask.call.args, is_leaf=is_placeholder):
        shape = ask.whole(place) if is_placeholder(place) or isinstance(place, Tensor) else ()
        if shape and any(shape[d] != ask.shape(ask.out)[d] for d in cut):
            raise NotTileable(f"picks only some of the cells of {shape}")
    return found


@rule(("one_hot",))
def one_hot(ask: Ask) -> Rule:
    """A new last dim; it must be said how long it is, for no rank sees the largest class."""
    x, *rest = (*ask.call.args, *ask.call.kwargs.values())
    if not rest or not isinstance(rest[0], int) or rest[0] < 1:
        raise NotTileable("does not say how many classes there are")
    return fetched(ask, x, ask.primary(x).dims)


@rule((), (nn.Embedding,))
def embedding(ask: Ask) -> Rule:
    """A new last dim."""
    x = ask.call.args[0]
    if ask.module is not None and (ask.module.max_norm or ask.module.scale_grad_by_freq):
        raise NotTileable("looks at which words the whole batch has")
    return fetched(ask, x, ask.primary(x).dims)
