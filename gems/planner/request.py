"""What is asked for: ranks, a memory budget, micro-batches, and what counts as best."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

from gems.errors import PlanError
from gems.hardware import Machine
from gems.planner.techniques import allowed
from gems.plans.fields import SCHEDULES
from gems.plans.plan import Plan
from gems.plans.residency import ADAM

OBJECTIVES = ("time", "memory", "image")


@dataclass(frozen=True)
class Request:
    """A step of so many micro-batches, over all copies, on so many ranks.

    memory     budget of each rank in bytes; infinite if none is given
    objective  least `time`, least `memory`, or the largest `image` that fits
    state      bytes of the optimizer's state per byte of trained parameters, as these are stored
    schedule   the only one wanted; "" for any that trains as one device does
    without    techniques (gems/planner/techniques.py) that no plan may use
    store      bytes that each rank may offload, to the host or to disk
    """

    ranks: int
    memory: float
    micro_batches: int
    objective: str = "time"
    state: float = ADAM
    schedule: str = ""
    without: tuple[str, ...] = ()
    store: float = inf

    def __post_init__(self) -> None:
        known = {"objective": OBJECTIVES, "schedule": ("", *SCHEDULES)}
        for name, values in known.items():
            if (given := getattr(self, name)) not in values:
                choices = ", ".join(filter(None, values))
                raise PlanError(f"{name} {given!r} is unknown; choose one of {choices}")

    @classmethod
    def on(
        cls, machine: Machine, ranks: int, memory: float | None, micro_batches: int = 0, **rest: Any
    ) -> Request:
        """By default all of the machine's memory, and two micro-batches per rank."""
        memory = machine.device.memory if memory is None else memory
        return cls(ranks, memory, micro_batches or 2 * ranks, **rest)

    @classmethod
    def of(cls, plan: Plan, memory: float | None = None, state: float = ADAM) -> Request:
        """What a plan that is given does, under a memory budget if there is one."""
        return cls(plan.world, inf if memory is None else memory, plan.total, state=state)

    def allows(self, plan: Plan) -> bool:
        """Whether a plan does without what is not wanted."""
        return allowed(plan, self.without)

    @property
    def limited(self) -> bool:
        """Whether a memory budget is given."""
        return self.memory < inf

    def capacity(self, machine: Machine) -> float:
        """Bytes that `recompute="auto"` may fill: the budget, or else all that a rank has."""
        return self.memory if self.limited else machine.device.memory
