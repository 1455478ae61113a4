"""Bytes of a rank's device that hold no tensors: the context and the communicators."""

from __future__ import annotations

from collections import Counter

from gems.hardware import Machine
from gems.plans.plan import Plan


def reserved(plan: Plan, machine: Machine) -> int:
    """On the rank with the most communicators; 0 on machines that reserve nothing."""
    device = machine.device
    if not device.communicator:
        return device.context
    return device.context + device.communicator * communicators(plan)


def communicators(plan: Plan) -> int:
    """Of the rank with most: one for each group that it is in (all ranks, replicas of a stage, a
    spatial group, tied weights) and one for each direction of each link to a rank of another
    stage."""
    if plan.world == 1:
        return 0
    groups = {tuple(range(plan.world)), *plan.replica_groups, *plan.tied_groups.values()}
    groups |= {group for row in plan.spatial_groups for group in row}
    links = {
        link
        for row in plan.spatial_groups
        for source, sink in plan.chain
        for a in row[source]
        for b in row[sink]
        if a != b
        for link in ((a, b), (b, a))  # outputs, and gradients
    }
    counts = Counter(rank for group in groups if len(group) > 1 for rank in group)
    counts.update(rank for link in links for rank in link)
    return max(counts.values())
