"""Which rank saves extra state, and buffers whose updates would come out in another order."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn

from gems.distributed.ownership import Ownership
from gems.errors import PlanError, problems
from gems.plans.plan import Plan
from gems.torch.tracing.trace import Trace


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
