"""What a stage does not keep is computed again, and nothing comes out differently."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gems.plans import Plan
from tests.exact import alone, assert_equal, plainly, planned
from tests.test_generated import LAYERS, RANDOM, Generated, loss, networks, plans, sizes, some_data

MODULES = ["stem", "lost", "head", *(f"layers.{i}" for i in range(7))]


@st.composite
def keeps(draw: Any, stages: int) -> Any:
    """Something for each stage: a word, or names, of which some may be another stage's."""
    names = st.lists(st.sampled_from(MODULES), max_size=5, unique=True)
    word = st.sampled_from(("inputs", "inputs", "except-last", "all"))
    return tuple(draw(st.one_of(word, names)) for _ in range(stages))


@st.composite
def keeping(draw: Any) -> Plan:
    plan = draw(plans())
    return replace(plan, keep=draw(keeps(plan.depth)))


@settings(max_examples=settings().max_examples // 5, report_multiple_bugs=False)
@given(networks(list(LAYERS)), keeping(), sizes, st.booleans())
def test_a_generated_model_that_keeps_less_trains_like_the_plain_one(
    model: Generated, plan: Plan, samples: list[int], extra: bool
) -> None:
    data = some_data(samples, extra)
    assert_equal(planned(model, data, plan, loss), plainly(model, data, plan.total, loss))


@settings(max_examples=settings().max_examples // 10, report_multiple_bugs=False)
@given(networks([*RANDOM, *RANDOM, *LAYERS]), keeping(), sizes)
def test_what_runs_again_draws_the_same_random_numbers(
    model: Generated, plan: Plan, samples: list[int]
) -> None:
    data = some_data(samples, False)
    assert_equal(planned(model, data, plan, loss), alone(model, data, plan.total, loss))
