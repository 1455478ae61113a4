"""A streamed stage: the patches of an image run through it one after another, in sweeps.

A patch cannot see the others. So a sweep ends where all of the image is needed: at a norm in
training mode, a mean over the image, a loss. Each patch gives its summand there (rule.py, `Split`
and `additive`), and the next sweep begins with what they sum up to.

    whole calls  ──►  sweep 0  ──►  sums  ──►  whole calls  ──►  sweep 1  ──►  ...
                        │                                          ▲
                        └─ values that the next sweeps read ───────┘  stored whole

Which call runs in which sweep is decided by gems/model/sweeps.py. Calls on values that are whole
run once, before the sweep.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

from gems.geometry.layout import Layout, Spans, clip, hulls, nested, together
from gems.model.graph import Value
from gems.model.sweeps import Step, assign
from gems.torch.spatial.carried_layout import exchanged, lay_out_carried
from gems.torch.spatial.op import Op, Run
from gems.torch.spatial.partition import CallNotTileable, StageLayout, lay_out, widen
from gems.torch.spatial.rule import OWN, Rule, Split
from gems.torch.spatial.tile import Tile
from gems.torch.tensors.rng import Draws
from gems.torch.tensors.strides import row_major
from gems.torch.tracing.calls import Call, Record, Ref, is_placeholder


def unstreamable(call: Call, rule: Rule | None) -> str | None:
    """Why the patches of an image cannot run through a call one after another; None if they can."""
    if rule is None:
        return None  # on whole values, once
    if rule.split is not None:
        return None  # also if it keeps running statistics
    if call.touches:
        return f"changes {', '.join(call.touches)}, once for every patch"
    if rule.additive:
        return None
    if rule.sums or any(windows == OWN for windows in rule.windows.values()):
        return "looks at the whole image, which is never in memory at once"
    return "reads the far end of the image beside the near one" if rule.circular else None


def joined(rule: Rule | None) -> int:
    """As in `Block.joins`: whether a call's results need all patches, and whether it then reads
    them again."""
    if rule is None or rule.split is None:
        return int(rule is not None and rule.additive)
    return 1 if rule.split.rest is None else 2


@dataclass
class Sweep:
    """Calls on whole values, then calls that every patch runs."""

    before: list[Call] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    rules: list[Rule | None] = field(default_factory=list)
    laid: StageLayout = field(default_factory=lambda: StageLayout([], [], [], {}))


@dataclass
class StreamLayout:
    """The sweeps of a streamed stage, over patches that are `tiles` x `patches`.

    `layouts` has the cells of each tiled value that each patch makes. `record` knows the sums and
    calls that the stage adds to those of the model, `added` the values of which every patch has a
    summand, and `moments` those of them that are merged as such. `early` gives summands of a sweep
    before it runs (`Split`); `measuring` are the moments of values that the sweep itself makes.
    Patches that `carry` hand on what later ones read, instead of computing it again.
    """

    record: Record
    tiles: tuple[int, ...]
    patches: tuple[int, ...]
    layouts: dict[str, Layout]
    sweeps: list[Sweep]
    added: set[str] = field(default_factory=set)
    moments: set[str] = field(default_factory=set)
    finish: dict[str, Run] = field(default_factory=dict)  # what added calls run, by name
    early: dict[int, Sweep] = field(default_factory=dict)
    measuring: dict[int, Sweep] = field(default_factory=dict)
    carry: bool = False

    def tiled(self, wanted: Iterable[str]) -> dict[str, Layout]:
        """What each rank has of every tiled value that lives longer than a sweep, over the axes of
        the grid that are cut: its tile, with the halo that its patches read."""
        found: dict[str, Layout] = {}
        real = [k for k, n in enumerate(self.tiles) if n > 1]
        wanted = set(wanted)
        for sweep in self.sweeps:
            made = {name for call in sweep.calls for name in call.writes}
            for name, read in sweep.laid.layouts.items():
                own, have = together(read.own, self.patches), together(read.have, self.patches)
                if name in made:
                    have = own
                elif name in wanted:
                    have = hulls(have, own)
                if name in found:
                    have = hulls(have, found[name].have)
                found[name] = Layout(read.shape, read.dims, own, have)
        return {name: _over(layout, real) for name, layout in found.items()}

    @property
    def crossing(self) -> set[str]:
        """The tiled values that one sweep makes and another reads."""
        found: set[str] = set()
        made: set[str] = set()
        for sweep in self.sweeps:
            found |= made.intersection(n for call in sweep.calls for n in call.reads)
            made |= {n for call in sweep.calls for n in call.writes if n in self.layouts}
        return found

    def boundary(self, wanted: Iterable[str]) -> dict[str, Layout]:
        """The same for what enters the stage and leaves it: what it makes is sent without halos."""
        made = {name for sweep in self.sweeps for call in sweep.calls for name in call.writes}
        tiled = self.tiled(wanted)
        return {n: replace(x, have=x.own) if n in made else x for n, x in tiled.items()}


def _over(layout: Layout, axes: Sequence[int]) -> Layout:
    """Without the axes of the grid that have one tile."""
    dims = tuple(layout.dims[k] for k in axes)
    own, have = (tuple(spans[k] for k in axes) for spans in (layout.own, layout.have))
    return Layout(layout.shape, dims, own, have)


def lay_out_patches(
    record: Record,
    model: nn.Module,
    calls: Sequence[Call],
    entering: Mapping[str, Layout],
    draws: Draws,
    wanted: Iterable[str],
    patches: Sequence[int] | None = None,
    given: Mapping[str, Layout] | None = None,
    *,
    carry: bool = False,
) -> StreamLayout:
    """How `calls` run if every patch is computed from what enters each sweep; if patches `carry`,
    also from halos of the patches before it.

    `entering` are tiles, which are divided into `patches` each; or patches already, as those that
    are `given` are.
    """
    grid = next(iter(entering.values())).grid
    tiles = grid if patches is not None else (1,) * len(grid)
    parts = tuple(patches) if patches is not None else grid
    fine = entering if patches is None else {n: nested(x, parts) for n, x in entering.items()}
    fine = {**fine, **(given or {})}
    laid = lay_out(record, model, calls, fine, draws, gathers=False)
    for call, op, rule in zip(laid.calls, laid.ops, laid.rules, strict=True):
        if (why := unstreamable(call, rule)) is not None:
            raise CallNotTileable(call, op.name, why)
    _reject_changing_buffers(laid)
    layouts = {name: replace(x, have=x.own) for name, x in laid.layouts.items()}
    found = StreamLayout(record, tiles, parts, layouts, [], carry=carry)
    wanted = set(wanted)
    _Sorter(found, laid).sort(wanted)
    for at, sweep in enumerate(found.sweeps):
        later = wanted.union(*(call.reads for s in found.sweeps[at + 1 :] for call in s.calls))
        sweep.laid = _swept(found, sweep, later)
        if (measuring := _measuring(found, sweep)) is not None:
            found.measuring[at] = measuring
    for sweep in (*found.early.values(), *found.measuring.values()):
        sweep.laid = _swept(found, sweep, wanted)
    return found


def _reject_changing_buffers(laid: StageLayout) -> None:
    """Patches run again in backward, and read buffers as they are then."""
    changes = {name: call for call in laid.calls for name in call.touches}
    for call, op, rule in zip(laid.calls, laid.ops, laid.rules, strict=True):
        for name in changes.keys() & set(call.attrs) - set(call.touches):
            if rule is not None:
                why = f"reads {name}, which {changes[name].name} changes before patches run again"
                raise CallNotTileable(call, op.name, why)


def _measuring(found: StreamLayout, sweep: Sweep) -> Sweep | None:
    """The moments of values that a sweep makes itself."""
    made = {name for call in sweep.calls for name in call.writes}
    one = Sweep()
    for call, op, rule in zip(sweep.calls, sweep.ops, sweep.rules, strict=True):
        reads = set(call.reads)
        alone = rule is not None and reads == rule.windows.keys() and call.region is None
        if alone and reads <= made and found.moments.issuperset(call.writes):
            one.calls.append(call)
            one.ops.append(op)
            one.rules.append(rule)
    return one if one.calls else None


class _Sorter:
    """Gives every call to a sweep, and splits those that need sums."""

    def __init__(self, found: StreamLayout, laid: StageLayout) -> None:
        self.found, self.laid = found, laid
        self.values: dict[str, Value] = {}
        self.calls: list[Call] = []

    def sort(self, wanted: set[str]) -> None:
        laid, record = self.laid, self.found.record
        steps = [
            Step(call.reads, call.writes, call.overwrites, rule is not None, joined(rule))
            for call, rule in zip(laid.calls, laid.rules, strict=True)
        ]
        sizes = {name: float(value.bytes) for name, value in record.values.items()}
        places = assign(steps, sizes, wanted)
        for at, call, op, rule in zip(places, laid.calls, laid.ops, laid.rules, strict=True):
            if rule is None:
                self._sweep(at).before.append(call)
            elif rule.split is not None:
                self._split(at, call, op, rule, rule.split)
            else:
                self._add(at, call, op, rule)
                if rule.additive:
                    self.found.added.update(call.writes)
                    self._sweep(at + 1)
        self.found.record = record = replace(
            record, calls=[*record.calls, *self.calls], values={**record.values, **self.values}
        )
        for sweep in (*self.found.sweeps, *self.found.early.values()):
            sweep.ops = [replace(op, values=record.values) for op in sweep.ops]

    def _split(self, at: int, call: Call, op: Op, rule: Rule, split: Split) -> None:
        """Its part in this sweep; then what makes the results of the sums, and its rest."""
        names = [f"{call.name}:sum{k}" for k in range(len(split.sums))]
        grad = any(self.laid.ops[0].values[n].grad for n in call.writes)
        for name, (shape, dtype) in zip(names, split.sums, strict=True):
            self.values[name] = Value(name, shape, row_major(shape), dtype, grad)
        self.found.added.update(names)
        if split.moments:
            self.found.moments.update(names)
        outs: list[Any] = [((k,), name) for k, name in enumerate(names)]
        part = replace(
            call, name=f"{call.name}:part", outs=outs, touches=(), norms=(), mutates=[],
            overwrites=(),
        )  # fmt: skip
        ways = dict.fromkeys(rule.windows, OWN)
        self._add(at, part, op, Rule({}, ways, split.part, additive=True, relative=split.relative))
        if split.early is not None:
            self._early(at, part, op, split.early)
        given = tuple(map(Ref, names))
        tiled = set(rule.windows)
        args, kwargs = _without(call.args, tiled), _without(call.kwargs, tiled)
        reads = (*names, *(n for n in call.reads if n not in tiled))
        finish = replace(
            call, name=f"{call.name}:finish", args=(given, *args), kwargs=kwargs, reads=reads
        )
        if split.rest is not None:
            done = f"{call.name}:finished"
            self.values[done] = replace(self.values[names[0]], name=done)
            finish = replace(finish, outs=[((), done)])
            rest = replace(
                call, args=(Ref(done), *call.args), reads=(done, *call.reads), touches=(), norms=()
            )
            later = replace(rule, split=None, sums=0, relative=split.relative)
            self._add(at + 1, rest, op, replace(later, bind=split.rest))
        self.calls += [part, finish]
        self.found.finish[finish.name] = split.finish
        self._sweep(at + 1).before.append(finish)

    def _early(self, at: int, part: Call, op: Op, make: Callable[[Tile], Run]) -> None:
        values = self.laid.ops[0].values
        gone = {n for n in part.reads if values[n].grad}
        ways = dict.fromkeys((n for n in part.reads if n in op.layouts and n not in gone), OWN)
        (_, *outs), args, kwargs = part.outs, _without(part.args, gone), _without(part.kwargs, gone)
        outs = [((k,), name) for k, (_, name) in enumerate(outs)]
        reads = tuple(n for n in part.reads if n not in gone)
        call = replace(
            part, name=f"{part.name}:early", outs=outs, args=args, kwargs=kwargs, reads=reads
        )
        sweep = self.found.early.setdefault(at, Sweep())
        sweep.calls.append(call)
        sweep.ops.append(replace(op, call=call))
        sweep.rules.append(Rule({}, ways, make, additive=True))

    def _add(self, at: int, call: Call, op: Op, rule: Rule) -> None:
        sweep = self._sweep(at)
        sweep.calls.append(call)
        sweep.ops.append(replace(op, call=call))
        sweep.rules.append(rule)

    def _sweep(self, at: int) -> Sweep:
        while len(self.found.sweeps) <= at:
            self.found.sweeps.append(Sweep())
        return self.found.sweeps[at]


def _without(tree: Any, tiled: set[str]) -> Any:
    """Arguments, with None in place of tiled values."""
    return pytree.tree_map(
        lambda x: None if isinstance(x, Ref) and x.name in tiled else x, tree,
        is_leaf=is_placeholder,
    )  # fmt: skip


def _swept(found: StreamLayout, sweep: Sweep, later: set[str]) -> StageLayout:
    """One sweep: what each patch has of every value, from what is read later back to what
    enters."""
    made = {name for call in sweep.calls for name in call.writes}
    read = {name for call in sweep.calls for name in call.reads}
    layouts = {n: x for n, x in found.layouts.items() if n in made or n in read}
    laid = StageLayout(sweep.calls, sweep.ops, sweep.rules, layouts)
    if found.carry:
        laid = lay_out_carried(laid, found.patches, later)
        laid.added = found.added & made
        return laid
    entering = {n for n in layouts if n not in made}
    widen(laid, entering, set(), len(sweep.calls) + 1, made & later)
    laid.added = found.added & made
    assert not laid.exchanges(), "a patch would have to read another one"
    return laid


def alike(laid: StageLayout) -> tuple[tuple[int, ...], ...]:
    """A number for each position along each axis of the grid: the same where all boxes are alike,
    each seen from the first cell that a patch there has of the value, and what is exchanged."""
    layouts = laid.layouts
    found = []
    for axis, places in enumerate(next(iter(layouts.values())).own if layouts else ()):
        numbers: dict[tuple[Any, ...], int] = {}
        numbered = []
        for at in range(len(places)):
            spans = [(x.have[axis][at][0], x.have[axis][at]) for x in layouts.values()]
            spans += [(x.have[axis][at][0], x.own[axis][at]) for x in layouts.values()]
            for name, reads in (pair for row in laid.wants for pair in row.items()):
                layout, want = layouts[name], reads[axis][at]
                first = layout.have[axis][at][0]
                spans += [(first, want), (first, clip(want, layout.shape[layout.dims[axis]]))]
            key = tuple(n - first for first, span in spans for n in span)
            key = (key, *exchanged(laid, axis, at))
            numbered.append(numbers.setdefault(key, len(numbers)))
        found.append(tuple(numbered))
    return tuple(found)


def one_patch(
    laid: StageLayout, coordinate: Sequence[int], only: Collection[str] | None = None
) -> StageLayout:
    """One patch of a layout by itself, as if there were no others; with `only` some values, and
    without what calls read of them."""

    def mine(spans: Spans) -> Spans:
        return tuple((row[at],) for row, at in zip(spans, coordinate, strict=True))

    layouts = {
        name: replace(layout, own=mine(layout.own), have=mine(layout.have))
        for name, layout in laid.layouts.items()
        if only is None or name in only
    }
    rows = laid.wants if only is None else []
    wants = [{name: mine(spans) for name, spans in row.items()} for row in rows]
    return replace(laid, layouts=layouts, wants=wants)
