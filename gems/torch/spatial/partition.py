"""A stage over a grid of ranks: how every value is cut, who fetches what, what to call instead.

Three passes over the recorded calls. Forward: each rule says how its results are cut. Backward: how
much more than its own cells a rank must hold. Then every cut call is bound to this rank's place.

With `d1` a rank holds its own cells and every layer fetches what it reads beyond them. With `d2` a
run of layers fetches once, wide enough for the last of them, and computes the overlap twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from gems.geometry.box import Box, moves
from gems.geometry.layout import Layout, Spans, around, clipped, hulls, read
from gems.geometry.window import Same
from gems.torch.runtime.rng import Draws
from gems.torch.spatial.group import SpatialGroup
from gems.torch.spatial.rule import (
    OWN,
    SPREADS,
    Ask,
    Notes,
    NotTileable,
    Rule,
    Run,
    Site,
)
from gems.torch.spatial.rules import (  # noqa: F401
    adaptive_pool,
    concat,
    conv_pool,
    elementwise,
    expand,
    fallback,
    gather_scatter,
    losses,
    norms,
    reductions,
    reshape,
    resize,
)
from gems.torch.spatial.rules.elementwise import Broadcast
from gems.torch.spatial.rules.parametrized import observed, watched_names
from gems.torch.tracing.calls import Call, Record
from gems.torch.tracing.op_meter import storage_of

Fetches = tuple[tuple[Box, ...], list[tuple[Box, ...]]]  # what all have; what all want, in pieces
Price = Callable[["Laid"], float]


class Uncuttable(Exception):
    """A call that cannot be cut, and why."""

    def __init__(self, call: Call, kind: str, why: str) -> None:
        super().__init__(f"{call.name} ({kind}) {why}")
        self.call = call


@dataclass
class Laid:
    """A stage laid out over a grid: nothing is bound to a rank yet."""

    calls: list[Call]
    asks: list[Ask]
    rules: list[Rule | None]  # None: whole on every rank
    layouts: dict[str, Layout]
    wants: list[dict[str, Spans]] = field(default_factory=list)
    added: set[str] = field(default_factory=set)  # whole values of which every part has a summand

    def extra(self) -> list[float]:
        """For each call, how many cells are computed for one that is owned."""
        found = []
        for rule in self.rules:
            out = next(iter(rule.outs), None) if rule else None
            found.append(1.0 if out is None else _times(self.layouts[out]))
        return found

    def gathered(self) -> list[str]:
        """The calls without a layer rule, which run whole on every rank, each with the reason."""
        return [
            f"{call.name} ({ask.name}) {rule.whole}"
            for call, ask, rule in zip(self.calls, self.asks, self.rules, strict=True)
            if rule is not None and rule.whole
        ]

    def gathered_bytes(self) -> int:
        """Of the whole inputs of these calls, which every rank has while they run, and may keep."""
        pairs = zip(self.asks, self.rules, strict=True)
        names = [(ask, n) for ask, rule in pairs if rule and rule.whole for n in rule.windows]
        return sum(ask.values[name].bytes for ask, name in names)

    def fetches(self) -> list[Fetches]:
        """The exchanges of one forward: what every rank has, and what it wants, in pieces."""
        return [fetch for at in range(len(self.rules)) for fetch in self.fetches_of(at).values()]

    def fetches_of(self, at: int) -> dict[str, Fetches]:
        """The exchanges of one call, by the value that is fetched."""
        rule, found = self.rules[at], {}
        for name, spans in self.wants[at].items() if rule else ():
            layout = self.layouts[name]
            if rule and rule.circular:
                found[name] = (layout.boxes(), [boxes for _, boxes in around(layout, spans)])
                continue
            wanted = clipped(spans, layout)
            if wanted == layout.have:  # as in most layers
                continue
            have, want = layout.boxes(), layout.boxes(wanted)
            if any(w not in h for w, h in zip(want, have, strict=True)):
                found[name] = (have, [want])
        return found


def _times(layout: Layout) -> float:
    own = sum(box.size for box in layout.own_boxes())
    return sum(box.size for box in layout.boxes()) / own if own else 1.0


def lay_out(
    record: Record,
    model: nn.Module,
    calls: Sequence[Call],
    entering: Mapping[str, Layout],
    draws: Draws,
    *,
    fused: int = 1,
    given: Mapping[str, Layout] | None = None,
    wanted: Iterable[str] | None = None,
    gathers: bool = True,
) -> Laid:
    """How `calls` run when the values that enter are cut like this.

    What enters is delivered with all that is read of it; what is `given` is as it is. `fused` is
    how many layers in a row fetch together: 1 is d1, more is d2. If only some values are `wanted`,
    of the others nobody has more than these need, not even his own cells. A call without a layer
    rule `gathers` its inputs and runs whole on every rank, or raises `Uncuttable`.
    """
    cut, laid = {**entering, **(given or {})}, None
    # Perhaps a call takes a tensor whole that need not have been cut; gathering comes last.
    ways = [(True, False), (False, False), *([(True, True)] if gathers else [])]
    for at, (spread, gather) in enumerate(ways):
        with suppress(Uncuttable) if at < len(ways) - 1 else nullcontext():
            laid = _cut(record, model, calls, cut, draws, spread=spread, gathers=gather)
            break
    assert laid is not None
    _widen(laid, set(entering), set(given or ()), fused, wanted)
    return laid


def cheapest(make: Callable[[int], Laid], price: Price, most: int = 16) -> Laid:
    """The layout with the best number of layers that fetch together, by price."""
    choices = [1, 2, 3, 4, 6, 8, 12, 16]
    return min((make(n) for n in choices if n <= most), key=price)


def _cut(
    record: Record,
    model: nn.Module,
    calls: Sequence[Call],
    entering: Mapping[str, Layout],
    draws: Draws,
    *,
    spread: bool,
    gathers: bool,
) -> Laid:
    """With `spread`, a whole tensor that is made as large as a cut image is cut like it."""
    layouts = dict(entering)
    lent: set[str] = set()  # whole values that are made of gathered ones
    laid = Laid(list(calls), [], [], layouts)
    weights = {**record.parameters, **record.buffers}
    makers = {name: call for call in record.calls for name in call.writes}
    watched, changed = watched_names(model), {n for c in record.calls for n in c.overwrites}
    for call in calls:
        apart = _must_copy(call, record, changed)
        ask = Ask(call, model, record.values, layouts, weights, makers, draws, apart)
        try:
            _unwatched(call, watched)
            if ask.cut:
                _unhooked(call)
                _in_place(call)
                rule = _gathering(ask) if gathers else _rule(ask)
            else:
                _not_seen(call, layouts)
                rule = _spread(ask) if spread else None
                if rule is None and fallback.is_opaque(ask) and layouts:
                    rule = fallback.alone(ask)
                if rule is None and lent.intersection(call.reads):
                    rule = fallback.recut(ask)
        except NotTileable as why:
            raise Uncuttable(call, ask.name, str(why)) from why
        layouts.update(rule.outs if rule else {})
        if (rule is not None and rule.whole) or lent.intersection(call.reads):
            lent.update(name for name in call.writes if name not in layouts)
        laid.asks.append(ask)
        laid.rules.append(rule)
    return laid


def _must_copy(call: Call, record: Record, changed: set[str]) -> bool:
    """Whether a result was recorded as a copy, and it or its original is changed in place later.
    Strides of a tile may let `reshape` or `contiguous` give a view where the whole had to copy."""
    if not changed.intersection((*call.reads, *call.writes)) or call.mutates:
        return False
    read = {record.storages.get(name) for name in call.reads}
    return bool(call.outs) and not any(record.storages.get(n) in read for _, n in call.outs)


def _unwatched(call: Call, watched: set[str]) -> None:
    """A rank of a spatial group has a part of each weight gradient, which a hook takes for all."""
    if names := sorted(watched.intersection(call.attrs)):
        raise fallback.Shared(
            f"has a hook on the gradient of {names[0]}, of which each rank has a part; remove the "
            "hook, or change the gradient in a torch.autograd.Function around the layer"
        )


def _unhooked(call: Call) -> None:
    """A gathered copy of a tensor is not what later calls read: a hook on it would never run."""
    if call.function is torch.Tensor.register_hook:
        raise fallback.Shared(
            "puts a hook on a tensor of which each rank has a tile; remove the hook, or change the "
            "gradient in a torch.autograd.Function around the layer"
        )


def _in_place(call: Call) -> None:
    """A change in place reaches all that see the memory; here only the value itself may. What sees
    it and is not read any more has no version after the change."""
    if len({old for old, _ in call.mutates}) > 1:
        raise fallback.Shared("changes in place what is also seen as another tensor")


def _not_seen(call: Call, layouts: Mapping[str, Layout]) -> None:
    """What is whole may be changed in place if nobody has a part of its memory."""
    if any(name in layouts for name in call.overwrites):
        raise fallback.Shared("changes in place what is also seen as a cut tensor")


def _spread(ask: Ask) -> Rule | None:
    """How a call that reads nothing cut makes a tensor that is; most make none."""
    if ask.make is None or ask.make not in SPREADS:
        return None
    try:
        return ask.make(ask)
    except NotTileable:
        return None


def _gathering(ask: Ask) -> Rule:
    """The layer rule, or if there is none, the call on gathered inputs."""
    try:
        return _rule(ask)
    except fallback.Shared:
        raise
    except NotTileable as why:
        return fallback.gathered(ask, str(why))


def _rule(ask: Ask) -> Rule:
    make = ask.make
    owner = getattr(ask.call.function, "__self__", None)
    if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
        raise NotTileable("is an autograd function; what its backward looks at is not known")
    if ask.module is not None and observed(ask.module):
        raise NotTileable("carries hooks, which expect to see the whole tensor")
    if make is None:
        if not ask.call.pointwise:
            raise NotTileable("is not a layer that is known to have an exact cut")
        if ask.call.random:
            raise NotTileable("draws random numbers for a part of a tensor")
        return elementwise.pointwise(ask)
    return make(ask)


def _widen(
    laid: Laid, entering: set[str], given: set[str], fused: int, wanted: Iterable[str] | None
) -> None:
    """What every rank must hold of every value, from the last call to the first."""
    segments = _segments(laid, fused)
    made_in = {n: s for call, s in zip(laid.calls, segments, strict=True) for n in call.writes}
    have = {n: (x.have if n in given else x.own) for n, x in laid.layouts.items()}
    if wanted is not None:
        kept = set(wanted)
        have = {n: x if n in kept else _nothing(x) for n, x in have.items()}
    wants: list[dict[str, Spans]] = [{} for _ in laid.calls]
    for at in reversed(range(len(laid.calls))):
        rule = laid.rules[at]
        if rule is None:
            continue
        out: Spans = ()
        for name in rule.outs:
            out = hulls(out, have[name]) if out else have[name]
        have.update(dict.fromkeys(rule.outs, out))
        for name, windows in rule.windows.items():
            layout = laid.layouts[name]
            own = windows == OWN
            wants[at][name] = want = layout.own if own else read(out, windows)
            # Whoever sends what enters the stage, or makes it in this run, gives all that is read.
            if name in entering or made_in.get(name) == segments[at]:
                have[name] = hulls(have[name], clipped(want, layout))
    for rule in laid.rules:  # a change in place leaves the memory as large as it was
        have.update({new: have[old] for old, new in (rule.back if rule else ())})
    for name, layout in laid.layouts.items():
        laid.layouts[name] = replace(layout, have=have[name])
    laid.wants = wants


def _nothing(spans: Spans) -> Spans:
    return tuple(tuple((0, 0) for _ in row) for row in spans)


def _segments(laid: Laid, fused: int) -> list[int]:
    """Numbers the runs of calls in which only the first layer fetches."""
    found, segment, wide = [], 0, 0
    for rule in laid.rules:
        reads = rule is not None and any(
            not isinstance(w, (Same, Broadcast)) for ws in rule.windows.values() for w in ws
        )
        if reads or fused <= 1:
            wide += 1
            if wide > fused:
                segment, wide = segment + 1, 1
        found.append(segment)
    return found


# --- one part after the other -------------------------------------------------------------------


def unstreamable(call: Call, rule: Rule | None) -> str | None:
    """Why the parts of an image cannot run through a call one after the other; None if they can.

    A sum or a mean over the image adds up part by part: it may be the last call, which `ends` says.
    """
    if call.touches:
        return f"changes {', '.join(call.touches)}, once for every part"
    if rule is None:
        return None
    if rule.sums or any(windows == OWN for windows in rule.windows.values()):
        return "looks at the whole image, which is never there at once"
    return "reads the far end of the image beside the near one" if rule.circular else None


def ends(call: Call, rule: Rule | None) -> bool:
    """Whether a call's results add up over the parts of an image, so that parts may end there."""
    return rule is not None and rule.adds and not call.touches


