"""500 generated cases of tests/generate: exact, or rejected with a remedy. More by command."""

from __future__ import annotations

import os
from collections import Counter
from functools import cache

import pytest
import torch
from torch import nn

from gems.plans.fields import SCHEDULES
from gems.plans.plan import Plan
from tests.exact import assert_equal, batches, plainly, planned
from tests.generate.cases import Case, draw, shown
from tests.generate.known import known
from tests.generate.models import Model, Piece
from tests.generate.run import crashed, judge

CASES = int(os.environ.get("GEMS_GENERATE", "500"))
drawn = cache(draw)


@pytest.mark.parametrize("number", range(CASES), ids=lambda n: f"case_{n}_")
def test_a_generated_case_is_exact_or_rejected_with_a_remedy(number: int) -> None:
    case = drawn(number)
    verdict = judge(case)
    if verdict.failed and (entries := known(case)):
        pytest.xfail(f"{entries[0].name}: {entries[0].reason}")
    assert not verdict.failed, f"{verdict.kind}: {verdict.text}\n{verdict.trace}\n{shown(case)}"


def test_the_cases_have_all_there_is() -> None:
    """What is never drawn is never tested."""
    cases = [drawn(number) for number in range(CASES)]
    seen = Counter(feature for case in cases for feature in case.features())
    assert {f"plan schedule={name}" for name in SCHEDULES} <= set(seen)
    for name in (
        "spatial",
        "stream",
        "stream_halo",
        "zero",
        "offload",
        "local_dp",
        "recompute",
        "halo",
        "optimizer_step",
    ):
        assert any(name in case.plan for case in cases), name


FROZEN = [
    {"stages": 2, "micro_batches": 2, "schedule": "sequential", "bidirectional": True},
    {"stages": 1, "micro_batches": 2, "schedule": "sequential", "spatial": ((1, 2),)},
    {"stages": 1, "micro_batches": 1, "schedule": "sequential", "data": 2, "zero": 1},
    {"stages": 1, "micro_batches": 1, "schedule": "sequential", "data": 2, "zero": 3},
    {"stages": 2, "micro_batches": 2, "schedule": "gpipe", "offload": ("weights:host",)},
]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("plan", FROZEN, ids=str)
def test_a_weight_that_is_frozen_between_two_accumulated_steps_keeps_its_gradient(
    plan: dict[str, object], tied: bool
) -> None:
    pieces = (Piece("convolution", 3, "freezes_later"), Piece("convolution", 3))
    traits = frozenset({"tied"} if tied else ())
    model = Model(seed=1, shape=(4, 6, 6), pieces=pieces, traits=traits)
    verdict = judge(Case("frozen", model, plan, batches=(4, 4, 4, 4), accumulate=2))
    assert not verdict.failed, f"{verdict.kind}: {verdict.text}\n{verdict.trace}"


class Unseen(nn.Module):
    """A view that no gradient goes through, used by both stages."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        with torch.no_grad():
            seen = x[:, :2]
        return self.b(x) + seen.sum(1, keepdim=True)


def test_a_view_made_under_no_grad_may_cross_stages() -> None:
    torch.manual_seed(0)
    model, data = Unseen().double(), batches((4, 4), 3, 2, torch.float64)
    plan = Plan(stages=(("a",), ("b",)), micro_batches=2, schedule="gpipe")
    assert_equal(planned(model, data, plan), plainly(model, data, plan.total))


def test_torchs_fused_sgd_does_not_take_a_first_gradient_that_comes_late() -> None:
    """Why `tests.generate.run.crashed` calls such a case invalid: plain PyTorch raises as well."""
    early, late = (nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = torch.optim.SGD([early, late], 0.1, momentum=0.9, fused=True)
    early.sum().backward()
    optimizer.step()
    (early.sum() + late.sum()).backward()
    with pytest.raises(TypeError, match="NoneType") as error:
        optimizer.step()
    assert crashed(error.value).kind == "invalid"
    assert crashed(TypeError("got NoneType")).kind == "crashed"
