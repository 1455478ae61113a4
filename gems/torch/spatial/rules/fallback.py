"""Layers without a layer rule: every rank of the spatial group gathers the inputs and runs all of
it.

                    forward                                    backward
    tile ──┐                                     ┌──► own cells of all ranks' gradients, added up
    tile ──┼─► whole input ─► call ─► whole result, or this rank's tile of it ◄── gradient
    tile ──┘   (on every rank)

Exact for any layer, at the price of its whole memory and work on every rank. Gradients of whole
values are parts, one on each rank, that add up; backward of torch's own operations is linear, so
weight gradients add up over the ranks as well. Where backward may not be linear (autograd functions
and hooks on gradients, which may clip) each rank gets the whole gradient, and only the first one
gives what it finds to the weights.

[Note: no gradient on tiles] An autograd function may return None for an input, and what leads only
to that input then has no gradient: its parameters have None, not zeros. Such a function is opaque,
so every rank of the group runs all of it and finds the same None. From there on None goes back
through the same operations on every rank: none of them communicates, and none waits for another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from gems.geometry.box import Box
from gems.geometry.layout import Layout
from gems.model.graph import Value
from gems.torch.runtime.strides import restrided
from gems.torch.spatial.group import Exchange, SpatialGroup
from gems.torch.spatial.rule import OWN, Ask, NotTileable, Rule, Run, Site
from gems.torch.tracing.calls import Attr, Ref

Tensor = torch.Tensor


class Shared(NotTileable):
    """A change in place that a whole copy would not see: not even a gathered input helps."""


def gathered(ask: Ask, why: str) -> Rule:
    """A call on whole inputs; results as large as a cut input are cut like it again."""
    call = ask.call
    opaque = is_opaque(ask)
    back = tuple((old, new) for old, new in call.mutates if new and old in ask.layouts)
    if opaque and call.mutates:
        raise Shared(f"{why}, and changes a tensor in place inside of what is not recorded")
    outs = {name: x for _, name in call.outs if (x := _like(ask, name)) is not None}
    outs |= {new: ask.layouts[old] for old, new in back}
    outs |= {name: ask.layouts[old] for old, name in _returned(ask) if old in ask.layouts}
    cells = sum(prod(ask.shape(name)) for name in ask.cut)
    windows = dict.fromkeys(ask.cut, OWN)
    ranks = prod(next(iter(ask.layouts.values())).grid)
    sums = max(cells // ranks, 1)
    return Rule(outs, windows, lambda site: _bound(site, opaque), sums=sums, whole=why, back=back)


def _returned(ask: Ask) -> Iterable[tuple[str, str]]:
    """Values that a call changed in place and returned: before, and after."""
    olds = [old for old, new in ask.call.mutates if new is None]
    if not olds:
        return
    for _, name in ask.call.outs:
        for old in olds:
            if ask.shape(old) == ask.shape(name):
                yield old, name


def _like(ask: Ask, name: str) -> Layout | None:
    """The cut of a result that is as large as an image that is cut; None: it stays whole."""
    candidates = [ask.layouts[n] for n in ask.cut] or list(reversed(ask.layouts.values()))
    return image_like(ask.shape(name), candidates)


def image_like(shape: Sequence[int], layouts: Iterable[Layout]) -> Layout | None:
    """The first of these cuts that fits a tensor of this shape, of at least three dims."""
    for layout in layouts:
        lengths = [layout.shape[d] for d in layout.dims]
        same = len(layout.shape) == len(shape) > 2 and lengths == [shape[d] for d in layout.dims]
        if same and max(lengths) > 1:
            return Layout(tuple(shape), layout.dims, layout.own, layout.own)
    return None


def is_opaque(ask: Ask) -> bool:
    """Whether a call's backward may do more than torch's own: it must see whole gradients."""
    owner = getattr(ask.call.function, "__self__", None)
    if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
        return True
    if ask.module is None:
        return False
    foreign = not type(ask.module).__module__.startswith("torch.")
    return foreign or any(map(_hooks_gradients, ask.module.modules()))


def _hooks_gradients(module: nn.Module) -> bool:
    kinds = ("_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, kind, None) for kind in kinds)


def recut(ask: Ask) -> Rule | None:
    """A whole call behind one that had to be gathered: an image that it makes is cut again."""
    outs = {name: x for _, name in ask.call.outs if (x := _like(ask, name)) is not None}
    if not outs or ask.call.mutates or is_opaque(ask):
        return None
    return Rule(outs, {}, lambda site: _bound(site, False))


def alone(ask: Ask) -> Rule:
    """A call on whole values whose backward must see whole gradients."""
    if ask.call.mutates:
        raise Shared("changes a tensor in place inside of what is not recorded")
    made = sum(prod(ask.shape(name)) for name in ask.call.writes)
    return Rule({}, {}, lambda site: _bound(site, True), sums=max(made, 1))


# --- what runs ------------------------------------------------------------------------------------


def _bound(site: Site, opaque: bool) -> Run:
    call, draws = site.call, site.ask.draws
    slices = {name: site.out(name).slices() for name in site.rule.outs}
    paths = [(path, slices[name]) for path, name in call.outs if name in slices]
    bring = [_Gathering(site, name, opaque) for name in site.rule.windows]
    by_name = {gathering.name: gathering for gathering in bring}
    back = [(old, slices[new]) for old, new in site.rule.back]

    work = _alone(site) if opaque else site.original

    def drawing(*args: Any, **kwargs: Any) -> Any:
        with draws.call(call.name) if call.random else nullcontext():
            return work(*args, **kwargs)

    def run(*args: Any, **kwargs: Any) -> Any:
        whole: dict[str, Tensor] = {}
        local: dict[str, Tensor] = {}

        def given(place: Any) -> Callable[[Tensor], Tensor]:
            if isinstance(place, Ref) and place.name not in by_name and call.random:
                return lambda t: restrided(t, site.ask.values[place.name])
            if not isinstance(place, Ref) or place.name not in by_name:
                return lambda t: t

            def change(t: Tensor) -> Tensor:
                local[place.name] = t
                if place.name not in whole:
                    whole[place.name] = by_name[place.name](t)
                return whole[place.name]

            return change

        found = site.mapped(drawing, given)(*args, **kwargs)
        for old, place in back:
            local[old].copy_(whole[old][place])
        for path, place in paths:
            found = _at(found, path, place)
        return found

    return run


def _at(found: Any, path: Sequence[Any], place: tuple[slice, ...]) -> Any:
    """A result with the tensor at this path cut to a box."""
    if not path:
        return found[place]
    key, *rest = path
    made = dict(found) if isinstance(found, dict) else list(found)
    made[key] = _at(made[key], rest, place)
    return made


class _Gathering:
    """Brings every rank all of one cut value, with the strides that were recorded."""

    def __init__(self, site: Site, name: str, full: bool) -> None:
        self.name, self.full = name, full
        layout, self.team = site.layouts[name], site.team
        self.have, self.own = layout.boxes()[self.team.me], layout.own_boxes()[self.team.me]
        self.value: Value = site.ask.values[name]
        self.boxes, self.shape = layout.own_boxes(), layout.shape

    @cached_property
    def exchange(self) -> Exchange:
        whole = Box.whole(self.shape)
        want = [[whole] * self.team.size]
        return Exchange(self.team, self.boxes, want, [whole], self.shape)

    def __call__(self, x: Tensor) -> Tensor:
        if self.own.empty:
            x = x.new_zeros(self.own.shape) + 0 * x.sum()
        elif self.own != self.have:
            x = x[self.own.relative_to(self.have).slices()]
        return restrided(_Gather.apply(x, self.exchange, self.own, self.full), self.value)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange, own: Box, full: bool) -> Tensor:
        ctx.exchange, ctx.own, ctx.full = exchange, own, full
        ctx.set_materialize_grads(False)
        return exchange.slab(x, exchange.post(x).parts())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # type: ignore[override]
        (gradient,) = gradients
        if gradient is None:
            return None, None, None, None
        if ctx.full:  # all ranks have all of it
            return gradient[ctx.own.slices()].contiguous(), None, None, None
        return ctx.exchange.adjoint(gradient), None, None, None


# --- whole gradients ------------------------------------------------------------------------------


def _alone(site: Site) -> Run:
    """The recorded call as one operation, through which whole gradients go back on every rank."""
    module, original, team = site.ask.module, site.original, site.team
    spread = {ref.name for ref in _cut_refs(site)}
    held = [] if module is None else list(module.parameters())

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return original(*args, **kwargs)
        leaves, form = pytree.tree_flatten((args, kwargs))
        at = [k for k, x in enumerate(leaves) if isinstance(x, Tensor)]
        cut = [k in places for k in at]

        def work(tensors: Sequence[Tensor]) -> Any:
            filled = list(leaves)
            for k, x in zip(at, tensors, strict=True):
                filled[k] = x
            positional, named = pytree.tree_unflatten(filled, form)
            return original(*positional, **named)

        inner = _Inner(work, held, team, cut)
        found = _Opaque.apply(inner, *(leaves[k] for k in at), *held)
        return inner.put_back(found)

    recorded = pytree.tree_leaves((site.call.args, site.call.kwargs), is_leaf=_is_place)
    places = {k for k, x in enumerate(recorded) if isinstance(x, Ref) and x.name in spread}
    return run


def _is_place(x: Any) -> bool:
    return isinstance(x, (Ref, Attr))


def _cut_refs(site: Site) -> list[Ref]:
    return [Ref(name) for name in site.rule.windows]


class _Inner:
    """One forward of an opaque call: its own graph, between whole inputs and whole results."""

    def __init__(
        self,
        work: Callable[[Sequence[Tensor]], Any],
        held: Sequence[Tensor],
        team: SpatialGroup,
        cut: Sequence[bool],
    ) -> None:
        self.work, self.held, self.team, self.cut = work, held, team, cut
        self.given: list[Tensor] = []
        self.made: list[Tensor] = []
        self.rest: list[Any] = []
        self.form: Any = None

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        self.given = [x.detach().requires_grad_(x.requires_grad) for x in tensors]
        with torch.enable_grad():
            found = self.work(self.given)
        self.rest, self.form = pytree.tree_flatten(found)
        self.made = [x for x in self.rest if isinstance(x, Tensor)]
        return self.made

    def put_back(self, made: Sequence[Tensor]) -> Any:
        """The result, with these tensors in place of those of the inner graph."""
        rest = iter(made)
        leaves = [next(rest) if isinstance(x, Tensor) else x for x in self.rest]
        self.rest = []
        return pytree.tree_unflatten(leaves, self.form)

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """All ranks' parts of the gradients added up, through the inner graph. Of cut inputs every
        rank takes its own cells; of what all ranks have, only the first gives a gradient."""
        pairs = [
            self._whole(y, g) for y, g in zip(self.made, gradients, strict=True) if y.requires_grad
        ]
        sources = [*self.given, *self.held]
        wanted = [x for x in sources if x.requires_grad]
        ys, gs = [y for y, _ in pairs], [g for _, g in pairs]
        found = iter(torch.autograd.grad(ys, wanted, gs, allow_unused=True) if pairs else ())
        self.made = []
        result: list[Tensor | None] = []
        for k, x in enumerate(sources):
            g = next(found, None) if x.requires_grad else None
            mine = (k < len(self.cut) and self.cut[k]) or self.team.me == 0
            result.append(g if mine or g is None else torch.zeros_like(g))
        self.given = []
        return result

    def _whole(self, y: Tensor, mine: Tensor | None) -> tuple[Tensor, Tensor]:
        """A result, and the sum of all ranks' gradients of it. If no rank has one, backward goes
        into the inner graph without one, as in the plain model."""
        part = torch.zeros_like(y) if mine is None else mine
        flat = torch.cat((part.reshape(-1), part.new_tensor([mine is not None])))
        total = self.team.total(flat)
        whole = total[:-1].view(y.shape)
        with torch.enable_grad():
            return (y if total[-1].item() else _Unpassed.apply(y)), whole


class _Unpassed(torch.autograd.Function):
    """Itself, of which the gradient is not passed on: there is none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # type: ignore[override]
        return None


class _Opaque(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inner: _Inner, *tensors: Tensor) -> Any:
        ctx.inner = inner
        ctx.set_materialize_grads(False)
        count = len(tensors) - len(inner.held)
        made = inner.forward(tensors[:count])
        found = tuple(x.detach() for x in made)
        pairs = zip(found, made, strict=True)
        ctx.mark_non_differentiable(*(x for x, y in pairs if not y.requires_grad))
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:  # type: ignore[override]
        return None, *ctx.inner.backward(gradients)
