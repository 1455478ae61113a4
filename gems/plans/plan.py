"""What runs where. Plain data: a plan can be written to a file, read back and compared.

A plan is what a user writes in one line. It is placed rank by rank as soon as it exists; which
blocks each stage has needs the model, and `planner.assign` fills it in.

    Plan(stages=4, schedule="gems", replications=2)       ranks   0    1    2    3
                                              replica 0 stages    0    1    2    3
                                              replica 1 stages    3    2    1    0

A stage may be cut over a team of ranks, which run all its actions together:

    Plan(stages=3, spatial=[(2, 2), (1, 2)])              ranks   0  1  2  3   4  5   6
                                                          stages  0, 2x2 tiles 1 1x2  2
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod

from gems.errors import PlanError, problems, short
from gems.geometry.grid import (
    MOST,
    Grid,
    Spatial,
    halo_problems,
    team_problems,
    tile_problems,
    tiles_of,
)
from gems.plans.offload import Offload, offload_of, offload_problems, place_of
from gems.plans.recompute import (
    Recompute,
    StageRecompute,
    by_stage,
    normalize,
    recompute_problems,
)
from gems.plans.streaming import stream_problems

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
PLACEMENTS = ("straight", "fold")
GRAD_SYNC = ("overlap", "end")
OPTIMIZER_STEP = ("end", "eager")
ZERO = (0, 1, 2, 3)
MOST_ACTIONS = 2**20  # forwards of a step on all ranks, each of which is an object or several


@dataclass(frozen=True)
class Plan:
    """Stages, copies, micro-batches and their order.

    stages         how many, or the names of the modules of each, in the order the data visits them
    micro_batches  per copy of the pipeline and step
    schedule       one of SCHEDULES; `auto` is the greedy order under `max_in_flight` or a memory
                   budget
    replications   pairs of micro-batches of a bidirectional plan: 2 x replications of them
    data           copies of the whole pipeline on other ranks
    ranks          per copy; fewer than stages when a rank has several
    placement      `straight` (stage s on rank s mod ranks; teams one after the other), `fold`
                   (there and back again), or the rank or ranks of every stage, written out
    bidirectional  a second replica over the same ranks in reverse; on for the gems schedules
    balance        what to even out, `time` or `memory`, or the number of layers of each stage
    max_in_flight  micro-batches whose activations a rank may hold at once (schedule `auto`)
    edges          which stage sends to which; filled in from the model, a chain until then
    spatial        the tiles that each of the first stages is cut into, one rank per tile: (2, 2),
                   "2x2", "vertical:4"; a list of them for more than one stage
    local_dp       slices of the micro-batch, one rank each, on the stages that are neither spatial
                   nor streamed
    halo           `d1`: edges of tiles are exchanged before each layer; `d2`: before several
    fused_layers   how many layers share an exchange with `d2`; 0 lets the costs decide
    grad_sync      when gradients are all-reduced over replicas and copies: `overlap`, each stage as
                   soon as it is complete, beside other work; or `end`, after all work
    recompute      activations that stages drop and recompute for backward: `never`, `always`,
                   `except_last`, `auto`, or names of modules; for all stages, or one for each
    stream         the blocks that each of the first stages runs one after the other, on one rank,
                   keeping only its inputs: written like `spatial`
    zero           what the replica group of a stage shards: 1 the optimizer's state, 2 gradients
                   too, once they are reduced, 3 the weights too, unsharded when needed
    offload        state that is moved out while it is not needed: `activations`, `weights`,
                   `optimizer`, to the `host` or to `disk`: "activations:disk,optimizer"
    partition_activations
                   inputs that every rank of a spatial group would save whole, to recompute from
                   them, are sharded over the group, and gathered when needed (ZeRO-R's P_a)
    optimizer_step when weights are updated: `end`, after all work of a step; or `eager`, each
                   stage as soon as its gradients are complete
    why            why it was chosen, in the planner's words; two plans are equal whatever it says
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
    spatial: Spatial = ()
    local_dp: int = 1
    halo: str = "d1"
    fused_layers: int = 0
    grad_sync: str = "overlap"
    recompute: Recompute = "never"
    stream: Spatial = ()
    zero: int = 0
    offload: Offload = ()
    partition_activations: bool = False
    optimizer_step: str = "end"
    why: str = field(default="", compare=False, repr=False)

    def __post_init__(self) -> None:
        put = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731
        if not isinstance(self.stages, int):
            put("stages", tuple((s,) if isinstance(s, str) else tuple(s) for s in self.stages))
        if not isinstance(self.placement, str):
            put("placement", tuple(_team(team) for team in self.placement))
        if not isinstance(self.balance, str):
            put("balance", tuple(self.balance))
        if self.edges is not None:
            put("edges", tuple(tuple(edge) for edge in self.edges))
        put("spatial", tiles_of(self.spatial))
        put("recompute", normalize(self.recompute))
        if self.schedule == "l2l" and self.recompute == "never":  # its forward saves inputs only
            put("recompute", "always")
        put("stream", tiles_of(self.stream))
        put("offload", offload_of(self.offload))
        self._check_sizes()
        if self.bidirectional is None:
            put("bidirectional", self.schedule in BIDIRECTIONAL)
        if not self.ranks:
            put("ranks", self._default_ranks())
        if not self.micro_batches:
            fewest = self.depth if self.schedule == ASYNCHRONOUS else self.directions
            put("micro_batches", 2 * self.replications or fewest)
        if found := list(self._problems()):
            raise PlanError(problems("this plan cannot be carried out:", found))

    def _check_sizes(self) -> None:
        """Before anything is counted out: numbers that nobody means would take all memory."""
        names = ("depth", "micro_batches", "replications", "data", "ranks", "max_in_flight")
        sizes = {n: getattr(self, n) for n in (*names, "local_dp", "fused_layers")}
        sizes["stages"] = sizes.pop("depth")
        if not isinstance(self.placement, str):
            teams = [t for t in self.placement if not isinstance(t, int)]
            flat = [t for t in self.placement if isinstance(t, int)]
            sizes["a rank of placement"] = max((*flat, *(r for t in teams for r in t)), default=0)
        if found := [f"{n} is {short(x, 30)}" for n, x in sizes.items() if x > MOST]:
            raise PlanError(f"{', '.join(found)}; a plan has at most {MOST} of anything")
        parts = [prod(map(abs, tiles)) for tiles in tiles_of(self.spatial)]
        cells = sum(parts) + max(0, sizes["stages"] - len(parts)) * max(1, self.local_dp)
        batches = max(1, self.micro_batches, 2 * self.replications) * max(1, self.data)
        if cells * batches > MOST_ACTIONS:
            raise PlanError(
                f"{sizes['stages']} stages, {batches} micro-batches over all copies and the tiles "
                f"of each stage make {cells * batches} forwards in one step, more than "
                f"{MOST_ACTIONS}; give fewer stages, micro-batches, copies or tiles"
            )

    def _default_ranks(self) -> int:
        if not isinstance(self.placement, str):
            return max((rank for team in self._row() for rank in team), default=0) + 1
        if self.cut:
            return sum(self.sizes)
        return (self.depth + 1) // 2 if self.placement == "fold" else self.depth

    def _problems(self) -> Iterable[str]:
        if self.schedule not in SCHEDULES:
            yield f"schedule {self.schedule!r} is unknown; choose one of {', '.join(SCHEDULES)}"
        for name in ("depth", "micro_batches", "data", "ranks"):
            if getattr(self, name) < 1:
                shown = "stages" if name == "depth" else name
                yield f"{shown} is {getattr(self, name)}; it must be at least 1"
        if self.replications and self.micro_batches != 2 * self.replications:
            yield (
                f"replications={self.replications} means {2 * self.replications} micro-batches, "
                f"but micro_batches={self.micro_batches}; give one of the two"
            )
        if self.replications and not self.bidirectional:
            yield f"replications belongs to a bidirectional plan; {self.schedule!r} is not one"
        if self.schedule in BIDIRECTIONAL and not self.bidirectional:
            yield f"schedule {self.schedule!r} is bidirectional; leave bidirectional out"
        if self.max_in_flight < 0:
            yield f"max_in_flight is {self.max_in_flight}; give 1 or more, or leave it out"
        if self.max_in_flight > 0 and self.schedule != "auto":
            yield (
                f"max_in_flight={self.max_in_flight} applies to schedule 'auto', not "
                f"{self.schedule!r}; remove it"
            )
        if self.grad_sync not in GRAD_SYNC:
            yield f"grad_sync is {self.grad_sync!r}; choose one of {', '.join(GRAD_SYNC)}"
        yield from self._zero_problems()
        yield from offload_problems(self.offload)
        yield from self._sharing_problems()
        yield from self._update_problems()
        yield from self._endless_problems()
        tiles = tiles_of(self.spatial)
        yield from tile_problems(tiles, self.depth, self.local_dp)
        yield from halo_problems(self.halo, self.fused_layers, spatial=bool(tiles))
        yield from recompute_problems(self.recompute, self.depth)
        yield from stream_problems(
            tiles_of(self.stream), self.grids[: self.depth], self.recompute, self.local_dp
        )
        yield from self._placement_problems()
        yield from self._balance_problems()
        for a, b in self.edges or ():
            if not 0 <= a < b < self.depth:
                yield f"edge {a} to {b} must lead from a stage to a later one of {self.depth}"

    def _sharing_problems(self) -> Iterable[str]:
        pairs = zip(self.recompute_by_stage, self.sizes, strict=False)
        if self.partition_activations and not any(
            size > 1 and recompute != "never" for recompute, size in pairs
        ):
            yield (
                "partition_activations shards the inputs that a spatial group saves to recompute "
                "from, and no stage is both on several ranks and recomputed; give one tiles or "
                "slices and recompute='always' or names, or remove partition_activations"
            )

    def _zero_problems(self) -> Iterable[str]:
        if self.zero not in ZERO:
            yield f"zero is {self.zero!r}; choose one of {', '.join(map(str, ZERO))}"
        elif self.zero == 3 and self.bidirectional:
            yield (
                "zero=3 unshards the weights of a stage when its whole replica group needs them, "
                "and two directions need them at different times; use zero=2, or one direction"
            )

    def _update_problems(self) -> Iterable[str]:
        if self.optimizer_step not in OPTIMIZER_STEP:
            known = ", ".join(OPTIMIZER_STEP)
            yield f"optimizer_step is {self.optimizer_step!r}; choose one of {known}"
        elif self.optimizer_step == "eager":
            if self.zero in (1, 2):
                yield (
                    f"optimizer_step='eager' with zero={self.zero} would all-gather the updated "
                    "shards of each stage in the middle of a step; use zero=0 or zero=3, or "
                    "optimizer_step='end'"
                )
            if self.grad_sync == "end":
                yield (
                    "optimizer_step='eager' follows each all-reduce, and grad_sync='end' puts them "
                    "last; remove one of the two"
                )

    def _endless_problems(self) -> Iterable[str]:
        """Of 2BW: a batch must be through the pipeline before the next but one begins, and what
        would wait for all of a batch on all ranks would be a flush."""
        if self.schedule != ASYNCHRONOUS:
            return
        if self.micro_batches < self.depth:
            yield (
                f"2bw wants at least as many micro-batches as stages, but there are "
                f"{self.micro_batches} for {self.depth}: with fewer, weights of more than two "
                f"versions would be in use; give micro_batches={self.depth} or more"
            )
        if self.bidirectional:
            yield "2bw has one direction; leave bidirectional out, or use 'gems'"
        if self.zero:
            yield (
                f"zero={self.zero} does not shard the second weight version that 2bw needs; "
                "remove zero, or use '1f1b'"
            )
        if self.offload:
            yield (
                f"2bw cannot offload ({', '.join(self.offload)}): what is stored in one step "
                "would be needed in the next; remove offload, or use '1f1b'"
            )
        if self.optimizer_step != "end":
            yield (
                f"optimizer_step={self.optimizer_step!r} does not apply to schedule '2bw', which "
                "fixes when weights are updated; remove it"
            )
        if self.grad_sync != "overlap":
            yield (
                f"grad_sync={self.grad_sync!r} is at the end of a step, and 2bw has none; remove it"
            )
        if "except_last" in self.recompute_by_stage:
            yield (
                "recompute='except_last' needs a last micro-batch, and 2bw has none; use 'always'"
            )

    def _placement_problems(self) -> Iterable[str]:
        if isinstance(self.placement, str):
            yield from self._name_problems()
            return
        row = self._row()
        if len(row) != self.depth:
            yield f"placement names {len(row)} ranks for {self.depth} stages; give one each"
            return
        yield from team_problems(row, self.grids)
        if {rank for team in row for rank in team} != set(range(self.ranks)):
            yield (
                f"placement {self.placement} must use every rank from 0 to {self.ranks - 1} "
                "and no other"
            )

    def _name_problems(self) -> Iterable[str]:
        """Of a placement that is not written out."""
        if self.placement not in PLACEMENTS:
            yield (
                f"placement {self.placement!r} is unknown; choose one of "
                f"{', '.join(PLACEMENTS)} or write out the rank of every stage"
            )
        if self.cut:
            yield from self._straight_problems()
            return
        if self.placement == "fold" and self.ranks != (self.depth + 1) // 2:
            yield (
                f"a fold of {self.depth} stages takes {(self.depth + 1) // 2} ranks, "
                f"not {self.ranks}; leave ranks out or write out the placement"
            )
        if self.ranks > self.depth:
            yield (
                f"{self.ranks} ranks for {self.depth} stages leave ranks without work; "
                "use more stages, fewer ranks, or data-parallel copies"
            )

    def _straight_problems(self) -> Iterable[str]:
        """Of a placement of teams, which can only be straight."""
        if self.placement == "fold":
            yield "stages that are cut over ranks cannot be folded; write out the placement"
        elif self.ranks != sum(self.sizes):
            yield (
                f"stages cut over {', '.join(map(str, self.sizes))} ranks take {sum(self.sizes)}, "
                f"one after the other, not {self.ranks}; leave ranks out, or write out the "
                "placement to lay one stage over another"
            )

    def _balance_problems(self) -> Iterable[str]:
        if isinstance(self.balance, str):
            if self.balance not in ("time", "memory"):
                yield f"balance {self.balance!r} is neither 'time', 'memory' nor counts of layers"
            return
        if len(self.balance) != self.depth:
            yield f"balance has {len(self.balance)} numbers for {self.depth} stages; give one each"
        if any(n < 1 for n in self.balance):
            yield f"balance {self.balance} must give every stage at least one layer"
        if not isinstance(self.stages, int):
            yield "balance and explicit stages exclude each other; leave one out"

    # --- sizes -----------------------------------------------------------------------------

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
    def split(self) -> bool:
        """Whether backward runs as input gradient (I) and weight gradient (W)."""
        return self.schedule in SPLIT

    # --- activations and state ---------------------------------------------------------------

    @cached_property
    def recompute_by_stage(self) -> tuple[StageRecompute, ...]:
        """For each stage a policy, or the names of the modules whose blocks are recomputed."""
        return by_stage(self.recompute, self.depth)

    @cached_property
    def streams(self) -> tuple[tuple[int, ...], ...]:
        """For each stage the grid of blocks that it runs one after the other; () for most."""
        streamed = tiles_of(self.stream)
        return streamed + ((),) * (self.depth - len(streamed))

    def recomputes(self, stage: int, micro_batch: int) -> bool:
        """Whether a stage's forward runs again, as an action of its own, before backward. One that
        streams runs again, too, but block by block inside backward."""
        if self.streams[stage]:
            return False
        policy = self.recompute_by_stage[stage]
        last = micro_batch % self.micro_batches == self.micro_batches - 1
        return policy == "always" or (policy == "except_last" and not last)

    def offloaded_to(self, what: str) -> str:
        """Where something is while it is not needed: `host`, `disk`, or "" if it stays."""
        return place_of(self.offload, what)

    @cached_property
    def offloaded_state(self) -> tuple[str, ...]:
        """What of stages' state is put away, of `weights` and `optimizer`."""
        return tuple(what for what in ("weights", "optimizer") if self.offloaded_to(what))

    @property
    def frees_gradients(self) -> bool:
        """Whether a stage's whole gradients are let go of as soon as they are summed."""
        return self.zero >= 2 or "weights" in self.offloaded_state

    def gathers(self, stage: int) -> bool:
        """Whether a stage's weights come when they are needed, and go again."""
        return "weights" in self.offloaded_state or (self.zero == 3 and self.shard_count(stage) > 1)

    # --- how stages are cut ----------------------------------------------------------------

    @cached_property
    def grids(self) -> tuple[Grid, ...]:
        """How each stage is cut: into tiles, not at all if it streams, or into slices."""
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

    # --- who has what ----------------------------------------------------------------------

    @cached_property
    def spatial_groups(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """For each replica and stage the ranks that run it, in row-major order of its grid.

        A second direction lies over the first in reverse, so that the many ranks of its spatial
        stages are those of the other's last stages.
        """
        rows = []
        for first in range(0, self.world, self.ranks):
            row, last = self._row(), first + self.ranks - 1
            rows.append(tuple(tuple(first + rank for rank in team) for team in row))
            if self.bidirectional:
                rows.append(tuple(tuple(last - rank for rank in team) for team in row))
        return tuple(rows)

    def _row(self) -> tuple[tuple[int, ...], ...]:
        """The team of each stage in the first replica of the first copy."""
        if not isinstance(self.placement, str):
            return tuple((team,) if isinstance(team, int) else team for team in self.placement)
        if self.placement == "fold":
            return tuple((min(s, self.depth - 1 - s),) for s in range(self.depth))
        if self.cut:
            starts = accumulate(self.sizes, initial=0)
            return tuple(tuple(range(a, b)) for a, b in pairwise(starts))
        return tuple((s % self.ranks,) for s in range(self.depth))

    def spatial_group_of(self, stage: int, replica: int) -> tuple[int, ...]:
        return self.spatial_groups[replica][stage]

    @cached_property
    def places(self) -> tuple[tuple[int, ...], ...]:
        """The first of the ranks that have each stage, for each replica; the only one if uncut."""
        return tuple(tuple(team[0] for team in row) for row in self.spatial_groups)

    def rank_of(self, stage: int, replica: int) -> int:
        """The first of the ranks that have this stage."""
        return self.places[replica][stage]

    @cached_property
    def replica_groups(self) -> tuple[tuple[int, ...], ...]:
        """For each stage the ranks that have its weights, hence sum its gradients."""
        teams = zip(*self.spatial_groups, strict=True)
        return tuple(tuple(sorted({r for team in stage for r in team})) for stage in teams)

    def shard_count(self, stage: int) -> int:
        """How many ranks share out a stage's state among them; 1 if each has it all."""
        return len(self.replica_groups[stage]) if self.zero else 1

    @cached_property
    def stages_on(self) -> tuple[tuple[int, ...], ...]:
        """For each rank the stages whose weights it has, each once."""
        found = [[] for _ in range(self.world)]
        for stage, ranks in enumerate(self.replica_groups):
            for rank in ranks:
                found[rank].append(stage)
        return tuple(map(tuple, found))

    def replica_of(self, micro_batch: int) -> int:
        """Samples go to copies in order, and to the two directions in turn."""
        copy, within = divmod(micro_batch, self.micro_batches)
        return copy * self.directions + within % self.directions

    def spatial_group_for(self, stage: int, micro_batch: int) -> tuple[int, ...]:
        """The ranks that run this stage for this micro-batch, together."""
        return self.spatial_groups[self.replica_of(micro_batch)][stage]

    def rank_for(self, stage: int, micro_batch: int) -> int:
        """The first of the ranks that run this stage for this micro-batch."""
        return self.rank_of(stage, self.replica_of(micro_batch))

    # --- which stage feeds which ------------------------------------------------------------

    @cached_property
    def chain(self) -> tuple[tuple[int, int], ...]:
        """The edges between stages: the model's, or a chain as long as it is not known."""
        if self.edges is not None:
            return self.edges
        return tuple((s, s + 1) for s in range(self.depth - 1))

    @cached_property
    def sources(self) -> tuple[tuple[int, ...], ...]:
        """For each stage the stages whose outputs it reads."""
        return tuple(tuple(a for a, b in self.chain if b == s) for s in range(self.depth))

    @cached_property
    def sinks(self) -> tuple[tuple[int, ...], ...]:
        """For each stage the stages that read its outputs."""
        return tuple(tuple(b for a, b in self.chain if a == s) for s in range(self.depth))

    def explain(self) -> str:
        """Why it was chosen."""
        return self.why or "this plan was written by hand; gems.plan(...) says why it chooses one\n"

    def one_copy(self) -> Plan:
        """This plan without its data-parallel copies."""
        return replace(self, data=1)

    def on_end(self, batches: int) -> Plan:
        """So many batches of it one after the other, numbered as if they were one."""
        return replace(self, schedule="1f1b", micro_batches=batches * self.micro_batches)

    @cached_property
    def unrolled(self) -> Plan:
        """By what its schedule numbers micro-batches: itself, or several batches on end."""
        return self.on_end(BATCHES) if self.schedule == ASYNCHRONOUS else self

    def lanes(self) -> Plan:
        """One copy with every stage whole and on a lane of its own: what orders are made for."""
        whole = {"spatial": (), "local_dp": 1, "halo": "d1", "fused_layers": 0}
        whole["partition_activations"] = False
        return replace(self, data=1, ranks=self.depth, placement="straight", **whole)


def _team(written: int | Iterable[int]) -> int | tuple[int, ...]:
    """The ranks of one stage as a placement writes them; a single one without brackets."""
    if isinstance(written, int):
        return written
    team = tuple(written)
    return team[0] if len(team) == 1 else team
