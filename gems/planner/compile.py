"""From a plan and a model to what runs: partition, prices, schedule, prediction.

The one assembly of it. The planner, the trainer and the commands call `compile_plan`, so a plan is
searched, predicted and run with the same stages, the same costs and the same bytes of optimizer
state.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from gems.errors import PlanError
from gems.hardware import Machine
from gems.model.costs import Costs
from gems.model.graph import Graph
from gems.planner.lower_bounds import least_bytes, resident
from gems.planner.memo import Memo
from gems.planner.request import Request
from gems.planner.reserve import reserved
from gems.planner.two_buffers import step_seconds
from gems.plans.plan import Plan
from gems.predict.simulate import simulate
from gems.predict.timeline import COLLECTIVES, Memory, Timeline
from gems.schedule.action import Kind, Schedule
from gems.schedule.build import build
from gems.schedule.greedy import least
from gems.schedule.lower.offload import BETWEEN
from gems.schedule.lower.passes import lower
from gems.schedule.lower.recompute import recompute
from gems.schedule.validate import require


def compile_plan(
    plan: Plan,
    graph: Graph,
    costs: Costs,
    machine: Machine,
    request: Request,
    *,
    order: Schedule | None = None,
    memo: Memo | None = None,
) -> CompiledPlan:
    """The plan for a model whose blocks cost `costs`. `order` replaces the plan's own schedule.

    Stages are evened out in time; if the least that they need exceeds the memory budget, among the
    partitions within it. `memo` has what other plans of the same request share with this one.
    """
    memo = memo or Memo(graph, costs, machine, request)
    if plan.grad_sync == "auto" and not (machine.device.is_host or plan.asynchronous):
        plan = replace(plan, grad_sync="overlap")

    def within(limit: float | None) -> CompiledPlan:
        found, stage_of = memo.write_out(plan, limit)
        mine = replace(
            plan,
            stages=found.stages,
            edges=found.edges,
            tied=found.tied,
            recompute=found.recompute,
            balance=found.balance,
        )
        priced = memo.price(mine, stage_of)
        _require_stored(mine, priced)
        return CompiledPlan(mine, stage_of, priced, machine, request, order)

    even = within(None)
    if not request.limited or even.least_bytes[0] <= request.memory:
        return even
    return within(max(request.memory - even.reserved, 1))


@dataclass(frozen=True)
class Prediction:
    """What a step should take: seconds, bytes on its fullest rank, and why.

    `fullest` is what that rank's bytes are; `workspace` comes on top of them, and what is
    `reserved` for context and communicators. `offloaded` is the most that a rank has on the host or
    on disk. `idle` is the share of time that ranks wait, `sums`
    the seconds that all-reduces add at the end.
    """

    seconds: float
    fullest: Memory
    workspace: int
    idle: float
    sums: float
    reserved: int = 0
    offloaded: int = 0

    @property
    def bytes(self) -> int:
        return self.fullest.total + self.workspace + self.reserved


@dataclass(frozen=True)
class CompiledPlan:
    """A plan for one model on one machine. What follows from it is computed when it is asked for.

    plan      with the blocks of all stages, the model's edges and `recompute` written out
    stage_of  the stage of every block
    costs     of each stage, as one of its ranks bears them
    order     the schedule that was given in place of the plan's own, if any
    """

    plan: Plan
    stage_of: tuple[int, ...]
    costs: Costs
    machine: Machine
    request: Request
    order: Schedule | None = None

    @property
    def activation_limit(self) -> float | None:
        """Bytes of activations that every rank has memory for, beside weights, gradients,
        optimizer state and workspace; None without a memory budget."""
        if not self.request.limited:
            return None
        return self.request.memory - resident(self.plan, self.costs, self.request) - self.reserved

    @cached_property
    def reserved(self) -> int:
        """Bytes of each rank that hold no tensors."""
        return reserved(self.plan, self.machine)

    @cached_property
    def schedule(self) -> Schedule:
        """As all ranks carry it out; validated."""
        if self.order is None:
            found = lower(build(self.plan, self.costs, self.activation_limit), self.plan)
        elif self.plan.asynchronous:
            raise PlanError("schedule '2bw' repeats its own windows; leave out schedule=...")
        elif any(action.way for _, action in self.order):
            found = self.order
        else:
            one = self.plan.one_copy()
            found = lower(require(recompute(self.order, one), one), self.plan)
        return _require_stores(require(found, self.plan), self.plan)

    @cached_property
    def timeline(self) -> Timeline:
        """A simulated step of all ranks."""
        return simulate(self.schedule, self.plan, self.costs, self.machine, self.request.state)

    # --- what a search asks -----------------------------------------------------------------------

    @cached_property
    def least_bytes(self) -> tuple[float, float]:
        """That the fullest rank needs whatever its order, and the part that is activations."""
        most, activations = least_bytes(self.plan, self.costs, self.request)
        return most + self.reserved, activations + self.reserved

    @cached_property
    def least_offloaded(self) -> float:
        """Bytes that the fullest store has of what streamed stages hand each other, once all of
        forward ran."""
        return max(
            sum(x.size for x in self.costs.stored if x.source in on and on & {*x.readers})
            for on in map(set, self.plan.stages_in_copy)
        )

    @cached_property
    def least_seconds(self) -> float:
        """That no order is shorter than."""
        if self.plan.asynchronous:
            return step_seconds(self.plan, self.costs, self.machine)
        return least(self.plan.one_copy(), self.costs)

    @cached_property
    def prediction(self) -> Prediction:
        """A simulated step of the ranks that stand for all: others do the same at the same time."""
        one, copies = self.plan.representative()
        order = lower(build(one, self.costs, self.activation_limit), one, copies)
        _require_stores(order, one)
        timeline = simulate(order, one, self.costs, self.machine, self.request.state, copies)
        workspace = [max(self.costs[s].workspace for s in on) for on in one.stages_on]
        pairs = zip(timeline.peaks, workspace, strict=True)
        fullest, extra = max(pairs, key=lambda pair: pair[0].total + pair[1])
        work = max(e.stop for e in timeline.events if not e.action.endswith(COLLECTIVES))
        seconds = timeline.seconds
        if self.plan.asynchronous:
            seconds = max(seconds, self.least_seconds)
        sums = max(timeline.seconds - work, 0.0)
        offloaded = max((m.offloaded for row in timeline.memory for _, m in row), default=0)
        return Prediction(
            seconds, fullest, round(extra), timeline.bubble, sums, self.reserved, offloaded
        )


def _require_stored(plan: Plan, costs: Costs) -> None:
    places = {policy.values for policy in plan.activations} - {""}
    if places and not costs.stored:
        raise PlanError(
            f"offload='values:{places.pop()}' stores images that streamed stages hand each other, "
            "and their sweeps, and in this model there are none: each that a streamed stage makes "
            "is read by a stage that does not stream, or by the loss; let more stages stream, or "
            "remove values"
        )


def _require_stores(schedule: Schedule, plan: Plan) -> Schedule:
    wanted = plan.activations[0].offload
    if wanted and not any(action.kind is Kind.STORE for _, action in schedule):
        raise PlanError(
            f"offload='activations:{wanted}' stores activations that wait for their backward while "
            f"a rank runs {BETWEEN} other actions or more, and in this schedule none wait so long; "
            "use more micro-batches, more stages on a rank, or remove offload"
        )
    return schedule
