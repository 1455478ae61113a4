"""Tensors side by side: concatenation and stacking, and taking apart again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from gems.geometry.layout import Layout
from gems.torch.spatial.rule import Ask, NotTileable, Rule, Run, Site, rule, same
from gems.torch.spatial.rules.reshape import fetched
from gems.torch.tracing.calls import Ref, is_placeholder

Tensor = torch.Tensor


def _cat(tensors: Any, dim: int = 0, axis: Any = None) -> None: ...


@rule(("cat", "concat", "concatenate"))
def concatenate(ask: Ask) -> Rule:
    """Along a dim that is not cut; parts that are cut differently are brought in line first."""
    a = ask.named(_cat)
    dim = (a["dim"] if a["axis"] is None else a["axis"]) % len(ask.shape(ask.out))
    first = _alike(ask, a["tensors"])
    if dim in first.dims:
        raise NotTileable(f"joins tensors along dim {dim}, which is cut")
    return _joined_along(ask, first, first.dims)


@rule(("stack",))
def stack(ask: Ask) -> Rule:
    a = ask.named(_cat)
    shape = ask.shape(ask.out)
    dim = (a["dim"] if a["axis"] is None else a["axis"]) % len(shape)
    first = _alike(ask, a["tensors"])
    return _joined_along(ask, first, [d + (d >= dim) for d in first.dims])


def _alike(ask: Ask, tensors: Any) -> Layout:
    """The first cut one of some tensors; all that are cut must be so along the same dims."""
    first = ask.layouts[ask.cut[0]]
    for place in pytree.tree_leaves(tensors, is_leaf=is_placeholder):
        layout = ask.layout(place)
        if layout is not None and layout.dims != first.dims:
            raise NotTileable(
                f"joins tensors that are cut along different dims, {layout.shape} along "
                f"{layout.dims} and {first.shape} along {first.dims}"
            )
        if layout is None and len(ask.whole(place)) != len(first.shape):
            raise NotTileable(f"joins {first.shape} with {ask.whole(place)}, which has other dims")
    return first


def _joined_along(ask: Ask, first: Layout, dims: Sequence[int]) -> Rule:
    windows = same(first)

    def bind(site: Site) -> Run:
        out = site.out()
        here = {d: slice(out.start[o], out.stop[o]) for d, o in zip(first.dims, dims, strict=True)}

        def change(place: Any) -> Callable[[Tensor], Tensor]:
            if isinstance(place, Ref) and place.name in ask.cut:
                return site.fetch(place, None)
            box = tuple(here.get(d, slice(None)) for d in range(len(first.shape)))
            return lambda t: t[box]

        return site.mapped(site.original, change)

    outs = {ask.out: first.follow(ask.shape(ask.out), dims, windows)}
    return Rule(outs, dict.fromkeys(ask.cut, windows), bind)


def _pieces(input: Any, count: Any = None, dim: int = 0, **kwargs: Any) -> None: ...


@rule(("chunk", "split", "split_with_sizes", "tensor_split", "unbind"))
def pieces(ask: Ask) -> Rule:
    """Apart again, along a dim that is not cut."""
    if ask.name == "unbind":
        args = (*ask.call.args, *ask.call.kwargs.values())
        x, dim = args[0], args[1] if len(args) > 1 else 0
    else:
        a = ask.named(_pieces)
        x, dim = a["input"], a["dim"]
    layout = ask.primary(x)
    dim %= len(layout.shape)
    if dim in layout.dims:
        raise NotTileable(f"takes a tensor apart along dim {dim}, which is cut")
    gone = ask.name == "unbind"
    return fetched(ask, x, [d - (gone and d > dim) for d in layout.dims])
