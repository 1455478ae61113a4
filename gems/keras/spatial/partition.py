"""A stage over a grid of tiles: how every value is tiled, and who reads what of whom; integers.

Every rank holds its own cells, and each layer exchanges the halos that it reads beyond them (`d1`).
What enters the stage arrives with all that is read of it, since its sender can send that as well.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gems.geometry.box import Box, moves
from gems.geometry.layout import Layout, Spans, clipped, hulls
from gems.keras.spatial.gradients import own_gradient
from gems.keras.spatial.op import NotTileable, Op
from gems.keras.spatial.rule import RULES, Rule, Tile, everything
from gems.keras.spatial.rules import (  # noqa: F401
    concat,
    conv_pool,
    elementwise,
    padding,
    reductions,
    reshape,
    resize,
)
from gems.keras.tracing.subgraph import Tensor

FUNCTIONS = ("PartitionedCall", "StatefulPartitionedCall")  # of which one has a rule
Boxes = tuple[Box, ...]  # one per rank


class CannotRun(NotTileable):
    """An op that stops a layout, and why."""

    def __init__(self, op: Any, why: str) -> None:
        super().__init__(f"{op.name} ({op.type}) {why}")
        self.op = op.name


@dataclass
class StageLayout:
    """How every value of a stage is tiled over a grid, and what every op reads; for all ranks."""

    grid: tuple[int, ...]
    ops: list[Any]
    layouts: dict[str, Layout]  # of tiled values; all others are whole on every rank
    rules: dict[str, Rule] = field(default_factory=dict)  # by the op's name
    covered: set[str] = field(default_factory=set)  # ops that run as a part of another's rule
    collected: dict[str, Spans] = field(default_factory=dict)  # outputs that are gathered

    def layout(self, name: str) -> Layout | None:
        """Of a value as the stage gives it to others."""
        return None if name in self.collected else self.layouts.get(name)

    def exchanges_of(self, op: Any) -> dict[str, tuple[Boxes, Boxes]]:
        """The halo exchanges of an op: for each value, what all ranks have, and what they want."""
        rule, found = self.rules.get(op.name), {}
        for name, spans in rule.wants.items() if rule else ():
            if (exchange := exchanged(self.layouts[name], spans)) is not None:
                found[name] = exchange
        return found

    def gathered(self) -> list[str]:
        """The ops that run whole on every rank, each with the reason."""
        found = {op.name: self.rules.get(op.name) for op in self.ops}
        return [f"{n} ({rule.gathers})" for n, rule in found.items() if rule and rule.gathers]

    def gathered_bytes(self) -> int:
        """Bytes of the whole inputs of these ops, which every rank has while they run."""
        names = {n for rule in self.rules.values() if rule.gathers for n in rule.wants}
        inputs = {t.name: t for op in self.ops for t in op.inputs if t.name in names}
        return sum(t.shape.num_elements() * t.dtype.size for t in inputs.values())


def lay_out(
    ops: Sequence[Any],
    entering: Mapping[str, Layout],
    grid: Sequence[int],
    forward: Collection[str],
    outputs: Sequence[str] = (),
    *,
    gathers: bool = True,
    rejects: bool = True,
) -> StageLayout:
    """How `ops` run when the values that enter are tiled like this. `outputs` are gathered at the
    end. Without `gathers` an op that has no exact form on tiles raises; with `rejects` one that
    could not run whole on every rank either."""
    laid = StageLayout(tuple(grid), list(ops), dict(entering))
    for op in ops:
        seen = Op(op, laid.layouts, forward)
        if op.name in laid.covered:
            continue
        rule = _rule(seen, gathers) if seen.tiled else None
        special = rule is not None and not rule.gathers and op.type in FUNCTIONS
        if rejects and not special and own_gradient(op):
            raise CannotRun(
                op,
                "is a function, or has a gradient of its own (tf.custom_gradient), which cannot be "
                "written for a tile",
            )
        if rule is None:
            continue
        laid.rules[op.name] = rule
        laid.covered.update(rule.covers)
        laid.layouts.update(rule.outs)
    laid.collected = {n: everything(laid.layouts[n]) for n in outputs if n in laid.layouts}
    _widen(laid, entering)
    return laid


def _rule(op: Op, gathers: bool) -> Rule:
    make = RULES.get(op.type)
    try:
        if make is None:
            raise NotTileable("has no exact form on tiles that is known")
        return make(op)
    except NotTileable as why:
        if not gathers:
            raise CannotRun(op.op, str(why)) from why
        return _gathered(op, f"{op.type} {why}")


def _gathered(op: Op, why: str) -> Rule:
    """Every rank gathers the inputs, and runs the op whole."""
    wants = {t.name: everything(op.layouts[t.name]) for t in op.tiled}

    def write(tile: Tile) -> list[Tensor]:
        return tile.copied([tile.read(t) for t in op.inputs])

    return Rule({}, wants, write, gathers=why)


def _widen(laid: StageLayout, entering: Mapping[str, Layout]) -> None:
    """What enters arrives with the halos that are read of it."""
    have = {name: layout.own for name, layout in entering.items()}
    for rule in laid.rules.values():
        if not rule.gathers:
            for name, spans in rule.wants.items():
                if name in have:
                    have[name] = hulls(have[name], clipped(spans, laid.layouts[name]))
    for name, spans in have.items():
        laid.layouts[name] = replace(laid.layouts[name], have=spans)


def exchanged(layout: Layout, spans: Spans) -> tuple[Boxes, Boxes] | None:
    """What each rank owns of a value, and what it wants, if that is more than some rank has."""
    want = layout.boxes(clipped(spans, layout))
    if all(w in h for w, h in zip(want, layout.boxes(), strict=True)):
        return None
    return layout.own_boxes(), want


def halo_cells(have: Boxes, want: Boxes) -> int:
    """Cells that ranks send each other in an exchange."""
    return sum(m.box.size for m in moves(have, want) if m.source != m.target)
