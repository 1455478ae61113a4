"""The model partitioned for one input signature: into stages, and stages into tiles or patches."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import nn

from gems.distributed.transfer import Transfer, whole
from gems.errors import PlanError
from gems.geometry.box import Box
from gems.geometry.grid import Grid
from gems.geometry.layout import Layout, even
from gems.hardware import Machine
from gems.model.graph import ITEMSIZE, Value, crossings
from gems.planner.assign import stages_by_name
from gems.plans.plan import Plan
from gems.predict.recompute_cost import Footprint, entering, footprint, recomputed_blocks, runs
from gems.predict.streaming_cost import stored_values
from gems.schedule.action import Message
from gems.torch.offload.stored_value import StoredValue, ValueStore
from gems.torch.runtime.codegen import Program
from gems.torch.runtime.streamed_stages import (
    entering_tiles,
    handed_on,
    lay_out_stage,
    same_axes,
)
from gems.torch.runtime.streaming import Stream
from gems.torch.runtime.tiled_loss import TiledLoss
from gems.torch.spatial.group import SpatialGroup
from gems.torch.spatial.partition import (
    CallNotTileable,
    StageLayout,
    cheapest,
    lay_out,
    spatial_dims,
    traffic,
)
from gems.torch.spatial.patch_layout import StreamLayout, lay_out_patches
from gems.torch.spatial.tiled_stage import TiledStage, bind
from gems.torch.tensors.rng import Draws
from gems.torch.tracing.calls import Call, Record
from gems.torch.tracing.trace import Trace
from gems.transport.protocol import Link, Transport

log = logging.getLogger(__name__)
Tensor = torch.Tensor


@dataclass
class PartitionedModel:
    """The model partitioned into the plan's stages, and what is known about each of them."""

    trace: Trace
    plan: Plan
    model: nn.Module
    draws: Draws
    machine: Machine
    crossing: dict[tuple[int, int], tuple[str, ...]]
    blocks: list[list[int]]
    laid: dict[int, StageLayout] = field(default_factory=dict)  # tiled stages
    streamed: dict[int, StreamLayout] = field(default_factory=dict)  # streamed stages
    streams: dict[tuple[int, ...], Stream] = field(default_factory=dict)
    bound: dict[tuple[int, ...], TiledStage] = field(default_factory=dict)
    programs: dict[tuple[int, ...], Program] = field(default_factory=dict)
    footprints: dict[int, Footprint] = field(default_factory=dict)
    recomputed: dict[int, list[nn.Module]] = field(default_factory=dict)  # norms of recomputed runs
    losses: dict[Any, TiledLoss] = field(default_factory=dict)
    streamed_losses: dict[Any, Any] = field(default_factory=dict)  # streamed_loss.py, `Known`
    transfers: dict[tuple[Any, ...], Transfer] = field(default_factory=dict)
    unseen: dict[tuple[int, int], list[str]] = field(default_factory=dict)
    changed: dict[int, list[str]] = field(default_factory=dict)  # weights that forward changes
    links: set[Link] | None = None  # of its messages, once known
    # How often the last backward of each stage accumulated a gradient, by parameter id.
    accumulations: dict[int, dict[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for stage, grid in enumerate(self.plan.grids):
            patches = self.plan.activations[stage].patches
            if patches:
                self.streamed[stage] = found = self._lay_out_patches(stage, patches)
                if grid.size > 1:  # the patches of a tile make up what its rank runs
                    self.laid[stage] = StageLayout([], [], [], found.boundary(self.sent(stage)))
            elif grid.size > 1:
                self.laid[stage] = self._lay_out(stage, grid)
                _log_gathered(stage, grid, self.laid[stage])

    @cached_property
    def stored(self) -> frozenset[str]:
        """The values that streamed stages hand each other by way of a store."""
        graph = self.trace.graph
        stage_of = {block: s for s, blocks in enumerate(self.blocks) for block in blocks}
        names = stored_values(graph, [stage_of[i] for i in range(len(graph.blocks))], self.plan)
        laid = {n: self.streamed[stage_of[graph.producer[n]]] for n in names}
        return frozenset(n for n, x in laid.items() if n in x.layouts and n not in x.added)

    @cached_property
    def handed_on(self) -> dict[str, Layout]:
        """Those of them that are in tiles, with their halos."""
        readers = {n: [b for (_, b), v in self.crossing.items() if n in v] for n in self.stored}
        return handed_on(self.stored, self.streamed, readers, self._source_of)

    def place_stored(self, value: Value, store: ValueStore) -> StoredValue:
        """Space for one of them, or its gradient."""
        layout = self.streamed[self._source_of(value.name)].layouts[value.name]
        return store.make(value, layout.dims, layout.grid)

    # --- stages ---------------------------------------------------------------------------------

    def calls(self, stage: int) -> list[Call]:
        return [call for block in self.blocks[stage] for call in self.trace.calls(block)]

    def touches(self, stage: int) -> list[str]:
        """The buffers, running statistics among them, that a forward of a stage changes."""
        if stage not in self.changed:
            names = (name for call in self.calls(stage) for name in call.touches)
            self.changed[stage] = list(dict.fromkeys(names))
        return self.changed[stage]

    def sent(self, stage: int) -> list[str]:
        """The values that a stage sends to other stages, or gives as the model's output."""
        found = [n for (a, _), names in self.crossing.items() if a == stage for n in names]
        if stage == self.plan.depth - 1:
            found += self.trace.graph.outputs
        return list(dict.fromkeys(found))

    def recomputed_blocks(self, stage: int) -> set[int] | None:
        """The blocks of a stage that are recomputed inside backward, if the plan names them."""
        names = self.plan.activations[stage].recompute
        return recomputed_blocks(names, self.trace.graph, self.blocks[stage])

    def recomputed_runs(self, stage: int) -> dict[str, int]:
        """The calls that are recomputed inside backward, each with the number of its run."""
        groups = enumerate(runs(self.blocks[stage], self.recomputed_blocks(stage) or ()))
        return {c.name: n for n, run in groups for block in run for c in self.trace.calls(block)}

    def shared(self) -> list[tuple[int, str]]:
        """What all ranks of a spatial group save whole to recompute from it: stages and values."""
        found = []
        for stage, laid in self.laid.items():
            if stage in self.streamed:
                continue
            if self.plan.activations[stage].whole_stage:
                names = [n for n in self._read(stage) if n not in self.trace.graph.inputs]
            else:
                groups = runs(self.blocks[stage], self.recomputed_blocks(stage) or ())
                names = [n for run in groups for n in entering(self.trace.graph, run)]
            found += [(stage, name) for name in names if name not in laid.layouts]
        return found

    def footprint(self, stage: int) -> Footprint:
        """Bytes that a micro-batch saves on a stage that is not tiled, and what backward adds."""
        if stage not in self.footprints:
            blocks, recomputed = self.blocks[stage], self.recomputed_blocks(stage) or ()
            self.footprints[stage] = footprint(self.trace.graph, blocks, recomputed)
        return self.footprints[stage]

    def values(self, message: Message) -> list[Value]:
        """What a message carries; gradients travel the same way back, for what has one."""
        graph = self.trace.graph
        if message.what == "output":
            names = self.crossing.get((message.source, message.target), ())
            return [graph.value[n] for n in names]
        names = self.crossing.get((message.target, message.source), ())
        return [graph.value[n] for n in names if graph.value[n].grad]

    # --- boxes ----------------------------------------------------------------------------------

    def _read(self, stage: int) -> list[str]:
        """The values that enter a stage."""
        calls = self.calls(stage)
        made = {n for call in calls for n in call.writes}
        read = [n for call in calls for n in call.reads if n not in made]
        read += [n for n in self.sent(stage) if n not in made]
        return list(dict.fromkeys(read))

    def _lay_out_patches(self, stage: int, patches: tuple[int, ...]) -> StreamLayout:
        """A streamed stage: each patch of each tile from its boxes of what enters."""
        calls, sent = self.calls(stage), self.sent(stage)
        patches, entering = self._entering_patches(stage, patches)
        record, carry = self.trace.record, self.plan.activations[stage].carries
        return lay_out_stage(
            stage, record, self.model, calls, entering, self.draws, sent, patches, carry=carry
        )

    def lay_out_loss(
        self, record: Record, model: nn.Module, calls: Sequence[Call], value: str,
        targets: Mapping[str, Layout], draws: Draws,
    ) -> StreamLayout:  # fmt: skip
        """The last stage with the calls of a loss, which gives `value`, behind its own."""
        stage = self.plan.depth - 1
        policy, calls = self.plan.activations[stage], [*self.calls(stage), *calls]
        patches, entering = self._entering_patches(stage, policy.patches)
        carry, sent = policy.carries, [value]
        return lay_out_patches(
            record, model, calls, entering, draws, sent, patches, targets, carry=carry
        )

    def _entering_patches(
        self, stage: int, patches: tuple[int, ...]
    ) -> tuple[tuple[int, ...], dict[str, Layout]]:
        """The grid of patches of a tile, and the tiles of what enters, over as many axes."""
        tiles, patches = same_axes(self.plan.grids[stage].tiles, patches)
        cut = (lambda name: self._entering(name, Grid(tiles=tiles))) if prod(tiles) > 1 else None
        shapes = {name: self.trace.graph.value[name].shape for name in self._read(stage)}
        return patches, entering_tiles(shapes, tiles, cut)

    def _lay_out(self, stage: int, grid: Grid) -> StageLayout:
        calls = self.calls(stage)
        read = self._read(stage)
        entering = {n: x for n in read if (x := self._entering(n, grid)) is not None}

        def make(fused: int) -> StageLayout:
            return lay_out(self.trace.record, self.model, calls, entering, self.draws, fused=fused)

        try:
            if self.plan.halo == "d1":
                return make(1)
            return (
                make(self.plan.fused_layers) if self.plan.fused_layers else self._best(stage, make)
            )
        except CallNotTileable as error:
            names = [call.name for call in self.calls(stage)]
            raise PlanError(_not_tileable(names, stage, grid, error)) from error

    def _best(self, stage: int, make: Any) -> StageLayout:
        """Layers share a halo exchange while its messages would cost more than computing twice."""
        device = self.machine.device
        link = self.machine.slowest(self.plan.spatial_group_of(stage, 0))
        rate = device.flops * device.compute_efficiency
        graph = self.trace.graph
        size = ITEMSIZE[graph.value[graph.inputs[0]].dtype]

        def price(laid: StageLayout) -> float:
            """Seconds of the busiest rank: halos there and back, and what is computed twice, once
            forward and twice as much backward."""
            sent = traffic(laid.exchanges())
            halos = max((m * link.latency + n * size / link.bandwidth for m, n in sent), default=0)
            tiles = max((prod(x.grid) for x in laid.layouts.values()), default=1)
            twice = sum(
                call.flops / tiles * (times - 1)
                for call, times in zip(laid.calls, laid.extra(), strict=True)
            )
            return 2 * halos + 3 * twice / rate

        return cheapest(make, price)

    def _entering(self, name: str, grid: Grid) -> Layout | None:
        """How a value that a stage reads is tiled on arrival; None: every rank gets all of it."""
        value = self.trace.graph.value[name]
        shape = value.shape
        real = tuple(n for n in grid.shape if n > 1)
        if grid.batch > 1:
            samples = self.trace.graph.value[self.trace.graph.inputs[0]].shape[0]
            return even(shape, (0,), real) if shape and shape[0] == samples else None
        source = self._source(name)
        before = self.laid[source].layouts.get(name) if source in self.laid else None
        if source in self.laid and before is None:
            return None  # every rank of a tiled stage has all of it, so it is no image any more
        dims = _tiled_dims(len(shape), grid)
        if dims is None:
            return None
        if before is not None and source is not None:
            usual = _tiled_dims(len(shape), self.plan.grids[source])
            if usual is not None and before.dims == tuple(d - 1 for d in usual):
                dims = tuple(d - 1 for d in dims)  # channels come last
        if before is not None and (before.dims, before.grid) == (dims, real):
            return Layout(shape, dims, before.own, before.own)
        return even(shape, dims, real)

    def _source_of(self, name: str) -> int:
        found = self._source(name)
        assert found is not None, f"{name} is an input of the model"
        return found

    def _source(self, name: str) -> int | None:
        """The stage that makes a value; none makes the model's inputs."""
        producer = self.trace.graph.producer.get(name)
        if producer is None:
            return None
        return next(s for s, blocks in enumerate(self.blocks) if producer in blocks)

    def bind(
        self, stage: int, ranks: tuple[int, ...], rank: int, transport: Transport
    ) -> TiledStage:
        """A tiled stage on one rank of one of its spatial groups."""
        key = (stage, *ranks)
        if key not in self.bound:
            grid = tuple(n for n in self.plan.grids[stage].shape if n > 1)
            group = SpatialGroup(grid, ranks, ranks.index(rank), transport)
            self.bound[key] = bind(self.laid[stage], group)
        return self.bound[key]

    def boxes(self, stage: int, name: str, ranks: Sequence[int], *, own: bool) -> dict[int, Box]:
        """What each rank of a spatial group has of a value in a stage."""
        layout = self.laid[stage].layouts.get(name) if stage in self.laid else None
        if layout is None:
            return whole(self.trace.graph.value[name], ranks)
        found = layout.own_boxes() if own else layout.boxes()
        return dict(zip(ranks, found, strict=True))

    def message_transfers(self, message: Message, i: int) -> list[Transfer]:
        """How each value of a message of micro-batch i moves between tiles; gradients move
        backwards."""
        back = message.what == "gradient"
        ends = (message.target, message.source) if back else (message.source, message.target)
        giving, taking = (self.plan.spatial_group_for(stage, i) for stage in ends)
        return [self.transfer(v, *ends, giving, taking, back) for v in self.values(message)]

    def transfer(
        self,
        value: Value,
        source: int,
        target: int,
        senders: Sequence[int],
        receivers: Sequence[int],
        back: bool,
    ) -> Transfer:
        """How a value is sent from one stage to another, or its gradient back."""
        key = (value.name, source, target, *senders, -1, *receivers, back)
        if key not in self.transfers:
            self.transfers[key] = Transfer(
                value,
                self.boxes(source, value.name, senders, own=True),
                self.boxes(source, value.name, senders, own=False),
                self.boxes(target, value.name, receivers, own=False),
                back,
            )
        return self.transfers[key]

    def unseen_gradients(self, stage: int, i: int) -> list[str]:
        """The values that a stage sends whose gradients do not reach every rank of its spatial
        group: ranks without a cell of one, and all but one of those that have the same cells."""
        if (stage, i) not in self.unseen:
            group = self.plan.spatial_group_for(stage, i)
            reached: dict[str, set[int]] = {}
            for (source, target), names in self.crossing.items():
                if source == stage:
                    readers = self.plan.spatial_group_for(target, i)
                    for value in (self.trace.graph.value[n] for n in names):
                        moves = self.transfer(value, stage, target, group, readers, True).moves
                        reached.setdefault(value.name, set()).update(m.source for m in moves)
            value = self.trace.graph.value
            self.unseen[stage, i] = [
                name for name, ranks in reached.items() if value[name].grad and ranks < {*group}
            ]
        return self.unseen[stage, i]


def _not_tileable(names: list[str], stage: int, grid: Grid, error: CallNotTileable) -> str:
    at = names.index(error.call.name)
    before = (
        f"the last that can be cut is {names[at - 1]}: let stage {stage} end there and leave "
        f"{error.call.name} to a stage that is not cut"
        if at
        else f"let the spatial stages end before stage {stage}"
    )
    return (
        f"stage {stage} is cut {grid}, but {error}; an exact cut of it does not exist or is "
        f"not known. Cut fewer layers: {before}"
    )


def _log_gathered(stage: int, grid: Grid, laid: StageLayout) -> None:
    """Calls without a layer rule need their whole inputs on every rank: the spatial stages may
    better end before them."""
    if not (lines := laid.gathered()):
        return
    log.info(
        "stage %d is cut %s, but %d calls run whole on every rank, which gathers %.1f MiB: %s",
        stage, grid, len(lines), laid.gathered_bytes() / 2**20, "; ".join(lines),
    )  # fmt: skip


def _tiled_dims(rank: int, grid: Grid) -> tuple[int, ...] | None:
    """The dims of a tensor with channels first that a grid really divides."""
    dims = spatial_dims(rank, grid.tiles)
    if dims is None:
        return None
    return tuple(d for d, n in zip(dims, grid.tiles, strict=True) if n > 1)


def partition_model(
    traced: Trace,
    plan: Plan,
    model: nn.Module,
    draws: Draws,
    machine: Machine,
    shown: str,
) -> PartitionedModel:
    """The recorded model, partitioned by the plan. `shown` names the inputs in errors."""
    assert not isinstance(plan.stages, int)
    stage_of = stages_by_name(traced.graph, plan.stages, known=False)
    crossing = crossings(traced.graph, stage_of)
    if extra := set(crossing) - set(plan.chain):
        raise PlanError(
            f"inputs {shown} make the model send values between stages "
            f"{sorted(extra)}, which the plan's sample did not; give a sample of that shape"
        )
    blocks = [[i for i, s in enumerate(stage_of) if s == stage] for stage in range(plan.depth)]
    return PartitionedModel(traced, plan, model, draws, machine, crossing, blocks)
