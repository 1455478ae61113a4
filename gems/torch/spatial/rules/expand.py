"""Tensors that are made as large as a cut one: expanded, repeated, or filled with a number.

A whole tensor that is expanded to the size of a cut image is cut like it from there on.
"""

from __future__ import annotations

from typing import Any

import torch

from gems.torch.spatial.rule import Ask, NotTileable, Rule, Run, Site, refs, rule, same
from gems.torch.spatial.rules.elementwise import pointwise

Tensor = torch.Tensor


@rule(("expand", "expand_as", "broadcast_to"), spreads=True)
def expanded(ask: Ask) -> Rule:
    def work(site: Site) -> Run:
        shape = site.out().shape
        return lambda t, *_, **__: t.expand(shape)

    return pointwise(ask, work)


@rule(("broadcast_tensors",))
def broadcast(ask: Ask) -> Rule:
    def work(site: Site) -> Run:
        shape = site.out().shape
        return lambda *tensors: [t.expand(shape) for t in tensors]

    return pointwise(ask, work)


@rule(("repeat", "tile"), spreads=True)
def repeated(ask: Ask) -> Rule:
    """Along dims that are not cut, and along those in which there is one cell to repeat."""
    before, after = ask.whole(ask.call.args[0]), ask.shape(ask.out)
    lead = len(after) - len(before)

    def work(site: Site) -> Run:
        shape = site.out().shape

        def run(t: Tensor, *_: Any, **__: Any) -> Tensor:
            lengths = (1,) * lead + tuple(t.shape)
            return t.repeat([m // n if n else 1 for m, n in zip(shape, lengths, strict=True)])

        return run

    found = pointwise(ask, work)
    for dim in found.outs[ask.out].dims:
        if dim >= lead and before[dim - lead] not in (1, after[dim]):
            raise NotTileable(f"repeats the cells of dim {dim}, which is cut")
    return found


@rule(("zeros_like", "ones_like", "full_like", "empty_like"))
def filled_like(ask: Ask) -> Rule:
    """Of the tensor itself nothing is read."""
    layout = ask.primary(ask.call.args[0])

    def bind(site: Site) -> Run:
        shape, make = site.out().shape, site.original
        return lambda t, *args, **kwargs: make(t.new_empty(shape), *args, **kwargs)

    return Rule({ask.out: layout.follow(layout.shape, layout.dims, same(layout))}, {}, bind)


@rule(("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor"))
def filled(ask: Ask) -> Rule:
    """A whole tensor, for which a cut one lends its type."""
    if any(ask.layout(x) for x in refs((ask.call.args[1:], ask.call.kwargs))):
        raise NotTileable("copies a cut tensor; use clone")
    return Rule({}, {}, lambda site: site.original)
