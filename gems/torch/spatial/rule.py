"""How a recorded call runs on a box: what a rule knows, says, and has at hand when it runs.

A rule is a function of `Ask`: one call, and how its inputs are cut. It answers with a `Rule`: how
the results are cut, what each of them reads, and a function of `Site` that makes the thing to call
instead of the recorded call. A call that has no exact cut raises `NotTileable` and says why.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils import _pytree as pytree

from gems.geometry.box import Box
from gems.geometry.layout import Layout, Spans, clipped
from gems.geometry.window import Same, Window
from gems.model.graph import Value, Weight
from gems.torch.runtime.rng import Draws
from gems.torch.runtime.split_backward import Entry
from gems.torch.spatial.group import Exchange, Fetch, Framed, SpatialGroup
from gems.torch.spatial.halo_stash import Slabs
from gems.torch.spatial.rules.parametrized import plain_type, prepare, prepared, shown
from gems.torch.tracing.calls import Attr, Call, Ref, is_placeholder, name_of

Tensor = torch.Tensor
Run = Callable[..., Any]


class NotTileable(Exception):
    """Why a call cannot be cut exactly."""


FIRST = ("input", "tensors")  # what torch calls the first argument of what is in the table
OWN = ()  # instead of windows: every rank brings its own cells, wherever the result is wanted


@dataclass
class Rule:
    """How one call is cut. What is not in `outs` is whole: every rank computes all of it.

    `windows` has, for each cut input, one window per axis of the grid, or `OWN`. `bind` makes what
    to call instead. `sums` numbers go from every rank to every other, forward and again backward.
    """

    outs: dict[str, Layout]
    windows: dict[str, tuple[Window, ...]]
    bind: Callable[[Site], Run]
    circular: bool = False  # what leaves the image at one end is read at the other
    sums: int = 0
    adds: bool = False  # the results are nothing but sums of what each rank makes of its own cells
    whole: str | None = None  # why every rank gathers the inputs and runs all of the call
    back: tuple[tuple[str, str], ...] = ()  # cut values changed in place: before, and after


@dataclass
class Ask:
    """One call, and what is known before it."""

    call: Call
    model: nn.Module
    values: Mapping[str, Value]
    layouts: dict[str, Layout]  # so far
    weights: Mapping[str, Weight]
    makers: Mapping[str, Call]  # of every value
    draws: Draws
    apart: bool = False  # its result must not share memory with what it reads, as views might
    by_name: str | None = field(default=None, init=False)  # an input that was given by name only

    def __post_init__(self) -> None:
        """Rules find a call's input in front, also where the model gives it by name."""
        if self.make is None or self.call.args:
            return
        self.by_name = next((name for name in FIRST if name in self.call.kwargs), None)
        if self.by_name is not None:
            rest = dict(self.call.kwargs)
            self.call = replace(self.call, args=(rest.pop(self.by_name),), kwargs=rest)

    @cached_property
    def module(self) -> nn.Module | None:
        return None if self.call.module is None else self.model.get_submodule(self.call.module)

    def maker(self, name: str) -> Ask | None:
        """The same about the call that makes a value, in whatever stage."""
        return replace(self, call=self.makers[name]) if name in self.makers else None

    @property
    def name(self) -> str:
        """The function's or the module's, as the table has it."""
        return name_of(self.call.function) if self.module is None else type(self.module).__name__

    @property
    def make(self) -> Make | None:
        """The rule in the table, if there is one."""
        if self.module is not None:
            return MODULES.get(plain_type(self.module))
        return FUNCTIONS.get(self.name)

    @cached_property
    def cut(self) -> list[str]:
        """The inputs that are cut, in the order in which they are read."""
        return [name for name in self.call.reads if name in self.layouts]

    @property
    def out(self) -> str:
        """The call's only result."""
        if len(self.call.writes) != 1:
            raise NotTileable(f"gives {len(self.call.writes)} results")
        return self.call.writes[0]

    def shape(self, x: str | Ref) -> tuple[int, ...]:
        return self.values[x.name if isinstance(x, Ref) else x].shape

    def layout(self, x: Any) -> Layout | None:
        return self.layouts.get(x.name) if isinstance(x, Ref) else None

    def as_large(self, shape: Sequence[int]) -> Layout:
        """The cut of an image of this size: a whole tensor that is made so large may take it."""
        for layout in reversed(self.layouts.values()):
            if len(layout.shape) != len(shape):
                continue
            lengths = [layout.shape[d] for d in layout.dims]
            if max(lengths) > 1 and lengths == [shape[d] for d in layout.dims]:
                return Layout(tuple(shape), layout.dims, layout.own, layout.own)
        raise NotTileable(f"makes {tuple(shape)}, and no such image is cut")

    def named(self, stub: Run, attributes: Sequence[str] = ()) -> dict[str, Any]:
        """The recorded arguments by name: of a function, or of a module's input and settings."""
        return _named(stub, self.module, attributes, self.call.args, self.call.kwargs, shown)

    def whole(self, place: Ref | Attr | Tensor) -> tuple[int, ...]:
        """The shape of all of an operand."""
        if isinstance(place, Ref):
            return self.shape(place)
        return tuple(self.weights[place.name].shape if isinstance(place, Attr) else place.shape)

    def primary(self, x: Any) -> Layout:
        """The layout of the input that matters, which must be the only cut one."""
        layout = self.primary_of(x)
        if len(self.cut) > 1:
            raise NotTileable("reads several cut tensors")
        return layout

    def primary_of(self, x: Any) -> Layout:
        layout = self.layout(x)
        if layout is None:
            raise NotTileable("reads a cut tensor where it takes a whole one")
        return layout


