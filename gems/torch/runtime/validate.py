"""Reject a recording that the ranks cannot run exactly with the weights and the order they have."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

from gems.errors import PlanError, problems
from gems.torch.runtime.partitioned_model import Cut
from gems.torch.state.ownership import Ownership


def reject_misplaced(
    cut: Cut, owned: Ownership, sharded: Collection[int], unordered: Collection[int]
) -> None:
    """Weights must be where they are used, and forward must not change what others keep."""
    found = [
        *_elsewhere(cut, owned, bool(sharded)),
        *_changed_parameters(cut, sharded),
        *_python_state(cut, unordered),
    ]
    if found:
        raise PlanError(
            problems(
                "this model cannot run exactly under this plan:",
                dict.fromkeys(found),
            )
        )


def _elsewhere(cut: Cut, owned: Ownership, sharded: bool) -> Iterator[str]:
    trainable = {n for n, p in cut.model.named_parameters() if p.requires_grad}
    strict = torch.is_grad_enabled() or sharded
    for stage in range(cut.plan.depth):
        ranks = set(cut.plan.replica_groups[stage])
        for call in cut.calls(stage):
            for name in call.attrs:
                known = stage in owned.stages[name] or not (strict and name in trainable)
                if not known or not ranks <= set(owned.replica_groups[name]):
                    yield (
                        f"{call.name} of stage {stage} uses {name}, which belongs to stages "
                        f"{owned.stages[name]} since the model was recorded first; make a new "
                        "Trainer for the model as it is now"
                    )


def _changed_parameters(cut: Cut, sharded: Collection[int]) -> Iterator[str]:
    plan = cut.plan
    for stage in range(plan.depth):
        alone = plan.schedule == "sequential" or plan.total == 1
        fits = alone and stage not in sharded and plan.recompute_by_stage[stage] == "never"
        for call in cut.calls(stage) if not fits else ():
            for name in call.touches:
                if name in cut.trace.record.parameters:
                    yield (
                        f"{call.name} changes the parameter {name} in forward, and other "
                        "micro-batches are in flight, or the stage is recomputed, sharded or "
                        "offloaded; change it between steps, or use schedule='sequential' alone"
                    )


def _python_state(cut: Cut, unordered: Collection[int]) -> Iterator[str]:
    for path, what in cut.trace.record.impure:
        for stage in range(cut.plan.depth):
            calls = [call for call in cut.calls(stage) if call.module == path]
            recomputed = cut.plan.recompute_by_stage[stage] != "never"
            again = recomputed or any(c.region is not None for c in calls)
            if calls and (stage in unordered or again):
                why = "is recomputed" if again else "sees the samples on several ranks"
                yield (
                    f"{path or 'the model'} changes Python state in every forward ({what}), and "
                    f"stage {stage} {why}; hold it in a buffer, or have one replica of the stage "
                    "without recomputation"
                )


def current(model: nn.Module, name: str) -> torch.Tensor:
    """A weight as it is now: a buffer may have been assigned."""
    own, key = holder(model, name)
    return own[key]


def holder(model: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """The dict of a module that has a weight, and its key there."""
    path, _, key = name.rpartition(".")
    module = model.get_submodule(path)
    own: dict[str, Any] = module._parameters if key in module._parameters else module._buffers
    return own, key
