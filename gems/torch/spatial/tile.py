"""One call on this rank's tile: its boxes, and its inputs with the halos that it reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from gems.geometry.box import Box
from gems.geometry.layout import Layout, Spans, clipped
from gems.geometry.window import Window
from gems.torch.autograd.norm_gradients import normalises, sound
from gems.torch.autograd.split_backward import Entry
from gems.torch.spatial.computed_weights import prepare, prepared
from gems.torch.spatial.group import SpatialGroup
from gems.torch.spatial.halo_exchange import ExchangeHalos, HaloExchange, PadTile
from gems.torch.spatial.op import Op, Run, named
from gems.torch.spatial.saved_tiles import SavedTiles
from gems.torch.tracing.calls import Call, Ref, is_placeholder

Tensor = torch.Tensor
OWN = ()  # instead of windows: every rank reads its own cells, wherever the result is wanted


@dataclass
class ForwardContext:
    """What the layers of a forward leave for backward: saved tensors, deferred weight gradients."""

    saved: SavedTiles | None = None
    deferred: list[Entry] | None = None
    known: Mapping[str, Tensor] = field(default_factory=dict)  # sums over tiles, in backward
    unread: Set[str] = frozenset()  # calls of which nobody looks at the result


@dataclass
class Tile:
    """This rank's tiles of the inputs and results of one call."""

    group: SpatialGroup
    op: Op
    outs: Sequence[str]  # the results that are tiled
    windows: Mapping[str, tuple[Window, ...]]  # of the tiled inputs
    layouts: Mapping[str, Layout]  # of all values, with the cells that ranks really have
    wants: Mapping[str, Spans]  # of the tiled inputs, beyond the border of the image too
    context: ForwardContext
    exchanges: dict[str, int] = field(default_factory=dict)  # of each input, so far

    @property
    def call(self) -> Call:
        return self.op.call

    def out(self, name: str | None = None) -> Box:
        """This rank's box of a result."""
        return self.layouts[name or self.outs[0]].boxes()[self.group.me]

    def own(self, name: str) -> Box:
        """The cells of a value that are this rank's to sum over."""
        layout = self.layouts[name]
        if self.windows.get(name) == OWN:
            return layout.boxes(self.wants[name])[self.group.me]
        return layout.own_boxes()[self.group.me]

    def channel(self, name: str) -> SpatialGroup:
        """The group for the next exchange of an input."""
        self.exchanges[name] = number = self.exchanges.get(name, 0) + 1
        return self.group.channel(self.call.name, name, number)

    def wanted(self, name: str) -> Box:
        """This rank's box of an input, within the image."""
        layout = self.layouts[name]
        return layout.boxes(clipped(self.wants[name], layout))[self.group.me]

    def padded_span(self, name: str, axis: int) -> tuple[int, int]:
        """The cells of a padded input along an axis of the grid, border and all."""
        return self.wants[name][axis][self.group.coordinate[axis]]

    def with_halo(self, x: Any, fill: float | None = None) -> Callable[[Tensor], Tensor]:
        """What brings an input to the box that this rank reads of it: the image only, or with a
        border of `fill` where the box reaches beyond the image. Whole values stay as they are."""
        if not isinstance(x, Ref) or x.name not in self.layouts:
            return lambda t: t
        layout = self.layouts[x.name]
        wants = clipped(self.wants[x.name], layout)
        have, want = layout.boxes(), layout.boxes(wants)
        frame, at = self._frame(x.name, want[self.group.me], fill is not None)
        if all(w in h for w, h in zip(want, have, strict=True)):
            return self._local(have[self.group.me], want[self.group.me], frame, at, fill or 0.0)
        exchange = HaloExchange(self.channel(x.name), have, [want], [at], frame, fill or 0.0)
        return self.exchanged(exchange)

    def exchanged(self, exchange: HaloExchange) -> Callable[[Tensor], Tensor]:
        return lambda t: ExchangeHalos.apply(t, exchange, self.context.saved)  # type: ignore

    def _frame(self, name: str, want: Box, framed: bool) -> tuple[tuple[int, ...], Box]:
        """The shape of the padded tile, and where in it the wanted box lies."""
        layout = self.layouts[name]
        frame, start = list(want.shape), [0] * len(want.shape)
        empty = self.out().empty if self.outs else False
        for axis, dim in enumerate(layout.dims):
            low, high = self.padded_span(name, axis)
            if framed and not empty:
                frame[dim] = high - low
                start[dim] = min(max(want.start[dim] - low, 0), high - low)
        at = Box(tuple(start), tuple(a + n for a, n in zip(start, want.shape, strict=True)))
        return tuple(frame), at

    def _local(
        self, have: Box, want: Box, frame: tuple[int, ...], at: Box, fill: float
    ) -> Callable[[Tensor], Tensor]:
        """Without an exchange: a view of the tile, padded if need be."""
        slices = want.relative_to(have).slices() if not want.empty else None
        pads: list[int] = []
        for dim in reversed(range(len(frame))):
            pads += [at.start[dim], frame[dim] - at.stop[dim]]
        sliced = want.shape != have.shape

        def view(t: Tensor) -> Tensor:
            if sliced:
                t = t.new_zeros(want.shape) + 0 * t.sum() if slices is None else t[slices]
            return PadTile.apply(t, pads, fill, self.context.saved) if any(pads) else t  # type: ignore

        return view

    def known_sums(self) -> Tensor | None:
        """What this call's summands came to, if they were merged before; see `Split`."""
        return self.context.known.get(self.call.writes[0])

    def unread(self, x: Tensor) -> bool:
        """Whether only backward goes through this call, and in the type of its input."""
        here = self.call.name in self.context.unread
        return here and not x.is_complex() and not torch.is_autocast_enabled(x.device.type)

    def nothing(self, *alive: Tensor | None) -> Tensor:
        """The empty result of a rank without cells, through which backward goes all the same."""
        tensors = [t for t in alive if t is not None]
        empty = tensors[0].new_zeros(self.out().shape)
        return empty + 0 * sum(t.sum() for t in tensors)

    def named(self, stub: Run, work: Callable[[dict[str, Any]], Any], *attributes: str) -> Run:
        """What to call: `work` on the arguments by name, with the module's settings as they are."""
        module = self.op.module
        computes = module is not None and prepared(module)

        def run(*args: Any, **kwargs: Any) -> Any:
            if computes and module is not None:
                prepare(module)
            return work(named(stub, module, attributes, args, kwargs))

        return run

    def mapped(self, work: Run, change: Callable[[Any], Callable[[Tensor], Tensor]]) -> Run:
        """`work` on the call's own arguments, each tensor `x` changed by `change(its argument)`.

        An argument is a `Ref`, an `Attr`, or a constant tensor.
        """
        arguments = pytree.tree_leaves((self.call.args, self.call.kwargs), is_leaf=is_placeholder)
        changes = [
            change(x) if is_placeholder(x) or isinstance(x, Tensor) else None for x in arguments
        ]

        specs = (pytree.tree_flatten(x, is_leaf=is_placeholder)[1] for x in self.call.args)
        flat = all(spec.is_leaf() for spec in specs)
        if flat and not self.call.kwargs:  # as most are

            def run_flat(*args: Any) -> Any:
                return work(*(x if c is None else c(x) for x, c in zip(args, changes, strict=True)))

            return run_flat

        def run(*args: Any, **kwargs: Any) -> Any:
            leaves, form = pytree.tree_flatten((args, kwargs))
            parts = [x if c is None else c(x) for x, c in zip(leaves, changes, strict=True)]
            args, kwargs = pytree.tree_unflatten(parts, form)
            return work(*args, **kwargs)

        return run

    @property
    def original(self) -> Run:
        """The recorded function or module itself."""
        found = self.op.module if self.op.module is not None else self.call.function
        assert found is not None
        return sound(found) if normalises(self.call, self.op.model) else found
