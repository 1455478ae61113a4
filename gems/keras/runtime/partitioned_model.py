"""A recording under a plan: the programs of this rank's stages, and what crosses boundaries."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any

from gems.distributed.ownership import Ownership
from gems.distributed.transfer import Transfer
from gems.errors import PlanError, problems
from gems.keras.spatial.group import SpatialGroup
from gems.keras.spatial.stage_layouts import boxes, stage_layouts
from gems.keras.spatial.tiled_stage import TiledStage, tiled_stage
from gems.keras.tracing.record import Recording
from gems.keras.tracing.stage_program import StageProgram, outline, slopes, stage_program
from gems.keras.tracing.subgraph import Tensor, ancestors
from gems.model.graph import Graph, Value, crossings
from gems.plans.plan import Plan
from gems.predict.recompute_cost import recomputed_blocks
from gems.schedule.action import Message
from gems.transport.protocol import Link, Transport


class PartitionedModel:
    """What one rank runs of a model on inputs of one form."""

    def __init__(
        self,
        recording: Recording,
        stage_of: Sequence[int],
        plan: Plan,
        owned: Ownership,
        unordered: Collection[int],
        transport: Transport,
    ) -> None:
        self.recording, self.stage_of, self.plan, self.owned = recording, stage_of, plan, owned
        self.graph = recording.graph
        self.crossing = crossings(self.graph, stage_of, plan.depth)
        self.links: set[Link] | None = None
        self.transfers: dict[Message, list[Transfer]] = {}
        self._reject_edges()
        if recording.training:
            self._reject_unordered(unordered)
        self.transport, rank = transport, transport.rank
        self.laid = stage_layouts(
            recording, stage_of, plan, [self._sent(s) for s in range(plan.depth)]
        )
        self.programs = {stage: self._program(stage) for stage in plan.stages_on[rank]}
        self.slopes = {s: slopes(self._outline(s)) for s in self.programs if s in unordered}
        if recording.training:
            self._reject_nonlinear(unordered)

    def _sent(self, stage: int) -> list[str]:
        """The values that a stage sends to others, or gives as the model's output."""
        found = [n for (a, _), names in self.crossing.items() if a == stage for n in names]
        if stage == self.plan.depth - 1:
            found += self.graph.outputs
        return list(dict.fromkeys(found))

    def _losses(self, stage: int) -> list[Tensor]:
        return [t for t in self.recording.losses if self._stage_of_loss(t) == stage]

    def _ops(self, blocks: Collection[int]) -> list[Any]:
        return [op for b in sorted(blocks) for op in self.recording.ops[b]]

    def _blocks(self, stage: int) -> list[int]:
        return [b for b, at in enumerate(self.stage_of) if at == stage]

    def _outline(self, stage: int) -> StageProgram:
        ops, sent = self._ops(self._blocks(stage)), self._sent(stage)
        return outline(self.recording, ops, sent, self._losses(stage))

    def _program(self, stage: int) -> StageProgram | TiledStage:
        r, blocks = self.recording, self._blocks(stage)
        policy = self.plan.activations[stage].recompute
        again = recomputed_blocks(policy, self.graph, blocks) or set()
        recomputed = {op.name for op in self._ops(again)}
        sent, losses = self._sent(stage), self._losses(stage)
        if stage in self.laid:
            group = self._group(stage)
            return tiled_stage(
                r, self.laid[stage], sent, group, losses=losses, recomputed=recomputed
            )
        return stage_program(r, self._ops(blocks), sent, losses=losses, recomputed=recomputed)

    def _group(self, stage: int) -> SpatialGroup:
        """The ranks that hold the tiles of a stage beside this one."""
        rank, grid = self.transport.rank, self.plan.grids[stage]
        found = {row[stage] for row in self.plan.spatial_groups if rank in row[stage]}
        if len(found) > 1:
            raise PlanError(
                f"stage {stage} is cut {grid} on ranks {' and on '.join(map(str, found))}, so that "
                f"rank {rank} has two of its tiles; give its copies the same ranks in one order, "
                "or different ranks"
            )
        (ranks,) = found
        tiles = tuple(n for n in grid.tiles if n > 1)
        return SpatialGroup(tiles, ranks, ranks.index(rank), self.transport)

    def tiles(self, stage: int) -> int:
        """How many ranks compute what is not tiled, such as a loss, each with a part of the sum."""
        return self.plan.grids[stage].size

    def first_tile(self, stage: int) -> bool:
        """Whether this rank is the one of them that speaks for all."""
        program = self.programs[stage]
        return not isinstance(program, TiledStage) or program.group.me == 0

    @cached_property
    def _stage_of_op(self) -> dict[str, int]:
        """The stage of every live op."""
        ops = zip(self.stage_of, self.recording.ops, strict=True)
        return {op.name: stage for stage, mine in ops for op in mine}

    def _stage_of_loss(self, t: Tensor) -> int:
        """Where it is computed; one of weights alone where these are used first."""
        if t.op.name in self._stage_of_op:
            return self._stage_of_op[t.op.name]
        path_of = {x.name: path for path, x in self.recording.weights.items()}
        path_of |= {x.name: path for path, x in self.recording.state.items()}
        paths = [path_of[name] for name in ancestors([t]) if name in path_of]
        first = {self.owned.stages[path][0] for path in paths}
        if len(first) > 1:
            raise PlanError(
                f"the loss {t.name} is of weights in different stages ({', '.join(paths)}); add "
                "one loss for each, or put them into one stage"
            )
        return first.pop() if first else 0

    @cached_property
    def sampleless(self) -> dict[str, Tensor]:
        """Updates that no sample changes, such as those of seeds and counters."""
        r = self.recording
        return {path: t for path, t in r.updates.items() if t.op.name not in r.live}

    def _reject_edges(self) -> None:
        new = set(self.crossing) - set(self.plan.chain)
        if self.recording.training and new:
            raise PlanError(
                f"on inputs of this form stages send each other what they did not before: {new}; "
                "make a session for these inputs"
            )

    def _reject_unordered(self, unordered: Collection[int]) -> None:
        """State that samples change must be changed where it is held, by one stage."""
        found = []
        for path, t in self.recording.updates.items():
            stages = self.owned.stages[path]
            if t.op.name in self._stage_of_op and stages != (self._stage_of_op[t.op.name],):
                found.append(
                    f"{path} is changed in stage {self._stage_of_op[t.op.name]}, used in {stages}"
                )
        if found:
            raise PlanError(
                problems("these variables would differ from plain Keras's; put the layers into "
                         "one stage:", found)
            )  # fmt: skip

    def _reject_nonlinear(self, unordered: Collection[int]) -> None:
        found = [
            f"{path} in stage {stage}, on ranks {self.owned.replica_groups[path]}"
            for stage, program in self.programs.items()
            if stage in unordered
            for path in program.updates
            if path not in self.slopes[stage]
        ]
        if found:
            raise PlanError(
                problems(
                    "these variables depend on the order of samples, which several ranks see; "
                    "have one replica of their stages (no data-parallel copies, one direction):",
                    found,
                )
            )

    # --- messages -------------------------------------------------------------------------------

    def values(self, message: Message) -> list[Value]:
        back = message.what == "gradient"
        ends = (message.target, message.source) if back else (message.source, message.target)
        found = [self.graph.value[name] for name in self.crossing.get(ends, ())]
        return [value for value in found if value.grad] if back else found

    def message_transfers(self, message: Message, micro_batch: int) -> list[Transfer]:
        if message not in self.transfers:
            back = message.what == "gradient"
            ends = (message.target, message.source) if back else (message.source, message.target)
            give, take = (self.plan.spatial_group_for(s, micro_batch) for s in ends)
            self.transfers[message] = [
                Transfer(
                    value,
                    boxes(self.laid, value, ends[0], give, own=True),
                    boxes(self.laid, value, ends[0], give, own=False),
                    boxes(self.laid, value, ends[1], take, own=False),
                    back,
                )
                for value in self.values(message)
            ]
        return self.transfers[message]


def same_stages(first: Graph, stage_of: Sequence[int], graph: Graph) -> list[int]:
    """The stages of another recording's blocks: those of the same name and weights; of what is
    new, where its inputs come from."""
    by_name = {block.name: s for block, s in zip(first.blocks, stage_of, strict=True)}
    by_weight: dict[str, int] = {}
    for block, s in zip(first.blocks, stage_of, strict=True):
        for path in (*block.parameters, *block.buffers):
            by_weight.setdefault(path, s)
    found: list[int] = []
    for block in graph.blocks:
        sources = [found[graph.producer[n]] for n in block.reads if n in graph.producer]
        owners = [by_weight[p] for p in (*block.parameters, *block.buffers) if p in by_weight]
        known = by_name.get(block.name, max(owners, default=0))
        found.append(max([known, *sources]))
    return found
