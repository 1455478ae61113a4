"""What runs where. Plain data: a plan can be written to a file, read back and compared.

A plan is what a user writes in one line. It is placed rank by rank as soon as it exists; which
blocks each stage has needs the model, and `planner.assign` fills it in.

    Plan(stages=4, schedule="gems", replications=2)       ranks   0    1    2    3
                                              replica 0 stages    0    1    2    3
                                              replica 1 stages    3    2    1    0

A stage may be partitioned over a spatial group of ranks, which run all its actions together:

    Plan(stages=3, spatial=[(2, 2), (1, 2)])              ranks   0  1  2  3   4  5   6
                                                          stages  0, 2x2 tiles 1 1x2  2
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from gems.errors import PlanError, problems
from gems.geometry.grid import tiles_of
from gems.plans import placement
from gems.plans.activations import ActivationPolicy
from gems.plans.fields import BATCHES, BIDIRECTIONAL, PlanFields
from gems.plans.offload import offload_of, place_of
from gems.plans.recompute import normalize
from gems.plans.residency import SHARDABLE, StateResidency
from gems.plans.validate import check_sizes, plan_problems


@dataclass(frozen=True)
class Plan(PlanFields):
    __doc__ = PlanFields.__doc__

    def __post_init__(self) -> None:
        put = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731
        if not isinstance(self.stages, int):
            put("stages", tuple((s,) if isinstance(s, str) else tuple(s) for s in self.stages))
        if not isinstance(self.placement, str):
            put("placement", tuple(placement.as_written(group) for group in self.placement))
        if not isinstance(self.balance, str):
            put("balance", tuple(self.balance))
        if self.edges is not None:
            put("edges", tuple(tuple(edge) for edge in self.edges))
        put("tied", tuple(tuple(sorted(stages)) for stages in self.tied))
        put("spatial", tiles_of(self.spatial))
        put("recompute", normalize(self.recompute))
        if self.schedule == "l2l" and self.recompute == "never":  # its forward saves inputs only
            put("recompute", "always")
        put("stream", tiles_of(self.stream))
        put("offload", offload_of(self.offload))
        check_sizes(self)
        if self.bidirectional is None:
            put("bidirectional", self.schedule in BIDIRECTIONAL)
        if not self.ranks:
            put("ranks", placement.default_ranks(self))
        if not self.micro_batches:
            fewest = self.depth if self.asynchronous else self.directions
            put("micro_batches", 2 * self.replications or fewest)
        if found := list(plan_problems(self)):
            raise PlanError(problems("this plan cannot be carried out:", found))

    # --- who runs what ------------------------------------------------------------------------

    @cached_property
    def spatial_groups(self) -> tuple[tuple[placement.Group, ...], ...]:
        """For each replica and stage the ranks that run it, in row-major order of its grid."""
        return placement.spatial_groups(self)

    def spatial_group_of(self, stage: int, replica: int) -> tuple[int, ...]:
        return self.spatial_groups[replica][stage]

    @cached_property
    def places(self) -> tuple[tuple[int, ...], ...]:
        """For each replica and stage the first of the ranks that run it."""
        return tuple(tuple(group[0] for group in row) for row in self.spatial_groups)

    def rank_of(self, stage: int, replica: int) -> int:
        """The first of the ranks that run this stage."""
        return self.places[replica][stage]

    @cached_property
    def replica_groups(self) -> tuple[tuple[int, ...], ...]:
        """For each stage the ranks that hold its weights, hence all-reduce its gradients."""
        return placement.replica_groups(self.spatial_groups)

    @cached_property
    def stages_on(self) -> tuple[tuple[int, ...], ...]:
        """For each rank the stages whose weights it holds, each once."""
        return placement.stages_on(self.replica_groups, self.world)

    @property
    def stages_in_copy(self) -> tuple[tuple[int, ...], ...]:
        """The same for each rank of the first copy; ranks of other copies hold what these do."""
        return self.stages_on[: self.ranks]

    @property
    def copies(self) -> tuple[tuple[int, int], ...]:
        """For each data-parallel copy its first micro-batch and its first replica."""
        return tuple((n * self.micro_batches, n * self.directions) for n in range(self.data))

    @property
    def micro_batches_in_copy(self) -> range:
        """The micro-batches of the first copy."""
        return range(self.micro_batches)

    def replica_of(self, micro_batch: int) -> int:
        """Samples go to copies in order, and to the two directions alternately."""
        copy, within = divmod(micro_batch, self.micro_batches)
        return copy * self.directions + within % self.directions

    def spatial_group_for(self, stage: int, micro_batch: int) -> tuple[int, ...]:
        """The ranks that run this stage for this micro-batch."""
        return self.spatial_groups[self.replica_of(micro_batch)][stage]

    def rank_for(self, stage: int, micro_batch: int) -> int:
        """The first of the ranks that run this stage for this micro-batch."""
        return self.rank_of(stage, self.replica_of(micro_batch))

    @cached_property
    def tied_groups(self) -> dict[int, tuple[int, ...]]:
        """By the first stage of each set that shares weights, the ranks that hold any of them, if
        there are several."""
        found = {
            stages[0]: tuple(sorted({rank for s in stages for rank in self.replica_groups[s]}))
            for stages in self.tied
        }
        return {stage: ranks for stage, ranks in found.items() if len(ranks) > 1}

    # --- state and activations ----------------------------------------------------------------

    @cached_property
    def residency(self) -> tuple[StateResidency, ...]:
        """For each stage where its weights, gradients and optimizer state are."""
        return self.residency_over(1)

    def residency_over(self, copies: int) -> tuple[StateResidency, ...]:
        """The same if there are so many times the ranks, which hold the same stages."""
        weights, optimizer = (place_of(self.offload, what) for what in ("weights", "optimizer"))
        sharded, versions = SHARDABLE[: self.zero], 2 if self.asynchronous else 1
        eager = self.optimizer_step == "eager"
        return tuple(
            StateResidency(copies * len(ranks), sharded, weights, optimizer, versions, eager)
            for ranks in self.replica_groups
        )

    @cached_property
    def activations(self) -> tuple[ActivationPolicy, ...]:
        """For each stage what it saves for backward, where, and how the rest comes back."""
        offload, values = (place_of(self.offload, what) for what in ("activations", "values"))
        parts, carry = self.partition_activations, self.stream_halo == "carry"
        return tuple(
            ActivationPolicy(
                recompute,
                patches,
                carry and bool(patches),
                offload,
                values if patches else "",
                parts,
            )
            for recompute, patches in zip(self.recompute_by_stage, self.streams, strict=True)
        )

    def recomputes(self, stage: int, micro_batch: int) -> bool:
        """Whether a stage's forward runs again, as an action of its own, before backward."""
        last = (micro_batch + 1) % self.micro_batches == 0
        return self.activations[stage].recomputes(last=last)

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

    # --- plans that follow from it ------------------------------------------------------------

    def explain(self) -> str:
        """Why it was chosen."""
        return self.why or "this plan was written by hand; gems.plan(...) explains its choice\n"

    def runs_like(self, other: Plan) -> bool:
        """Whether both run as many stages and micro-batches on the same ranks in the same order,
        whatever their partition, state and activations."""
        return self._layout == other._layout

    @property
    def _layout(self) -> tuple[object, ...]:
        order = (self.schedule, self.depth, self.micro_batches, self.data, self.bidirectional)
        return (*order, self.spatial_groups, self.grids)

    def one_copy(self) -> Plan:
        """This plan without its data-parallel copies."""
        return replace(self, data=1)

    def representative(self) -> tuple[Plan, int]:
        """Ranks whose steps are those of all others, and how many times there are as many: one
        copy; of a plan of one stage, one rank, for all of a spatial group do the same."""
        one = self.one_copy()
        return (one, self.data) if self.depth > 1 else (one.lanes(), self.world)

    def on_end(self, batches: int) -> Plan:
        """So many batches of it one after the other, numbered as if they were one."""
        return replace(self, schedule="1f1b", micro_batches=batches * self.micro_batches)

    @cached_property
    def unrolled(self) -> Plan:
        """By what its schedule numbers micro-batches: itself, or several batches on end."""
        return self.on_end(BATCHES) if self.asynchronous else self

    def lanes(self) -> Plan:
        """One copy with every stage whole and on a lane of its own: what orders are made for."""
        whole = {"spatial": (), "local_dp": 1, "halo": "d1", "fused_layers": 0}
        whole["partition_activations"] = False
        return replace(self, data=1, ranks=self.depth, placement="straight", **whole)
