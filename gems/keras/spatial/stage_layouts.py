"""The layouts of a plan's tiled stages, and what each rank has of what crosses their boundaries."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from gems.distributed.transfer import whole
from gems.errors import PlanError
from gems.geometry.box import Box
from gems.geometry.grid import Grid
from gems.geometry.layout import Layout, even
from gems.keras.spatial.partition import CannotRun, StageLayout, lay_out
from gems.keras.tracing.record import Recording
from gems.model.graph import Value
from gems.plans.plan import Plan

log = logging.getLogger(__name__)
Dims = dict[str, tuple[int, ...]]


def image_dims(r: Recording) -> Dims:
    """The dims of the image in every value that is one: rows and columns, with depth before them.

    Channels may be last or first. One choice for all inputs of the model: the one with which more
    of its ops keep an image.
    """
    ops = [op for block in r.ops for op in block]
    found: list[Dims] = []
    for first in (1, 2):  # the first dim of the image: channels are last, or before it
        entering = {}
        for t in r.inputs:
            shape = tuple(t.shape.as_list())
            if len(shape) > 2:
                dims = tuple(range(first, first + len(shape) - 2))
                entering[t.name] = even(shape, dims, (1,) * len(dims))
        laid = _whole_image(r, ops, entering)
        found.append({name: layout.dims for name, layout in laid.layouts.items()})
    return max(found, key=len)


def _whole_image(r: Recording, ops: Sequence[Any], entering: Mapping[str, Layout]) -> StageLayout:
    return lay_out(ops, entering, (), r.forward, rejects=False)


def stage_layouts(
    r: Recording, stage_of: Sequence[int], plan: Plan, sent: Sequence[Sequence[str]]
) -> dict[int, StageLayout]:
    """By stage, for those on several tiles. The outputs of the model are gathered at its end, since
    its loss is one function of all of them."""
    found: dict[int, StageLayout] = {}
    if not any(grid.size > 1 and grid.tiles for grid in plan.grids):
        return found
    dims = image_dims(r)
    for stage, grid in enumerate(plan.grids):
        if grid.size > 1 and grid.tiles:
            found[stage] = _stage_layout(r, stage_of, stage, grid, dims, found, plan, sent[stage])
            _log_gathered(stage, grid, found[stage])
    return found


def _stage_layout(
    r: Recording,
    stage_of: Sequence[int],
    stage: int,
    grid: Grid,
    dims: Dims,
    before: Mapping[int, StageLayout],
    plan: Plan,
    sent: Sequence[str],
) -> StageLayout:
    blocks = [b for b, at in enumerate(stage_of) if at == stage]
    made = {name for b in blocks for name in r.graph.blocks[b].writes}
    read = [name for b in blocks for name in r.graph.blocks[b].reads] + list(sent)
    entering = {}
    for name in dict.fromkeys(read):
        layout = _entering(r.graph.value[name], grid, dims, _source(r, stage_of, name), before)
        if layout is not None and name not in made:
            entering[name] = layout
    ops = [op for b in blocks for op in r.ops[b]]
    real = tuple(n for n in grid.tiles if n > 1)
    ends = r.graph.outputs if stage == plan.depth - 1 else ()
    try:
        laid = lay_out(ops, entering, real, r.forward, ends)
    except CannotRun as error:
        raise PlanError(
            f"stage {stage} is cut {grid}, but {error}. Let the tiled stages end before this "
            "layer, or write it without: its gradient then follows from its ops"
        ) from error
    if not entering:
        raise PlanError(
            f"stage {stage} is cut {grid}, but reads no image of {len(grid.tiles)} dims; give a "
            "grid with as many axes as the images have, or let fewer stages be spatial"
        )
    return laid


def _source(r: Recording, stage_of: Sequence[int], name: str) -> int | None:
    """The stage that makes a value; none makes the model's inputs."""
    producer = r.graph.producer.get(name)
    return None if producer is None else stage_of[producer]


def _entering(
    value: Value,
    grid: Grid,
    dims: Dims,
    source: int | None,
    before: Mapping[int, StageLayout],
) -> Layout | None:
    """How a value that a stage reads is tiled on arrival; None: every rank gets all of it."""
    mine = dims.get(value.name, ())[-len(grid.tiles) :]
    if len(mine) < len(grid.tiles):
        return None
    pairs = [(d, n) for d, n in zip(mine, grid.tiles, strict=True) if n > 1]
    places, real = tuple(d for d, _ in pairs), tuple(n for _, n in pairs)
    if source is not None and source in before:
        earlier = before[source].layouts.get(value.name)
        if earlier is None:
            return None  # every rank of a tiled stage has all of it: it is no image any more
        if (earlier.dims, earlier.grid) == (places, real):
            return Layout(value.shape, places, earlier.own, earlier.own)
    return even(value.shape, places, real)


def boxes(
    laid: Mapping[int, StageLayout], value: Value, stage: int, ranks: Sequence[int], *, own: bool
) -> dict[int, Box]:
    """What each rank of a spatial group has of a value in a stage."""
    layout = laid[stage].layout(value.name) if stage in laid else None
    if layout is None:
        return whole(value, ranks)
    return dict(zip(ranks, layout.own_boxes() if own else layout.boxes(), strict=True))


def _log_gathered(stage: int, grid: Grid, laid: StageLayout) -> None:
    """Ops without an exact form on tiles need their whole inputs on every rank: the spatial stages
    may better end before them."""
    if lines := laid.gathered():
        log.info(
            "stage %d is cut %s, but %d ops run whole on every rank, which gathers %.1f MiB: %s",
            stage, grid, len(lines), laid.gathered_bytes() / 2**20, "; ".join(lines),
        )  # fmt: skip
