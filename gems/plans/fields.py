"""The fields of a plan, which a user writes, and the sizes that follow from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from gems.geometry.grid import Grid, Spatial, tiles_of
from gems.plans.offload import Offload
from gems.plans.recompute import Recompute, StageRecompute, by_stage

SCHEDULES = (
    *("sequential", "gpipe", "1f1b", "interleaved", "zero-bubble", "gems", "gems-zb", "2bw"),
    *("l2l", "auto"),
)
ASYNCHRONOUS = (
    "2bw"  # one batch follows the other without a flush: see schedule/published/two_buffers.py
)
BATCHES = 4  # that are laid out one after the other to check and to time it
BIDIRECTIONAL = ("gems", "gems-zb")
SPLIT = ("zero-bubble", "gems-zb", "auto")
PLACEMENTS = ("straight", "fold", "levels")
FOLDED = ("fold", "levels")
BALANCES = ("time", "memory", "layers")
GRAD_SYNC = ("auto", "overlap", "stage", "end")
OPTIMIZER_STEP = ("end", "eager")
ZERO = (0, 1, 2, 3)
MOST_ACTIONS = 2**20  # forwards of a step on all ranks, each of which is an object or several


@dataclass(frozen=True)
class PlanFields:
    """Stages, copies, micro-batches and their order.

    stages         how many, or the names of the modules of each, in the order the data visits them
    micro_batches  per copy of the pipeline and step
    schedule       one of SCHEDULES; `auto` is the greedy order under `max_in_flight` or a memory
                   budget
    replications   pairs of micro-batches of a bidirectional plan: 2 x replications of them
    data           copies of the whole pipeline on other ranks
    ranks          per copy; fewer than stages when a rank has several
    placement      `straight` (stage s on rank s mod ranks; groups one after the other), `fold`
                   (there and back again), `levels` (a fold partitioned so that long skips stay on
                   their rank), or the rank or ranks of every stage, written out
    bidirectional  a second replica over the same ranks in reverse; on for the gems schedules
    balance        what to even out, `time`, `memory` or the number of `layers`, or this number for
                   each stage
    max_in_flight  micro-batches whose activations a rank may hold at once (schedule `auto`; of the
                   gems schedules, which hold one, those of a batch that is pipelined both ways)
    edges          which stage sends to which; filled in from the model, a chain until then
    tied           the stages that share weights, in sets that have no stage in common; filled in
                   from the model
    spatial        the grid of tiles of each of the first stages, one rank per tile: (2, 2), "2x2",
                   "vertical:4"; a list of them for more than one stage
    local_dp       slices of the micro-batch, one rank each, on the stages that are neither spatial
                   nor streamed
    halo           `d1`: edges of tiles are exchanged before each layer; `d2`: before several
    fused_layers   how many layers share an exchange with `d2`; 0 lets the costs decide
    grad_sync      when gradients are all-reduced over replicas and copies: `overlap`, chunk by
                   chunk inside the last backward of a stage; `stage`, in one piece after it; `end`,
                   after all work; `auto`: `stage` on CPUs whose cores all compute, else `overlap`
    recompute      activations that stages drop and recompute for backward: `never`, `always`,
                   `except_last`, `auto`, or names of modules; for all stages, or one for each
    stream         the grid of patches that each of the first stages runs one after the other, of
                   the image or of each tile, saving only its inputs: written like `spatial`
    stream_halo    what patches read around their own cells: `recompute`, each computes its halos
                   itself; or `carry`, each cell is computed once, and halos are handed on
    zero           what the replica group of a stage shards: 1 the optimizer's state, 2 gradients
                   too, once they are reduced, 3 the weights too, unsharded when needed
    offload        state that is moved out while it is not needed: `activations`, `weights`,
                   `optimizer`, and the `values` that streamed stages hand each other, to the `host`
                   or to `disk`: "activations:disk,optimizer"
    partition_activations
                   inputs that every rank of a spatial group would save whole, to recompute from
                   them, are sharded over the group, and gathered when needed (ZeRO-R's P_a)
    optimizer_step when weights are updated: `end`, after all work of a step; or `eager`, each
                   stage as soon as its gradients are complete
    why            why it was chosen, in the planner's words; plans compare equal without it
    """

    stages: int | tuple[tuple[str, ...], ...] = 1
    micro_batches: int = 0
    schedule: str = "1f1b"
    replications: int = 0
    data: int = 1
    ranks: int = 0
    placement: str | tuple[int | tuple[int, ...], ...] = "straight"
    bidirectional: bool | None = None
    balance: str | tuple[int, ...] = "time"
    max_in_flight: int = 0
    edges: tuple[tuple[int, int], ...] | None = None
    tied: tuple[tuple[int, ...], ...] = ()
    spatial: Spatial = ()
    local_dp: int = 1
    halo: str = "d1"
    fused_layers: int = 0
    grad_sync: str = "auto"
    recompute: Recompute = "never"
    stream: Spatial = ()
    stream_halo: str = "recompute"
    zero: int = 0
    offload: Offload = ()
    partition_activations: bool = False
    optimizer_step: str = "end"
    why: str = field(default="", compare=False, repr=False)

    @property
    def depth(self) -> int:
        """How many stages there are."""
        return self.stages if isinstance(self.stages, int) else len(self.stages)

    @property
    def directions(self) -> int:
        return 2 if self.bidirectional else 1

    @property
    def replicas(self) -> int:
        """Copies of the pipeline in either direction: replica = copy x directions + direction."""
        return self.data * self.directions

    @property
    def world(self) -> int:
        return self.data * self.ranks

    @property
    def total(self) -> int:
        """Micro-batches of one step, over all copies."""
        return self.micro_batches * self.data

    @property
    def forwards(self) -> int:
        """How many forwards ranks run in a step of one copy."""
        return sum(self.sizes) * self.micro_batches

    @property
    def split(self) -> bool:
        """Whether backward runs as input gradient (I) and weight gradient (W)."""
        return self.schedule in SPLIT

    @property
    def asynchronous(self) -> bool:
        """Whether batches follow each other without a flush: PipeDream-2BW."""
        return self.schedule == ASYNCHRONOUS

    @property
    def alternates(self) -> bool:
        """Whether the two directions of a rank share its memory, as in GEMS: both together hold no
        more activations than `max_in_flight` micro-batches have, or one."""
        return self.schedule in BIDIRECTIONAL

    @property
    def one_by_one(self) -> bool:
        """Whether backward of a micro-batch is done before forward of the next begins."""
        return self.schedule == "sequential"

    @property
    def stage_by_stage(self) -> bool:
        """Whether all micro-batches pass a stage before any enters the next, as in L2L."""
        return self.schedule == "l2l"

    @property
    def greedy(self) -> bool:
        """Whether the order is searched for under a limit, rather than published."""
        return self.schedule == "auto"

    @cached_property
    def recompute_by_stage(self) -> tuple[StageRecompute, ...]:
        """For each stage a policy, or the names of the modules whose blocks are recomputed."""
        return by_stage(self.recompute, self.depth)

    @cached_property
    def streams(self) -> tuple[tuple[int, ...], ...]:
        """For each stage the grid of blocks that it runs one after the other; () for most."""
        streamed = tiles_of(self.stream)
        return streamed + ((),) * (self.depth - len(streamed))

    @cached_property
    def grids(self) -> tuple[Grid, ...]:
        """How each stage is cut: into tiles, not at all if it only streams, or into slices."""
        first = tuple(Grid(tiles=tiles) for tiles in tiles_of(self.spatial))
        first += (Grid(),) * (len(tiles_of(self.stream)) - len(first))
        return first + (Grid(self.local_dp),) * (self.depth - len(first))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """How many ranks run each stage together."""
        return tuple(grid.size for grid in self.grids)

    @property
    def cut(self) -> bool:
        """Whether any stage takes more than one rank."""
        return any(size > 1 for size in self.sizes)
