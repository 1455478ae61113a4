"""Bytes of a rank's device that hold no tensors: the context and the communicators."""

from __future__ import annotations

from collections import Counter

from gems.hardware import Machine
from gems.plans.plan import Plan
from gems.schedule.communicators import communicators


def reserved(plan: Plan, machine: Machine) -> int:
    """On the rank with the most communicators; 0 on machines that reserve nothing."""
    device = machine.device
    if not device.communicator:
        return device.context
    return device.context + device.communicator * most_communicators(plan)


def most_communicators(plan: Plan) -> int:
    """Of the rank that is in most of those that the plan's steps use."""
    counts = Counter(rank for found in communicators(plan) for rank in found.ranks)
    return max(counts.values(), default=0)
