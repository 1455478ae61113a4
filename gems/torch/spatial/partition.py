"""A stage over a grid of tiles: how every value is tiled, and who reads what of whom.

Two passes over the recorded calls. Forward: the layer rules give the layouts of the results.
Backward: how much more than its own cells a rank must hold.

With `d1` a rank holds its own cells, and every layer exchanges the halos that it reads beyond them.
With `d2` a run of layers exchanges halos once, wide enough for the last layer, and ranks compute
the overlap twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from gems.geometry.box import Box, moves
from gems.geometry.layout import Layout, Spans, around, clipped, hulls, read
from gems.geometry.window import Same
from gems.torch.spatial.computed_weights import observed, watched_names
from gems.torch.spatial.op import NotTileable, Op
from gems.torch.spatial.rule import FROM_WHOLE, OWN, Rule, rule_of
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
from gems.torch.tensors.rng import Draws
from gems.torch.tracing.calls import Call, Record

Boxes = tuple[Box, ...]  # one per rank
Exchange = tuple[Boxes, list[Boxes]]  # what all ranks have; what they want, in one or more boxes
Price = Callable[["StageLayout"], float]


class CallNotTileable(Exception):
    """A call without an exact form on tiles, and why."""

    def __init__(self, call: Call, kind: str, why: str) -> None:
        super().__init__(f"{call.name} ({kind}) {why}")
        self.call = call


@dataclass
class StageLayout:
    """How every value of a stage is tiled over a grid, and what every call reads; for all ranks."""

    calls: list[Call]
    ops: list[Op]
    rules: list[Rule | None]  # None: whole on every rank
    layouts: dict[str, Layout]
    wants: list[dict[str, Spans]] = field(default_factory=list)
    added: set[str] = field(default_factory=set)  # whole values of which every tile has a summand

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
            f"{call.name} ({op.name}) {rule.gathers}"
            for call, op, rule in zip(self.calls, self.ops, self.rules, strict=True)
            if rule is not None and rule.gathers
        ]

    def gathered_bytes(self) -> int:
        """Bytes of the whole inputs of these calls, which every rank has while they run."""
        pairs = zip(self.ops, self.rules, strict=True)
        names = [(op, n) for op, rule in pairs if rule and rule.gathers for n in rule.windows]
        return sum(op.values[name].bytes for op, name in names)

    def exchanges(self) -> list[Exchange]:
        """The halo exchanges of one forward."""
        return [found for at in range(len(self.rules)) for found in self.exchanges_of(at).values()]

    def exchanges_of(self, at: int) -> dict[str, Exchange]:
        """The halo exchanges of one call, by the value that is read."""
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
) -> StageLayout:
    """How `calls` run when the values that enter are tiled like this.

    What enters arrives with all that is read of it; what is `given` is as it is. `fused` is how
    many layers in a row share one halo exchange: 1 is d1, more is d2. If only some values are
    `wanted`, ranks have of the others no more than these need, not even their own cells. A call
    without a layer rule `gathers` its inputs and runs whole on every rank, or raises
    `CallNotTileable`.
    """
    tiled, laid = {**entering, **(given or {})}, None
    # A call may take a tensor whole that need not have been tiled; gathering is the last resort.
    ways = [(True, False), (False, False), *([(True, True)] if gathers else [])]
    for at, (from_whole, gather) in enumerate(ways):
        with suppress(CallNotTileable) if at < len(ways) - 1 else nullcontext():
            laid = _tiled(record, model, calls, tiled, draws, from_whole=from_whole, gathers=gather)
            break
    assert laid is not None
    widen(laid, set(entering), set(given or ()), fused, wanted)
    return laid


def cheapest(make: Callable[[int], StageLayout], price: Price, most: int = 16) -> StageLayout:
    """The layout with the best number of layers that share a halo exchange, by price."""
    choices = [1, 2, 3, 4, 6, 8, 12, 16]
    return min((make(n) for n in choices if n <= most), key=price)


def _tiled(
    record: Record,
    model: nn.Module,
    calls: Sequence[Call],
    entering: Mapping[str, Layout],
    draws: Draws,
    *,
    from_whole: bool,
    gathers: bool,
) -> StageLayout:
    """With `from_whole`, a tensor that is made as large as a tiled image is tiled like it."""
    layouts = dict(entering)
    regathered: set[str] = set()  # whole values that are made of gathered ones
    laid = StageLayout(list(calls), [], [], layouts)
    weights = {**record.parameters, **record.buffers}
    producers = {name: call for call in record.calls for name in call.writes}
    watched, changed = watched_names(model), {n for c in record.calls for n in c.overwrites}
    for call in calls:
        copies = _must_copy(call, record, changed)
        op = Op(call, model, record.values, layouts, weights, producers, draws, copies)
        op = op if rule_of(op) is None else op.input_first()
        try:
            _unwatched(call, watched)
            if op.tiled:
                _unhooked(call)
                _in_place(call)
                rule = _gathering(op) if gathers else _rule(op)
            else:
                _not_seen(call, layouts)
                rule = _from_whole(op) if from_whole else None
                if rule is None and fallback.is_opaque(op) and layouts:
                    rule = fallback.on_whole_values(op)
                if rule is None and regathered.intersection(call.reads):
                    rule = fallback.retiled(op)
        except NotTileable as why:
            raise CallNotTileable(call, op.name, str(why)) from why
        layouts.update(rule.outs if rule else {})
        if (rule is not None and rule.gathers) or regathered.intersection(call.reads):
            regathered.update(name for name in call.writes if name not in layouts)
        laid.ops.append(op)
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
        raise fallback.NotGatherable(
            f"has a hook on the gradient of {names[0]}, of which each rank has a part; remove the "
            "hook, or change the gradient in a torch.autograd.Function around the layer"
        )


def _unhooked(call: Call) -> None:
    """A gathered copy of a tensor is not what later calls read: a hook on it would never run."""
    if call.function is torch.Tensor.register_hook:
        raise fallback.NotGatherable(
            "puts a hook on a tensor of which each rank has a tile; remove the hook, or change the "
            "gradient in a torch.autograd.Function around the layer"
        )


def _in_place(call: Call) -> None:
    """A change in place reaches all that see the memory; here only the value itself may. What sees
    it and is not read any more has no version after the change."""
    if len({old for old, _ in call.mutates}) > 1:
        raise fallback.NotGatherable("changes in place what is also seen as another tensor")


def _not_seen(call: Call, layouts: Mapping[str, Layout]) -> None:
    """What is whole may be changed in place if nobody has a part of its memory."""
    if any(name in layouts for name in call.overwrites):
        raise fallback.NotGatherable("changes in place what is also seen as a tiled tensor")


def _from_whole(op: Op) -> Rule | None:
    """How a call that reads no tiled tensor makes one; most make none."""
    make = rule_of(op)
    if make is None or make not in FROM_WHOLE:
        return None
    try:
        return make(op)
    except NotTileable:
        return None


def _gathering(op: Op) -> Rule:
    """The layer rule, or if there is none, the call on gathered inputs."""
    try:
        return _rule(op)
    except fallback.NotGatherable:
        raise
    except NotTileable as why:
        return fallback.gathered(op, str(why))


def _rule(op: Op) -> Rule:
    make = rule_of(op)
    owner = getattr(op.call.function, "__self__", None)
    if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
        raise NotTileable("is an autograd function; what its backward looks at is not known")
    if op.module is not None and observed(op.module):
        raise NotTileable("carries hooks, which expect to see the whole tensor")
    if make is None:
        if not op.call.pointwise:
            raise NotTileable("is not a layer that is known to have an exact form on tiles")
        if op.call.random:
            raise NotTileable("draws random numbers for one tile of a tensor")
        return elementwise.pointwise(op)
    return make(op)


def widen(
    laid: StageLayout, entering: set[str], given: set[str], fused: int, wanted: Iterable[str] | None
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
            # The sender of what enters, or the maker in the same run, provides all that is read.
            if name in entering or made_in.get(name) == segments[at]:
                have[name] = hulls(have[name], clipped(want, layout))
    for rule in laid.rules:  # a change in place leaves the memory as large as it was
        have.update({new: have[old] for old, new in (rule.in_place if rule else ())})
    for name, layout in laid.layouts.items():
        laid.layouts[name] = replace(layout, have=have[name])
    laid.wants = wants


def _nothing(spans: Spans) -> Spans:
    return tuple(tuple((0, 0) for _ in row) for row in spans)


def _segments(laid: StageLayout, fused: int) -> list[int]:
    """Numbers the runs of calls that share one halo exchange, before the first layer."""
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


def spatial_dims(rank: int, grid: Sequence[int]) -> tuple[int, ...] | None:
    """The dims of a tensor (samples, channels, ...) that a grid of tiles cuts: the last ones."""
    if rank - 2 < len(grid):
        return None
    return tuple(range(rank - len(grid), rank))


def traffic(exchanges: Iterable[Exchange]) -> list[tuple[int, int]]:
    """Messages and cells that each rank sends in forward for these exchanges, by geometry."""
    found: list[list[int]] = []
    for have, wanted in exchanges:
        found = found or [[0, 0] for _ in have]
        pairs = set()
        for move in (move for want in wanted for move in moves(have, want)):
            if move.source != move.target:
                pairs.add((move.source, move.target))
                found[move.source][1] += move.box.size
        for source, _ in pairs:
            found[source][0] += 1
    return [(a, b) for a, b in found]
