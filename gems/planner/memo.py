"""Partitions and prices that several plans of one request share, each computed once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gems.hardware import Machine
from gems.model.costs import Costs, of_stages
from gems.model.graph import Graph
from gems.planner.assign import stages, written
from gems.planner.in_flight import in_flight
from gems.planner.recompute_selection import Footprints, fitted
from gems.planner.request import Request
from gems.planner.reserve import reserved
from gems.plans.plan import Plan
from gems.predict.stage_costs import price

Check = Callable[[Plan, Sequence[int]], None]  # raises if a plan cannot have this partition


class Memo:
    """The steps of `compile_plan` on one model and machine.

    Plans of a search differ in much that does not matter to a step; what does is its key here.
    Without the memo a search would spend most of its time on these steps. `check` is called with
    each partition before it is priced.
    """

    def __init__(
        self,
        graph: Graph,
        costs: Costs,
        machine: Machine,
        request: Request,
        check: Check | None = None,
    ) -> None:
        self.graph, self.costs, self.machine, self.request = graph, costs, machine, request
        self.check = check
        self._partitions: dict[object, tuple[int, ...]] = {}
        self._written: dict[object, Plan] = {}
        self._whole: dict[tuple[int, ...], Costs] = {}  # stages as one rank bears them
        self._prices: dict[object, Costs] = {}
        self._footprints: Footprints = {}

    def write_out(self, plan: Plan, limit: float | None) -> tuple[Plan, tuple[int, ...]]:
        """A plan with names, edges and `recompute` written out, its stages within a `limit` of
        bytes; and the stage of every block. Of the plan given, other fields may differ."""
        stage_of = self._partition(plan, limit)
        key: tuple[object, ...] = (stage_of, plan.stages, plan.recompute, plan.balance)
        capacity = self.request.capacity(self.machine)
        if any(policy.recompute == "auto" for policy in plan.activations):  # what `fitted` reads
            capacity = max(capacity - reserved(plan, self.machine), 0)
            key += (plan.sizes, plan.stream, plan.residency, plan.stages_in_copy, plan.places[0])
            key += (tuple(in_flight(plan)), plan.alternates, capacity)
        if key not in self._written:
            self._written[key] = fitted(
                written(plan, self.graph, stage_of),
                self.graph, self.costs, stage_of, capacity, self.request.state, self._footprints,
            )  # fmt: skip
        return self._written[key], stage_of

    def _partition(self, plan: Plan, limit: float | None) -> tuple[int, ...]:
        counted = limit is not None or plan.balance == "memory"
        tiles = tuple(bool(grid.tiles) for grid in plan.grids)
        key = (plan.stages, plan.sizes, tiles, plan.stream, plan.balance, limit)
        key += (plan.placement == "levels",)
        key += (tuple(in_flight(plan)) if counted else None,)
        if key not in self._partitions:
            found = stages(plan, self.graph, self.costs, limit, self.request.state)
            if self.check:
                self.check(plan, found)
            self._partitions[key] = tuple(found)
        return self._partitions[key]

    def price(self, plan: Plan, stage_of: tuple[int, ...]) -> Costs:
        """What each stage costs one of its ranks."""
        if stage_of not in self._whole:
            self._whole[stage_of] = of_stages(self.costs, self.graph, stage_of)
        links = plan.spatial_groups[0] if plan.cut else None  # that messages go over
        saved = tuple(
            (x.recompute, x.patches, x.carries, x.values, x.partitioned) for x in plan.activations
        )
        key = (stage_of, plan.grids, saved, links)
        if key not in self._prices:
            self._prices[key] = price(
                self.costs, self.graph, stage_of, plan, self.machine, self._whole[stage_of]
            )
        return self._prices[key]
