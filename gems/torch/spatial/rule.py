"""Layer rules: how a recorded call runs on tiles, and the table of rules by function and module.

A layer rule is a function of an `Op`: one call, and how its inputs are tiled. It gives a `Rule`:
how the results are tiled, what each output reads, and a function of a `Tile` that makes what to
call instead of the recorded call. It raises `NotTileable` if there is no exact form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from gems.geometry.layout import Layout
from gems.geometry.window import Same, Window
from gems.torch.spatial.computed_weights import plain_type
from gems.torch.spatial.op import Op, Run
from gems.torch.spatial.tile import OWN as OWN
from gems.torch.spatial.tile import Tile

Tensor = torch.Tensor


@dataclass(frozen=True)
class Split:
    """A call in two parts, for tiles that run one after the other: between them, all have run.

    ::

        x ──► part, of each tile ──► summands ──► merged ──► finish, once ──► rest, of each tile
        │                                                                       ▲
        └────────────────────── x again, which is stored ───────────────────────┘

    `part(*args)` gives a tuple of summands of the own cells, of these shapes and types: they are
    added, or with `moments`, merged as counts, means and sums of squares around them.
    `finish(sums, *args)` has None in place of tiled inputs. It gives the call's results, unless
    there is a `rest(finished, *args)`, which does; `finished` has the shape of the first summand.

    `early(*args)`, with None in place of what has a gradient, gives all summands but the first, and
    `finish` multiplies the first by a number: its gradient is known before any tile has run `part`.
    """

    sums: tuple[tuple[tuple[int, ...], str], ...]
    part: Callable[[Tile], Run]
    finish: Run
    rest: Callable[[Tile], Run] | None = None
    moments: bool = False
    relative: bool = False  # `Rule.relative` of `part` and `rest`
    early: Callable[[Tile], Run] | None = None


@dataclass
class Rule:
    """How one call runs on tiles. Results that are not in `outs` are whole: all of them on every
    rank.

    `windows` has, for each tiled input, one window per axis of the grid, or `OWN`. `bind` makes
    what to call instead. `sums` numbers go from every rank to every other, forward and backward.
    """

    outs: dict[str, Layout]
    windows: dict[str, tuple[Window, ...]]
    bind: Callable[[Tile], Run]
    circular: bool = False  # what leaves the image at one end is read at the other
    sums: int = 0
    additive: bool = False  # the results are sums over the cells of the image
    gathers: str | None = None  # why every rank gathers the inputs and runs all of the call
    in_place: tuple[tuple[str, str], ...] = ()  # tiled values changed in place: before, and after
    split: Split | None = None  # how tiles run that do not run at the same time
    relative: bool = False  # tiles run the same whose boxes are alike, seen from their first cells


MakeRule = Callable[[Op], Rule]
FUNCTIONS: dict[str, MakeRule] = {}
MODULES: dict[type[nn.Module], MakeRule] = {}
FROM_WHOLE: set[MakeRule] = set()


def rule(
    functions: Iterable[str] = (), modules: Iterable[type[nn.Module]] = (), from_whole: bool = False
) -> Callable[[MakeRule], MakeRule]:
    """Enter a layer rule into the table, for calls of these functions and modules.

    One that works `from_whole` is also used for calls that read no tiled tensor, but may make one.
    """

    def enter(make: MakeRule) -> MakeRule:
        if from_whole:
            FROM_WHOLE.add(make)
        FUNCTIONS.update(dict.fromkeys(functions, make))
        MODULES.update(dict.fromkeys(modules, make))
        return make

    return enter


def rule_of(op: Op) -> MakeRule | None:
    """The rule in the table, if there is one."""
    if op.module is not None:
        return MODULES.get(plain_type(op.module))
    return FUNCTIONS.get(op.name)


# --- rules that many layers share -----------------------------------------------------------------


def same(layout: Layout) -> tuple[Window, ...]:
    return (Same(),) * len(layout.dims)


def one_input(
    op: Op, x: Any, bind: Callable[[Tile], Run], windows: Sequence[Window] | None = None,
    dims: Sequence[int] | None = None, circular: bool = False,
) -> Rule:  # fmt: skip
    """A rule for a call with one tiled input. The results follow its tiles along `dims`, which are
    those of the input unless given; without `windows` each cell is read at its own position."""
    layout = op.primary(x)
    windows = same(layout) if windows is None else tuple(windows)
    dims = layout.dims if dims is None else tuple(dims)
    outs = {name: layout.follow(op.shape(name), dims, windows) for name in op.call.writes}
    return Rule(outs, {x.name: windows}, bind, circular=circular)


def unchanged(op: Op, x: Any, dims: Sequence[int] | None = None) -> Rule:
    """A call that mixes no cells along tiled dims: the recorded call on this rank's tile."""

    def bind(tile: Tile) -> Run:
        # Some layers, such as instance norm, do not take a tile without cells.
        empty = len(op.call.writes) == 1 and tile.out().empty
        return tile.mapped(_nothing(tile) if empty else tile.original, tile.with_halo)

    return replace(one_input(op, x, bind, dims=dims), relative=True)


def _nothing(tile: Tile) -> Run:
    """The result of a rank without cells."""
    weights = () if tile.op.module is None else tuple(tile.op.module.parameters())

    def work(*args: Any, **kwargs: Any) -> Tensor:
        given = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        return tile.nothing(*given, *weights)

    return work