def lay_out_alone(
    record: Record,
    model: nn.Module,
    calls: Sequence[Call],
    entering: Mapping[str, Layout],
    draws: Draws,
    wanted: Iterable[str],
) -> Laid:
    """How `calls` run if every part is computed from what enters, and nobody is asked for more."""
    fused = len(calls) + 1
    laid = lay_out(record, model, calls, entering, draws, fused=fused, wanted=wanted, gathers=False)
    read = {name for call in calls for name in call.reads}
    for call, ask, rule in zip(calls, laid.asks, laid.rules, strict=True):
        if ends(call, rule) and not read.intersection(call.writes):
            laid.added.update(call.writes)
        elif (why := unstreamable(call, rule)) is not None:
            raise Uncuttable(call, ask.name, why)
    assert not laid.fetches(), "a part would have to ask another one"
    return laid


def one_part(laid: Laid, place: Sequence[int]) -> Laid:
    """A part of a layout by itself, as if there were no others."""

    def mine(spans: Spans) -> Spans:
        return tuple((row[at],) for row, at in zip(spans, place, strict=True))

    layouts = {
        name: replace(layout, own=mine(layout.own), have=mine(layout.have))
        for name, layout in laid.layouts.items()
    }
    wants = [{name: mine(spans) for name, spans in row.items()} for row in laid.wants]
    return replace(laid, layouts=layouts, wants=wants)


