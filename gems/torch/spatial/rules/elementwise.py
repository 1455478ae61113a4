"""Calls that treat every cell by itself, with any number of operands, and dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gems.geometry.box import Box
from gems.geometry.layout import Layout, even
from gems.geometry.window import Same, Span, Window
from gems.torch.spatial.rule import Ask, NotTileable, Rule, Run, Site, rule, same
from gems.torch.spatial.rules.norms import local
from gems.torch.spatial.rules.reshape import fetched
from gems.torch.tracing.calls import Attr, Ref

Tensor = torch.Tensor


class Broadcast:
    """An operand of length 1: everybody reads its only cell."""

    def reads(self, a: int, b: int) -> Span:
        return 0, 1

    def follow(self, c: int) -> int:
        return c


def pointwise(ask: Ask, work: Callable[[Site], Run] | None = None) -> Rule:
    """Operands are brought in line with the result; whole ones are cut to this rank's box.

    `work` makes what to call on them, if it is not the recorded call itself.
    """
    shape = ask.shape(ask.call.writes[0])
    leading = _leading(ask, shape)
    dims = tuple(d + len(shape) - len(leading.shape) for d in leading.dims)
    windows: dict[str, tuple[Window, ...]] = {}
    for name in ask.cut:
        layout = ask.layouts[name]
        offset = len(shape) - len(layout.shape)
        if tuple(d + offset for d in layout.dims) != dims:
            raise NotTileable(
                f"joins tensors that are cut along different dims, {layout.shape} along "
                f"{layout.dims} and {leading.shape} along {leading.dims}"
            )
        windows[name] = tuple(
            Same() if layout.shape[d] == shape[d + offset] else Broadcast() for d in layout.dims
        )
    if all(leading.shape[d] == shape[o] for d, o in zip(leading.dims, dims, strict=True)):
        out = leading.follow(shape, dims, (Same(),) * len(dims))
    else:
        out = even(shape, dims, leading.grid)

    def bind(site: Site) -> Run:
        box = site.out(ask.call.writes[0])

        def change(place: Ref | Attr | Tensor) -> Callable[[Tensor], Tensor]:
            if isinstance(place, Ref) and place.name in windows:
                return site.fetch(place, None)
            return part_of(ask.whole(place), box, dims)

        return site.mapped(site.original if work is None else work(site), change)

    return Rule({name: _like(out, ask.shape(name)) for name in ask.call.writes}, windows, bind)


def _leading(ask: Ask, shape: tuple[int, ...]) -> Layout:
    """Whose cut the result follows: what is changed in place, the fullest operand, or, if all of
    them are whole, some image of the same size."""
    if not ask.cut:
        return ask.as_large(shape)
    changed = [ask.layouts[old] for old, _ in ask.call.mutates if old in ask.layouts]
    if ask.call.mutates:
        if not changed:
            raise NotTileable("changes a whole tensor in place by a cut one")
        return changed[0]
    full = [ask.layouts[n] for n in ask.cut if ask.layouts[n].shape == shape]
    full += [layout for layout in map(ask.layouts.__getitem__, ask.cut) if _spans(layout, shape)]
    return full[0] if full else ask.layouts[ask.cut[0]]


def _spans(layout: Layout, shape: tuple[int, ...]) -> bool:
    offset = len(shape) - len(layout.shape)
    return all(layout.shape[d] == shape[d + offset] for d in layout.dims)


def _like(layout: Layout, shape: tuple[int, ...]) -> Layout:
    return Layout(shape, layout.dims, layout.own, layout.have)


def part_of(whole: tuple[int, ...], box: Box, dims: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
    """This rank's part of a whole operand that is as long as the result along a cut dim."""
    slices: list[slice] = [slice(None)] * len(whole)
    for dim in dims:
        at = dim - (len(box.start) - len(whole))
        if at >= 0 and whole[at] > 1:
            slices[at] = slice(box.start[dim], box.stop[dim])
    if all(s == slice(None) for s in slices):
        return lambda t: t
    return lambda t: t[tuple(slices)]


rule(("fill", "zero", "copy"))(pointwise)  # in place


