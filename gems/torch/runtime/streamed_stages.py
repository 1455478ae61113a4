"""How a stage that streams is laid out: the patches of each tile, from what enters the stage."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from math import prod

from torch import nn

from gems.errors import PlanError
from gems.geometry.grid import Grid
from gems.geometry.layout import Layout, even, hulls
from gems.torch.spatial.partition import CallNotTileable, spatial_dims
from gems.torch.spatial.patch_layout import StreamLayout, lay_out_patches
from gems.torch.tensors.rng import Draws
from gems.torch.tracing.calls import Call, Record

Shape = tuple[int, ...]


def same_axes(tiles: Shape, patches: Shape) -> tuple[Shape, Shape]:
    """Both grids with as many axes, the last ones of the image."""
    axes = max(len(tiles), len(patches))
    return (1,) * (axes - len(tiles)) + tiles, (1,) * (axes - len(patches)) + patches


def entering_tiles(
    shapes: Mapping[str, Shape], tiles: Shape, cut: Callable[[str], Layout | None] | None
) -> dict[str, Layout]:
    """The tiles of each image that enters, over all axes of the grid, also those with one tile.
    `cut` gives them over the others; without it there is one rank."""
    found = {name: _entering(name, shape, tiles, cut) for name, shape in shapes.items()}
    return {name: layout for name, layout in found.items() if layout is not None}


def _entering(
    name: str, shape: Shape, tiles: Shape, cut: Callable[[str], Layout | None] | None
) -> Layout | None:
    dims = spatial_dims(len(shape), tiles)
    if dims is None:
        return None
    if cut is None:
        return even(shape, dims, tiles)
    layout = cut(name)
    real = tuple(d for d, n in zip(dims, tiles, strict=True) if n > 1)
    if layout is None or layout.dims != real:
        return None  # whole on every rank; or channels come last, which patches do not follow
    spans = dict(zip(layout.dims, layout.own, strict=True))
    own = tuple(spans.get(dim, ((0, shape[dim]),)) for dim in dims)
    return Layout(shape, dims, own, own)


def handed_on(
    stored: Collection[str], streamed: Mapping[int, StreamLayout],
    readers: Mapping[str, Sequence[int]], source_of: Callable[[str], int],
) -> dict[str, Layout]:  # fmt: skip
    """Of the values that are in a store and in tiles: what each rank has of them, its own tile with
    the halos that the stages read which follow on the same ranks. No message carries them: who
    makes a value asks for the halos."""
    found = {}
    for name in stored:
        source = streamed[source_of(name)]
        if prod(source.tiles) == 1:
            continue
        layout = source.tiled((name,))[name]
        for stage in readers[name]:
            have = streamed[stage].tiled(())[name].have
            layout = replace(layout, have=hulls(layout.have, have))
        found[name] = layout
    return found


def lay_out_stage(
    stage: int, record: Record, model: nn.Module, calls: Sequence[Call],
    entering: Mapping[str, Layout], draws: Draws, sent: Sequence[str], patches: Shape, *,
    carry: bool,
) -> StreamLayout:  # fmt: skip
    """The sweeps of a stage; raises what to change in the plan if patches cannot pass it."""
    axes = len(patches)
    while axes > 1 and prod(patches[: len(patches) - axes + 1]) == 1:
        axes -= 1
    shown = Grid(tiles=patches[len(patches) - axes :])
    if not entering:
        raise PlanError(
            f"stage {stage} streams {shown} patches, but reads no image of {axes} dims; give a "
            "grid with as many axes as the images have, or let fewer stages stream"
        )
    try:
        return lay_out_patches(record, model, calls, entering, draws, sent, patches, carry=carry)
    except CallNotTileable as error:
        names = [call.name for call in calls]
        at = names.index(error.call.name)
        before = f"let stage {stage} end at {names[at - 1]}" if at else "let fewer stages stream"
        raise PlanError(
            f"stage {stage} streams {shown} patches, but {error}. To stream exactly, {before}"
        ) from error
