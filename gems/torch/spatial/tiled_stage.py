"""A stage on one rank of its spatial group: what to call instead of each call on tiled values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from gems.geometry.box import Box
from gems.torch.spatial.group import SpatialGroup
from gems.torch.spatial.op import Run
from gems.torch.spatial.partition import StageLayout
from gems.torch.spatial.partitioned_activations import PartitionedActivations
from gems.torch.spatial.tile import ForwardContext, Tile
from gems.torch.tensors.storage import storage_of


@dataclass
class TiledStage:
    """`runs` replaces the calls that read or make tiled values, by their names."""

    group: SpatialGroup
    laid: StageLayout
    runs: dict[str, Run]
    context: ForwardContext

    def box(self, name: str) -> Box | None:
        """This rank's box of a value; None: all of it."""
        layout = self.laid.layouts.get(name)
        return None if layout is None else layout.boxes()[self.group.me]

    def sharding(self, name: str) -> PartitionedActivations | None:
        """How to save a shard of a value that all ranks of the group have; None if it is tiled."""
        return PartitionedActivations(self.group) if self.box(name) is None else None


def bind(
    laid: StageLayout,
    group: SpatialGroup,
    context: ForwardContext | None = None,
    known: dict[str, Run] | None = None,
) -> TiledStage:
    """The stage on this rank of the group. What is `known` of a rank whose boxes are alike is used
    again, in the same context; what is new and may be is added."""
    context, runs = context or ForwardContext(), dict(known or {})
    for op, rule, wants in zip(laid.ops, laid.rules, laid.wants, strict=True):
        if rule is None or op.call.name in runs:
            continue
        tile = Tile(group, op, tuple(rule.outs), rule.windows, laid.layouts, wants, context)
        runs[op.call.name] = run = _guarded(rule.bind(tile), tile)
        if rule.relative and known is not None:
            known[op.call.name] = run
    return TiledStage(group, laid, runs, context)


def _guarded(run: Run, tile: Tile) -> Run:
    """A call on a tile, with results of the recorded types and shapes.

    Autocast may run the operations of a layer rule in another precision than the layer. A layer on
    a tile without cells may give no cells of another shape. Padded tiles are forgotten when the
    layer has run: they are known by their memory, which is then used again.
    """
    op, context = tile.op, tile.context
    names = [name for _, name in tile.call.outs]
    dtypes = [getattr(torch, op.values[name].dtype) for name in names]
    shape = tile.out().shape if names and tile.outs and tile.out().empty else None

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if op.by_name is not None:
            args = (kwargs.pop(op.by_name),)
        found = run(*args, **kwargs)
        if context.saved is not None:
            context.saved.clear()
        if not isinstance(found, torch.Tensor):
            return found
        if shape is not None and found.shape != shape:
            found = found.new_zeros(shape) + 0 * found.sum()
        if op.must_copy and any(_overlap(found, x) for x in (*args, *kwargs.values())):
            found = found.clone()
        return found if found.dtype == dtypes[0] else found.to(dtypes[0])

    return wrapped


def _overlap(a: torch.Tensor, b: Any) -> bool:
    return isinstance(b, torch.Tensor) and storage_of(a) == storage_of(b)
