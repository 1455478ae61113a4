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
from tests.generate.layers import IMAGE, SEQUENCE
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
        "zero",
        "offload",
        "local_dp",
        "recompute",
        "halo",
        "optimizer_step",
    ):
        assert any(name in case.plan for case in cases), name


@pytest.mark.parametrize("kind", sorted({*IMAGE, *SEQUENCE}))
def test_a_slice_without_samples_is_no_trouble_to_any_layer(kind: str) -> None:
    """One sample for two slices: the second rank has none, and must take part all the same."""
    plan = {"stages": 1, "micro_batches": 1, "schedule": "sequential", "data": 1, "local_dp": 2}
    shape = (4, 6) if kind in SEQUENCE else (4, 6, 5)
    for seed in (45, 1, 2):  # 45 is an instance norm with weights
        model = Model(seed=seed, shape=shape, pieces=(Piece(kind, seed),))
        verdict = judge(Case(kind, model, plan, batches=(1, 4, 1)))
        assert not verdict.failed, f"{seed}: {verdict.kind}: {verdict.text}\n{verdict.trace}"


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


@pytest.mark.parametrize("kind", IMAGE)
def test_a_tile_without_cells_is_no_trouble_to_any_layer(kind: str) -> None:
    """Three ranks for two columns, recomputed. All tensors without cells have one address, and one
    that backward had saved was once taken for a padded tile: `where` got a condition of numbers."""
    pool, *_ = drawn(9033).model.pieces  # five columns to two
    pieces = (pool, Piece(kind, 5, joint="where", back=5))
    model = Model(seed=1, shape=(4, 5, 5), pieces=pieces)
    plan = {"stages": 1, "schedule": "sequential", "spatial": ((1, 3),), "recompute": (("",),)}
    verdict = judge(Case("empty tile", model, plan, batches=(4, 4)))
    assert not verdict.failed, f"{verdict.kind}: {verdict.text}\n{verdict.trace}"


@pytest.mark.parametrize("kind", IMAGE)
def test_no_gradient_comes_back_to_tiles_of_any_layer(kind: str) -> None:
    """What all ranks of a spatial group have goes to the next stage once, and its gradient comes
    back to one of them: the others once took zeros for it, and decayed weights that have none."""
    pieces = (Piece(kind, 5), Piece("convolution", 3, "no_grad"))
    model = Model(seed=1, shape=(4, 6, 6), pieces=pieces)
    for stages in (2, 3):
        plan = {"stages": stages, "schedule": "sequential", "spatial": ((1, 2),)}
        verdict = judge(Case("absent", model, plan, optimizer="adamw", batches=(2,)))
        assert not verdict.failed, f"{verdict.kind}: {verdict.text}\n{verdict.trace}"


@pytest.mark.parametrize("kind", IMAGE)
def test_branches_of_other_forms_are_rejected_before_they_are_sent(kind: str) -> None:
    """Autocast gives half precision in one branch and not in the other."""
    model = Model(seed=1, shape=(4, 6, 6), pieces=(Piece(kind, 5, "random_branch"),))
    plan = {"stages": 2, "schedule": "sequential", "micro_batches": 3}
    verdict = judge(Case("branch", model, plan, batches=(6,), precision="bf16"))
    assert not verdict.failed, f"{verdict.kind}: {verdict.text}\n{verdict.trace}"
