"""Layer rules: how a recorded op runs on tiles, and the table of rules by the op's type.

A layer rule is a function of an `Op`: one op of the recorded graph, and how its inputs are tiled.
It gives a `Rule`: how the results are tiled, what each rank reads, and a function that writes the
op into the local graph of one rank. It raises `NotTileable` if there is no exact form; then every
rank gathers the inputs and runs the op whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from gems.geometry.box import Box
from gems.geometry.layout import Layout, Spans, read
from gems.geometry.window import Same, Window
from gems.keras.spatial.op import Op, shape_of
from gems.keras.tracing.subgraph import Tensor


class Tile(Protocol):
    """What a rule may ask of the local graph while it is written."""

    def read(self, t: Tensor, fill: float | None = None) -> Tensor:
        """What this rank reads of an input: a tile with its halos. With `fill` also where that
        lies beyond the border of the image. Whole values as they are."""
        ...

    def bordered(self, x: Tensor, pads: Sequence[tuple[int, int]], fill: float = 0.0) -> Tensor:
        """With cells of `fill` before and after along each dim, a copy that is not saved."""
        ...

    def span(self, t: Tensor, axis: int) -> tuple[int, int]:
        """The cells that this rank reads of a tiled input along an axis of the grid, border and
        all."""
        ...

    def box(self, t: Tensor) -> Box:
        """This rank's part of a tiled result."""
        ...

    def cut(self, t: Tensor, layout: Layout) -> Tensor:
        """This rank's part of a whole value, if it is as long as the image where that is tiled."""
        ...

    def copied(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The recorded op, on other inputs."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the spatial group."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """The values of all ranks, one behind the other along a new first dim; no gradient."""
        ...


Write = Callable[[Tile], Sequence[Tensor]]


@dataclass(frozen=True)
class Rule:
    """How one op runs on tiles. Results that are not in `outs` are whole on every rank.

    `wants` has, for each tiled input, what each row and column of the grid reads, beyond the border
    of the image too. `sums` numbers are all-reduced, in `totals` collectives. `covers` are later
    ops that this one runs as well; the results are then those of the last of them.
    """

    outs: dict[str, Layout]
    wants: dict[str, Spans]
    write: Write
    sums: int = 0
    totals: int = 0
    covers: tuple[str, ...] = ()
    gathers: str | None = None  # why every rank gathers the inputs and runs all of the op


MakeRule = Callable[[Op], Rule]
RULES: dict[str, MakeRule] = {}


def rule(*types: str) -> Callable[[MakeRule], MakeRule]:
    """Enter a layer rule into the table, for ops of these types."""

    def enter(make: MakeRule) -> MakeRule:
        RULES.update(dict.fromkeys(types, make))
        return make

    return enter


# --- rules that many ops share --------------------------------------------------------------------


def same(layout: Layout) -> tuple[Window, ...]:
    return (Same(),) * len(layout.dims)


def one_input(
    op: Op,
    x: Tensor,
    windows: Sequence[Window],
    write: Write,
    dims: Sequence[int] | None = None,
    last: Tensor | None = None,
    covers: tuple[str, ...] = (),
) -> Rule:
    """A rule for an op with one tiled input. The result follows its tiles along `dims`, which are
    those of the input unless given; `last` is the result if it is another op's."""
    layout, out = op.only(x), op.out if last is None else last
    made = layout.follow(shape_of(out), layout.dims if dims is None else tuple(dims), windows)
    return Rule({out.name: made}, {x.name: read(made.own, windows)}, write, covers=covers)


def everything(layout: Layout) -> Spans:
    """All of a tensor, wanted by every rank."""
    return tuple(
        tuple((0, layout.shape[dim]) for _ in row)
        for row, dim in zip(layout.own, layout.dims, strict=True)
    )
