"""Bytes of a rank's device that hold no tensors: the context and the communicators."""

from __future__ import annotations

from gems.hardware import Machine
from gems.plans.plan import Plan
from gems.schedule.communicators import most_communicators


def reserved(plan: Plan, machine: Machine) -> int:
    """On the rank with the most communicators; 0 on machines that reserve nothing."""
    device = machine.device
    if not device.communicator:
        return device.context
    return device.context + device.communicator * most_communicators(plan)
