"""Reject a recording that the ranks cannot run exactly with the weights and the order they have."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch

from gems.distributed.ownership import Ownership
from gems.errors import PlanError, problems
from gems.torch.runtime.partitioned_model import PartitionedModel


def reject_misplaced(
    model: PartitionedModel, owned: Ownership, sharded: Collection[int], unordered: Collection[int]
) -> None:
    """Weights must be where they are used, and forward must not change what others keep."""
    found = [
        *_elsewhere(model, owned, bool(sharded)),
        *_changed_parameters(model, sharded),
        *_python_state(model, unordered),
    ]
    if found:
        raise PlanError(
            problems(
                "this model cannot run exactly under this plan:",
                dict.fromkeys(found),
            )
        )


def _elsewhere(model: PartitionedModel, owned: Ownership, sharded: bool) -> Iterator[str]:
    trainable = {n for n, p in model.model.named_parameters() if p.requires_grad}
    strict = torch.is_grad_enabled() or sharded
    for stage in range(model.plan.depth):
        ranks = set(model.plan.replica_groups[stage])
        for call in model.calls(stage):
            for name in call.attrs:
                known = stage in owned.stages[name] or not (strict and name in trainable)
                if not known or not ranks <= set(owned.replica_groups[name]):
                    yield (
                        f"{call.name} of stage {stage} uses {name}, which belongs to stages "
                        f"{owned.stages[name]} since the model was recorded first; make a new "
                        "Trainer for the model as it is now"
                    )


def _changed_parameters(model: PartitionedModel, sharded: Collection[int]) -> Iterator[str]:
    plan = model.plan
    for stage in range(plan.depth):
        alone = plan.one_by_one or plan.total == 1
        fits = alone and stage not in sharded and plan.activations[stage].saves_all
        for call in model.calls(stage) if not fits else ():
            for name in call.touches:
                if name in model.trace.record.parameters:
                    yield (
                        f"{call.name} changes the parameter {name} in forward, and other "
                        "micro-batches are in flight, or the stage is recomputed, sharded or "
                        "offloaded; change it between steps, or use schedule='sequential' alone"
                    )


def _python_state(model: PartitionedModel, unordered: Collection[int]) -> Iterator[str]:
    for path, what in model.trace.record.impure:
        for stage in range(model.plan.depth):
            calls = [call for call in model.calls(stage) if call.module == path]
            recomputed = not model.plan.activations[stage].saves_all
            again = recomputed or any(c.region is not None for c in calls)
            if calls and (stage in unordered or again):
                why = "is recomputed" if again else "sees the samples on several ranks"
                yield (
                    f"{path or 'the model'} changes Python state in every forward ({what}), and "
                    f"stage {stage} {why}; hold it in a buffer, or have one replica of the stage "
                    "without recomputation"
                )