def _named(
    stub: Run,
    module: nn.Module | None,
    attributes: Sequence[str],
    args: Any,
    kwargs: Any,
    get: Callable[[nn.Module, str], Any] = getattr,
) -> dict[str, Any]:
    if module is not None:
        found = {name: get(module, name) for name in attributes if _knows(module, name)}
        inputs = (name for name in _signature(stub).parameters if name not in found)
        return found | dict(zip(inputs, args, strict=False)) | kwargs
    try:
        bound = _signature(stub).bind(*args, **kwargs)
    except TypeError as error:
        raise NotTileable(f"is called in a way that is not known here ({error})") from error
    bound.apply_defaults()
    return dict(bound.arguments)


_signature = cache(inspect.signature)


def _knows(module: nn.Module, name: str) -> bool:
    """Whether a module has a setting, found without computing it."""
    return is_parametrized(module, name) or hasattr(module, name)


@dataclass
class Notes:
    """What backward will need of the forward under way, and where it puts weight gradients off."""

    now: Slabs | None = None
    page: list[Entry] | None = None


@dataclass
class Site:
    """Where a call runs: this rank's place in the team, and all boxes, settled."""

    team: SpatialGroup
    ask: Ask
    rule: Rule
    layouts: Mapping[str, Layout]  # of all values, as they really are
    wants: Mapping[str, Spans]  # of the cut inputs, beyond the border of the image too
    memory: Notes

    @property
    def call(self) -> Call:
        return self.ask.call

    def out(self, name: str | None = None) -> Box:
        """This rank's box of a result."""
        return self.layouts[name or next(iter(self.rule.outs))].boxes()[self.team.me]

    def own(self, name: str) -> Box:
        return self.layouts[name].own_boxes()[self.team.me]

    def wanted(self, name: str) -> Box:
        """This rank's box of an input, within the image."""
        layout = self.layouts[name]
        return layout.boxes(clipped(self.wants[name], layout))[self.team.me]

    def slab_span(self, name: str, axis: int) -> tuple[int, int]:
        """The cells of an input that a slab covers along an axis of the grid, border and all."""
        return self.wants[name][axis][self.team.place[axis]]

    def fetch(self, x: Any, fill: float | None = 0.0) -> Callable[[Tensor], Tensor]:
        """Brings an input to the box that this rank wants of it, framed with `fill` at the border
        of the image; without `fill`, only what lies in the image."""
        if not isinstance(x, Ref) or x.name not in self.layouts:
            return _as_it_is
        layout = self.layouts[x.name]
        wants = clipped(self.wants[x.name], layout)
        have, want = layout.boxes(), layout.boxes(wants)
        frame, at = self._frame(x.name, want[self.team.me], fill is not None)
        if all(w in h for w, h in zip(want, have, strict=True)):
            return self._local(have[self.team.me], want[self.team.me], frame, at, fill or 0.0)
        exchange = Exchange(self.team, have, [want], [at], frame, fill or 0.0)
        return lambda t: Fetch.apply(t, exchange, self.memory.now)  # type: ignore[no-any-return]

    def _frame(self, name: str, want: Box, framed: bool) -> tuple[tuple[int, ...], Box]:
        """The shape of the slab, and where in it the wanted box lies."""
        layout = self.layouts[name]
        frame, start = list(want.shape), [0] * len(want.shape)
        empty = self.out().empty if self.rule.outs else False
        for axis, dim in enumerate(layout.dims):
            low, high = self.slab_span(name, axis)
            if framed and not empty:
                frame[dim] = high - low
                start[dim] = min(max(want.start[dim] - low, 0), high - low)
        at = Box(tuple(start), tuple(a + n for a, n in zip(start, want.shape, strict=True)))
        return tuple(frame), at

    def _local(
        self, have: Box, want: Box, frame: tuple[int, ...], at: Box, fill: float
    ) -> Callable[[Tensor], Tensor]:
        """Everything is here: a view of it, framed if need be."""
        slices = want.relative_to(have).slices() if not want.empty else None
        pads: list[int] = []
        for dim in reversed(range(len(frame))):
            pads += [at.start[dim], frame[dim] - at.stop[dim]]
        sliced = want.shape != have.shape

        def view(t: Tensor) -> Tensor:
            if sliced:
                t = t.new_zeros(want.shape) + 0 * t.sum() if slices is None else t[slices]
            return Framed.apply(t, pads, fill, self.memory.now) if any(pads) else t  # type: ignore

        return view

    def nothing(self, *alive: Tensor | None) -> Tensor:
        """The result of a rank that has none, which backward passes all the same."""
        tensors = [t for t in alive if t is not None]
        empty = tensors[0].new_zeros(self.out().shape)
        return empty + 0 * sum(t.sum() for t in tensors)

    def named(self, stub: Run, work: Callable[[dict[str, Any]], Any], *attributes: str) -> Run:
        """What to call: `work` on the arguments by name, with the module's settings as they are."""
        module = self.ask.module
        computes = module is not None and prepared(module)

        def run(*args: Any, **kwargs: Any) -> Any:
            if computes and module is not None:
                prepare(module)
            return work(_named(stub, module, attributes, args, kwargs))

        return run

    def mapped(self, work: Run, change: Callable[[Any], Callable[[Tensor], Tensor]]) -> Run:
        """`work` on the call's own arguments, each tensor changed as `change(its place)` says.

        A place is a `Ref`, an `Attr`, or a tensor that is neither value nor weight: a constant.
        """
        places = pytree.tree_leaves((self.call.args, self.call.kwargs), is_leaf=is_placeholder)
        changes = [
            change(x) if is_placeholder(x) or isinstance(x, Tensor) else None for x in places
        ]

        flat = all(pytree.tree_is_leaf(x, is_leaf=is_placeholder) for x in self.call.args)
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
        found = self.ask.module if self.ask.module is not None else self.call.function
        assert found is not None
        return found


def _as_it_is(x: Tensor) -> Tensor:
    return x


def same(layout: Layout) -> tuple[Window, ...]:
    return (Same(),) * len(layout.dims)


def refs(x: Any) -> list[Ref]:
    return [leaf for leaf in pytree.tree_leaves(x, is_leaf=is_placeholder) if isinstance(leaf, Ref)]


Make = Callable[[Ask], Rule]
FUNCTIONS: dict[str, Make] = {}
MODULES: dict[type[nn.Module], Make] = {}
SPREADS: set[Make] = set()


def rule(
    functions: Iterable[str] = (), modules: Iterable[type[nn.Module]] = (), spreads: bool = False
) -> Callable[[Make], Make]:
    """Enter a rule into the table, for calls of these functions and modules.

    One that `spreads` is also asked about calls that read no cut tensor, but may make one.
    """

    def enter(make: Make) -> Make:
        if spreads:
            SPREADS.add(make)
        FUNCTIONS.update(dict.fromkeys(functions, make))
        MODULES.update(dict.fromkeys(modules, make))
        return make

    return enter
