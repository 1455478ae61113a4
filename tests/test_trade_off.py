"""The points of benchmarks/trade-off: plans that do the same work on the same ranks."""

from __future__ import annotations

from importlib import import_module

import pytest

CHARTS = import_module("benchmarks.trade-off.points").CHARTS


@pytest.mark.parametrize("key", CHARTS)
def test_all_points_of_a_chart_take_the_same_images_on_the_same_ranks(key: str) -> None:
    chart = CHARTS[key]
    assert {(plan.world, plan.total) for plan in chart.plans.values()} == {
        (chart.ranks, chart.images)
    }


@pytest.mark.parametrize("key", CHARTS)
def test_points_that_are_told_their_memory_are_those_that_choose_by_it(key: str) -> None:
    chart = CHARTS[key]
    by_memory = {name for name, plan in chart.plans.items() if "auto" in plan.recompute_by_stage}
    assert by_memory == set(chart.memory)
    names = [name for family in chart.families.values() for name in family]
    assert len(names) == len(set(names)), "a name in two families would lose a point"
