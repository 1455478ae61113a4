"""A model given out to the stages of many plans, and what that costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gems.errors import PlanError
from gems.hardware import Machine
from gems.model.costs import Costs, of_stages
from gems.model.graph import Graph
from gems.planner.assign import stages, written
from gems.planner.in_flight import in_flight
from gems.planner.lower_bounds import least_bytes
from gems.planner.recompute_selection import Footprints, fitted
from gems.planner.request import Wish
from gems.plans.plan import Plan
from gems.predict.stage_costs import price

Given = tuple[Plan, tuple[int, ...]]  # a plan with names and edges, and the stage of every block


class Cuts:
    """Cuts for plans of one search. Many plans differ in what does not matter to a part of the
    work, so whatever was worked out for one is kept: a search would spend most of its time on it.
    """

    def __init__(self, graph: Graph, costs: Costs, machine: Machine, wish: Wish) -> None:
        self.graph, self.costs, self.machine, self.wish = graph, costs, machine, wish
        self._stages: dict[object, tuple[int, ...]] = {}
        self._uncut: dict[tuple[int, ...], Costs] = {}
        self._given: dict[object, Given] = {}
        self._prices: dict[object, Costs] = {}
        self._footprints: Footprints = {}

    def of(self, plan: Plan) -> tuple[Plan, Costs]:
        """The plan with its blocks given out: evened out in time if that fits, under the cap if
        not; and what its stages cost."""
        memory = self.wish.memory
        for cap in (None, memory):
            given, stage_of = self._give_out(plan, cap)
            staged = self._price(replace(given, spatial=plan.spatial), stage_of)
            cut = replace(plan, stages=given.stages, edges=given.edges, recompute=given.recompute)
            if cap is not None or least_bytes(cut, staged, self.wish)[0] <= memory:
                return cut, staged
        raise AssertionError("the second cut is returned whatever it takes")

    def _give_out(self, plan: Plan, cap: float | None) -> Given:
        order = None
        if cap is not None or plan.recompute == "auto":  # it depends on what is in flight
            order = (plan.schedule, plan.micro_batches, plan.placement)
        shape = (plan.depth, plan.sizes, plan.ranks, plan.bidirectional, plan.recompute)
        shape += (plan.stream, plan.balance, plan.offload, cap, order)
        if plan.zero and order:  # what is shared out, and among how many
            shape = (*shape, plan.zero, plan.data)
        if shape not in self._given:
            stage_of = self._cut(plan, cap)
            _reject_whole(plan, self.graph, stage_of)
            given = fitted(
                written(plan, self.graph, stage_of),
                self.graph, self.costs, stage_of, self.wish.memory, self.wish.state,
                self._footprints,
            )  # fmt: skip
            self._given[shape] = given, stage_of
        return self._given[shape]

    def _cut(self, plan: Plan, cap: float | None) -> tuple[int, ...]:
        counted = cap is not None or plan.balance == "memory"
        tiles = tuple(bool(grid.tiles) for grid in plan.grids)
        shape = (plan.depth, plan.sizes, tiles, plan.stream, plan.balance, cap)
        shape += (tuple(in_flight(plan)) if counted else None,)
        if shape not in self._stages:
            self._stages[shape] = tuple(stages(plan, self.graph, self.costs, cap))
        return self._stages[shape]

    def _price(self, plan: Plan, stage_of: tuple[int, ...]) -> Costs:
        if stage_of not in self._uncut:
            self._uncut[stage_of] = of_stages(self.costs, self.graph, stage_of)
        links = plan.spatial_groups[0] if plan.cut else None  # that messages go over
        saved = tuple((x.recompute, x.patches, x.partitioned) for x in plan.activations)
        shape = (stage_of, plan.grids, saved, links)
        if shape not in self._prices:
            self._prices[shape] = price(
                self.costs, self.graph, stage_of, plan, self.machine, self._uncut[stage_of]
            )
        return self._prices[shape]


def _reject_whole(plan: Plan, graph: Graph, stage_of: Sequence[int]) -> None:
    for block, stage in zip(graph.blocks, stage_of, strict=True):
        grid = plan.grids[stage]
        if block.whole and grid.tiles and grid.size > 1:
            raise PlanError(f"{block.name} cannot be cut, and stage {stage} would be")
        if plan.activations[stage].patches and not block.streams:
            raise PlanError(f"{block.name} needs the whole image, and stage {stage} would stream")