# --- bound to a rank ------------------------------------------------------------------------------


@dataclass
class Bound:
    """A stage on one rank of its team: what to call instead of each cut call."""

    team: SpatialGroup
    laid: Laid
    runs: dict[str, Run]
    memory: Notes

    def box(self, name: str) -> Box | None:
        """This rank's part of a value; None: all of it."""
        layout = self.laid.layouts.get(name)
        return None if layout is None else layout.boxes()[self.team.me]

    def somewhere_empty(self, name: str) -> bool:
        """Whether a rank of the spatial group has no cell of a value."""
        layout = self.laid.layouts.get(name)
        return layout is not None and any(box.empty for box in layout.boxes())


def bind(laid: Laid, team: SpatialGroup) -> Bound:
    memory, runs = Notes(), {}
    for ask, rule, wants in zip(laid.asks, laid.rules, laid.wants, strict=True):
        if rule is None:
            continue
        site = Site(team, ask, rule, laid.layouts, wants, memory)
        runs[ask.call.name] = _guarded(rule.bind(site), site, memory)
    return Bound(team, laid, runs, memory)


def _guarded(run: Run, site: Site, memory: Notes) -> Run:
    """A cut call with results of the recorded types, after which no slab is known any more.

    Autocast may run a layer in another precision than the parts that it was taken into. A layer on
    a tile without cells may give no cells of another shape. And a slab is known by its memory,
    which is somebody else's once its layer has run.
    """
    names = [name for _, name in site.call.outs]
    dtypes = [getattr(torch, site.ask.values[name].dtype) for name in names]
    shape = site.out().shape if names and site.rule.outs and site.out().empty else None
    named = site.ask.by_name

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if named is not None:
            args = (kwargs.pop(named),)
        found = run(*args, **kwargs)
        if memory.now is not None:
            memory.now.forget()
        if not isinstance(found, torch.Tensor):
            return found
        if shape is not None and found.shape != shape:
            found = found.new_zeros(shape) + 0 * found.sum()
        if site.ask.apart and any(_overlap(found, x) for x in (*args, *kwargs.values())):
            found = found.clone()
        return found if found.dtype == dtypes[0] else found.to(dtypes[0])

    return wrapped


def _overlap(a: torch.Tensor, b: Any) -> bool:
    return isinstance(b, torch.Tensor) and storage_of(a) == storage_of(b)


def spatial_dims(rank: int, grid: Sequence[int]) -> tuple[int, ...] | None:
    """The dims of a tensor (samples, channels, ...) that a grid of tiles cuts: the last ones."""
    if rank - 2 < len(grid):
        return None
    return tuple(range(rank - len(grid), rank))


def traffic(
    fetches: Iterable[tuple[Sequence[Box], list[tuple[Box, ...]]]],
) -> list[tuple[int, int]]:
    """Messages and cells that each rank sends in forward for these fetches, as geometry says."""
    found: list[list[int]] = []
    for have, pieces in fetches:
        found = found or [[0, 0] for _ in have]
        pairs = set()
        for move in (move for want in pieces for move in moves(have, want)):
            if move.source != move.target:
                pairs.add((move.source, move.target))
                found[move.source][1] += move.box.size
        for source, _ in pairs:
            found[source][0] += 1
    return [(a, b) for a, b in found]
