"""Which rank has which parameters and buffers, and whether their updates come out in order."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from gems.errors import PlanError, problems
from gems.model.graph import Graph
from gems.plans.plan import Plan
from gems.schedule.action import Kind, Schedule
from gems.torch.tracing.trace import Trace


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


def extra_state_owners(
    model: nn.Module, traced: Trace, stage_of: Sequence[int], owned: Ownership, plan: Plan
) -> dict[str, int]:
    """For each label of the state dict that is not a weight, the rank whose `get_extra_state` is
    saved: the first one that runs the module."""
    found: dict[str, int] = {}
    for label in model.state_dict(keep_vars=True):
        if label in traced.record.names:
            continue
        path = label.removesuffix("_extra_state")
        ranks = [
            r for name, held in owned.replica_groups.items() if name.startswith(path) for r in held
        ]
        if not ranks:
            ranks = [
                plan.replica_groups[stage][0]
                for block, stage in enumerate(stage_of)
                if any(
                    f"{call.module or call.name}.".startswith(path) for call in traced.calls(block)
                )
            ]
        found[label] = min(ranks, default=0)
    return found


def unordered(plan: Plan, schedule: Schedule) -> set[int]:
    """The stages of which no rank sees all samples in order."""
    seen: dict[tuple[int, int], list[int]] = {}
    for rank, action in schedule:
        if action.kind is Kind.FORWARD and action.computes:
            seen.setdefault((action.stage, rank), []).append(action.micro_batch)
    several = {s for s in range(plan.depth) if len({row[s] for row in plan.spatial_groups}) > 1}
    return several | {stage for (stage, _), order in seen.items() if order != sorted(order)}


def reject_unordered(
    model: nn.Module,
    traced: Trace,
    owned: Ownership,
    unordered: set[int],
    free: Collection[str] = (),
) -> None:
    """A buffer that forward changes must be changed by one stage, and on one rank in sample order.

    Running statistics of normalisation layers may be on several ranks (see running_stats.py).
    Anything else would depend on who saw which sample first, unless it is `free`: no sample changes
    it (see sampleless_buffers.py). The same holds for running statistics in a module that was
    recorded whole because it reads values: how often it updates them is unknown.
    """
    found = []
    for call in traced.record.calls:
        for name in call.touches:
            known = name.rpartition(".")[0] in call.norms or name in free
            several = len(owned.stages[name]) > 1
            if several or (not known and unordered.intersection(owned.stages[name])):
                found.append(
                    f"{name} is changed by {call.name} on ranks "
                    f"{owned.replica_groups[name]}, in stages {owned.stages[name]}"
                )
        if call.module is not None:
            module = model.get_submodule(call.module)
            if isinstance(module, nn.SyncBatchNorm):
                found.append(f"{call.module} is a SyncBatchNorm, which has collectives of its own")
    if found:
        raise PlanError(
            problems(
                "these buffers would differ from the plain model's; use BatchNorm, put the "
                "layers into one stage, and have one replica of it:",
                dict.fromkeys(found),
            )
        )
