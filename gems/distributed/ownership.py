"""Which rank has which parameters and buffers, and whether their updates come out in order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gems.model.graph import Graph
from gems.plans.plan import Plan
from gems.schedule.action import Kind, Schedule


@dataclass(frozen=True)
class Ownership:
    """For each parameter and buffer, by first name, the stages that use it and the ranks that have
    it.

    What no stage uses belongs to stage 0. What several stages use is tied: its gradients are summed
    over the ranks of all of them.
    """

    stages: dict[str, tuple[int, ...]]
    replica_groups: dict[str, tuple[int, ...]]

    def on(self, rank: int) -> set[str]:
        return {name for name, ranks in self.replica_groups.items() if rank in ranks}

    def only(self, stage: int) -> list[str]:
        """The names that this stage alone uses."""
        return [name for name, stages in self.stages.items() if stages == (stage,)]

    def tied(self) -> list[str]:
        """The names that several stages on several ranks use."""
        return [n for n, s in self.stages.items() if len(s) > 1 and len(self.replica_groups[n]) > 1]


def ownership(graph: Graph, stage_of: Iterable[int], plan: Plan) -> Ownership:
    used: dict[str, set[int]] = {name: set() for name in graph.weight}
    for block, stage in zip(graph.blocks, stage_of, strict=True):
        for name in (*block.parameters, *block.buffers):
            used[name].add(stage)
    stages = {name: tuple(sorted(found)) or (0,) for name, found in used.items()}
    replica_groups = {
        name: tuple(sorted({rank for s in found for rank in plan.replica_groups[s]}))
        for name, found in stages.items()
    }
    return Ownership(stages, replica_groups)


def unordered(plan: Plan, schedule: Schedule) -> set[int]:
    """The stages of which no rank sees all samples in order."""
    seen: dict[tuple[int, int], list[int]] = {}
    for rank, action in schedule:
        if action.kind is Kind.FORWARD and action.computes:
            seen.setdefault((action.stage, rank), []).append(action.micro_batch)
    several = {s for s in range(plan.depth) if len({row[s] for row in plan.spatial_groups}) > 1}
    return several | {stage for (stage, _), order in seen.items() if order != sorted(order)}