# Pointwise, but not to ATen, which sees a view, a copy or a composite.
@rule(
    (
        "contiguous",
        "clone",
        "detach",
        "to",
        "float",
        "double",
        "half",
        "bfloat16",
        "type",
        "type_as",
    ),
    (nn.Identity,),
)
def as_it_is(ask: Ask) -> Rule:
    """Another tensor may be there to say the type: of that one nothing is read."""
    x = ask.call.args[0]
    layout = ask.layout(x)
    if layout is None:
        return Rule({}, {}, lambda site: site.original)

    def bind(site: Site) -> Run:
        fetch = site.fetch(x, None)
        return site.mapped(site.original, lambda place: fetch if place == x else lambda t: t)

    windows = same(layout)
    return Rule(
        {ask.out: layout.follow(layout.shape, layout.dims, windows)}, {x.name: windows}, bind
    )


@rule(
    (
        "softmax", "log_softmax", "softmin", "cumsum", "normalize", "glu", "argmax", "argmin",
        "logsumexp", "prod", "any", "all",
    ),
    (nn.Softmax, nn.LogSoftmax, nn.Softmax2d, nn.GLU),
)  # fmt: skip
def along(ask: Ask) -> Rule:
    """Along one dim, which must not be cut."""
    if isinstance(ask.module, nn.Softmax2d):
        return local(ask, ask.call.args[0])
    args = list(ask.call.args)
    x = args[0]
    layout = ask.primary(x)
    dim = ask.call.kwargs.get("dim", args[1] if len(args) > 1 else getattr(ask.module, "dim", None))
    if ask.name == "normalize" and "dim" not in ask.call.kwargs:
        dim = args[2] if len(args) > 2 else 1
    if not isinstance(dim, int):
        raise NotTileable("does not say along which dim")
    dim %= len(layout.shape)
    if dim in layout.dims:
        raise NotTileable(f"looks along dim {dim}, which is cut")
    gone = len(ask.shape(ask.out)) < len(layout.shape)
    return fetched(ask, x, [d - (gone and d > dim) for d in layout.dims])


@rule(("linear",), (nn.Linear,))
def linear(ask: Ask) -> Rule:
    x = ask.call.args[0]
    layout = ask.primary(x)
    if len(layout.shape) - 1 in layout.dims:
        raise NotTileable("mixes the cells of the last dim, which is cut")
    return fetched(ask, x, layout.dims)


@rule((), (nn.PReLU,))
def prelu(ask: Ask) -> Rule:
    return local(ask, ask.call.args[0])


def _dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> None: ...


@rule(("dropout",), (nn.Dropout,))
def dropout(ask: Ask) -> Rule:
    """The mask of the whole tensor, as any rank would draw it, cut to this rank's box."""
    x = ask.call.args[0]
    layout = ask.primary(x)
    if not ask.call.random:
        return local(ask, x)

    def bind(site: Site) -> Run:
        fetch, box = site.fetch(x, None), site.out()

        def work(a: dict[str, Any]) -> Tensor:
            t, p = fetch(a["input"]), a["p"]
            return ask.draws.dropped(t, p, ask.call.name, layout.shape, box)

        return site.named(_dropout, work, "p")

    windows = (Same(),) * len(layout.dims)
    return Rule(
        {ask.out: layout.follow(layout.shape, layout.dims, windows)}, {x.name: windows}, bind
    )


@rule(
    ("dropout1d", "dropout2d", "dropout3d", "feature_dropout"),
    (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
)
def channel_dropout(ask: Ask) -> Rule:
    """One number per sample and channel: drawn for all samples, whatever the tile."""
    x = ask.call.args[0]
    layout = ask.primary(x)
    if not ask.call.random:
        return local(ask, x)
    if 1 in layout.dims:
        raise NotTileable("drops channels, which are cut")

    def bind(site: Site) -> Run:
        fetch, box = site.fetch(x, None), site.out()
        ones = (*layout.shape[:2], *(1,) * (len(layout.shape) - 2))

        def work(a: dict[str, Any]) -> Tensor:
            t = fetch(a["input"])
            with ask.draws.call(ask.call.name):
                blank = torch.ones(ones, dtype=t.dtype, device=t.device)
                mask = torch.feature_dropout(blank, a["p"], True)
            return t * mask[box.start[0] : box.stop[0]]

        return site.named(_dropout, work, "p")

    windows = (Same(),) * len(layout.dims)
    return Rule(
        {ask.out: layout.follow(layout.shape, layout.dims, windows)}, {x.name: windows}, bind
    )
