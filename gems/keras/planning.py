"""`gems.keras.plan`: from a Keras model and a machine to the plan that fits and runs fastest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import tensorflow as tf

from gems import hardware
from gems.errors import PlanError
from gems.hardware import Machine, bytes_of
from gems.keras.offered import reject_unoffered
from gems.keras.spatial.halo_costs import with_halos
from gems.keras.tracing.profile import measure
from gems.keras.tracing.record import Recording
from gems.keras.tracing.trace import trace
from gems.model.costs import Costs
from gems.model.estimate import estimate
from gems.model.graph import Graph
from gems.planner.compile import CompiledPlan, compile_plan
from gems.planner.explain import chosen, explain
from gems.planner.request import Request
from gems.planner.search import SearchResult, search
from gems.plans.plan import Plan
from gems.plans.residency import ADAM

Measure = Callable[[Recording], Costs]


def plan(
    model: Any,
    sample: Any,
    *,
    ranks: int,
    machine: str | Path | Machine = "cpu",
    memory: str | float | None = None,
    micro_batches: int = 0,
    objective: str = "time",
    costs: str = "auto",
    state: float = ADAM,
    schedule: str = "",
) -> Plan:
    """The best plan for `model` on inputs like `sample`; `plan.explain()` gives the reasons.

    sample         inputs of one micro-batch, for their shapes: arrays, tensors or tf.TensorSpecs
    machine        a preset's name, a file, or a gems.Machine
    memory         bytes per rank, "16GiB"; the machine's own if left out
    micro_batches  of one step, over all copies; two per rank if left out
    objective      `time` or `memory`
    costs          `estimate`, nothing is run; `measure`, on this computer; `auto` measures if the
                   machine is `local`
    state          bytes of the optimizer's state per byte of trained float32 parameters: Adam 2
    schedule       plans of this one only
    """
    if objective == "image":
        raise PlanError(
            "objective 'image' makes the model anew for other image sizes, which Keras models are "
            "not; give 'time' or 'memory'"
        )
    on = machine if isinstance(machine, Machine) else hardware.machine(machine)
    budget = None if memory is None else bytes_of(memory)
    wanted = {"objective": objective, "state": state, "schedule": schedule}
    request = Request.on(on, ranks, budget, micro_batches, **wanted)
    return Study(model, sample, on, costs).plan(request)


@dataclass(frozen=True)
class Study:
    """A model on inputs of one form."""

    model: Any
    sample: Any
    machine: Machine
    costs: str = "auto"

    @cached_property
    def graph(self) -> tuple[Graph, Costs]:
        """What the model is, and what its blocks cost."""
        if self.costs not in ("auto", "estimate", "measure"):
            raise PlanError(f"costs is {self.costs!r}; give 'auto', 'estimate' or 'measure'")
        found = trace(self.model, specs_of(self.sample), training=True)
        found.graph = with_halos(found)
        if self.costs == "measure" or (self.costs == "auto" and self.machine.name == "local"):
            return found.graph, measure(found, self.machine)
        return found.graph, estimate(found.graph, self.machine)

    def search(self, request: Request) -> SearchResult:
        return search(*self.graph, self.machine, request, offered=reject_unoffered)

    def state(self, optimizer: float = ADAM) -> float:
        """Bytes of an optimizer's state per byte of weights: there are no masters."""
        return optimizer

    def choose(self, request: Request) -> tuple[Plan, Study]:
        """The best plan, and the study of the images that it is for: these."""
        return self.plan(request), self

    def plan(self, request: Request) -> Plan:
        """The best plan, with its reasons; if none fits, an error has what would."""
        found = self.search(request)
        best = chosen(found)
        self.compiled(best.plan, request).schedule  # noqa: B018  (validated, or an error)
        return replace(best.plan, why=explain(found, self.samples))

    def compiled(self, plan: Plan, request: Request) -> CompiledPlan:
        reject_unoffered(plan)
        return compile_plan(plan, *self.graph, self.machine, request)

    @property
    def samples(self) -> int:
        return tf.nest.flatten(specs_of(self.sample))[0].shape[0]


def specs_of(sample: Any) -> Any:
    """Shapes and types of one micro-batch."""

    def spec(x: Any) -> tf.TensorSpec:
        x = x if hasattr(x, "shape") else tf.convert_to_tensor(x)
        return tf.TensorSpec(tuple(x.shape), tf.as_dtype(x.dtype))

    return tf.nest.map_structure(spec, sample)
