"""What models commonly do in forward: caches, checks, masks, spectral norm."""

from __future__ import annotations

import copy
from functools import cache, lru_cache
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils import parametrizations
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.utils.checkpoint import checkpoint

from gems.errors import GemsError, LossError, PlanError, TraceError
from gems.plans.plan import Plan
from gems.torch.tracing.trace import trace
from tests.changes import ONE, PLANS, TWO, TWO_WAYS, assert_exact, data, plainly, planned
from tests.exact import assert_equal

Tensor = torch.Tensor
two_plans = pytest.mark.parametrize("plan", [TWO, TWO_WAYS], ids=["two", "gems"])
SAMPLE = torch.empty(2, 6, dtype=torch.float64)
TABLES: dict[Any, Tensor] = {}
TABLE: Tensor | None = None


@lru_cache(maxsize=4)
def bounded(width: int) -> Tensor:
    return torch.arange(width, dtype=torch.float64).cos()


@cache
def unbounded(width: int) -> tuple[Tensor, dict[str, Tensor]]:
    return torch.arange(width).double().cos(), {"sin": torch.arange(width).double().sin()}


# --- caches -------------------------------------------------------------------------------------


class Cached(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.linear = how, nn.Linear(4, 4)
        self.table: Tensor | None = None
        self.tables: dict[int, Tensor] = {}
        self.longest = 0
        self.register_buffer("frequencies", torch.linspace(0.5, 1, 4), persistent=False)
        self.register_buffer("lazy", None, persistent=False)
        self.own = lru_cache(self._made)

    def __deepcopy__(self, memo: Any) -> Any:
        new = Cached(self.how).double()
        new.load_state_dict(self.state_dict())
        return new

    def _made(self, width: int) -> Tensor:
        return torch.arange(width).double().cos()

    def forward(self, x: Tensor) -> Tensor:
        global TABLE
        x, width = self.linear(x), x.shape[-1]
        if self.how == "none":
            if self.table is None or self.table.shape[0] != width:
                self.table = torch.arange(width, device=x.device).to(x.dtype).cos()
            return x * self.table
        if self.how == "hasattr":
            if not hasattr(self, "late"):
                self.late = torch.arange(width, dtype=x.dtype).cos()
            return x * self.late
        if self.how == "dict":
            if width not in self.tables:
                self.tables[width] = torch.ones_like(x[0]).cumsum(0).cos()
            return x * self.tables[width]
        if self.how == "longest":
            if width > self.longest:
                self.longest = width
                self.table = torch.arange(width, dtype=x.dtype) * self.frequencies[:width]
            assert self.table is not None
            return x * self.table[:width].cos()
        if self.how == "buffer":
            if self.lazy is None:
                self.register_buffer("lazy", torch.arange(width).double(), persistent=False)
            return x * self.lazy
        if self.how == "global dict":
            if width not in TABLES:
                TABLES[width] = torch.arange(width).double().cos()
            return x * TABLES[width]
        if self.how == "global":
            if TABLE is None:
                TABLE = torch.arange(width).double().cos()
            return x * TABLE
        if self.how == "lru":
            return x * bounded(width)
        if self.how == "cache":
            return x * unbounded(width)[0] + unbounded(width)[1]["sin"]
        return x * self.own(width)


HOWS = [
    *("none", "hasattr", "dict", "longest", "buffer", "global dict", "global"),
    *("lru", "cache", "own lru"),
]


def with_cache(how: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 4), Cached(how), nn.Tanh(), Cached(how), nn.Linear(4, 5)
    ).double()


def clear() -> None:
    global TABLE
    TABLE = None
    TABLES.clear(), bounded.cache_clear(), unbounded.cache_clear()


@two_plans
@pytest.mark.parametrize("how", HOWS)
def test_tables_that_forward_caches_when_it_first_runs(how: str, plan: Plan) -> None:
    clear()
    model = with_cache(how)
    found = planned(model, data(), plan)
    assert not isinstance(bounded(4), FakeTensor) and not TABLES and TABLE is None
    assert not isinstance(unbounded(4)[0], FakeTensor)
    clear()
    assert_equal(found, plainly(model, data(), plan.total))


@pytest.mark.parametrize("how", HOWS)
def test_a_model_that_filled_its_caches_before_is_recorded_with_them(how: str) -> None:
    clear()
    model = with_cache(how)
    model(torch.randn(2, 6, dtype=torch.float64))
    assert_exact(model, TWO)
    model(torch.randn(2, 6, dtype=torch.float64)).sum().backward()
    clear()


def test_a_cache_of_what_the_first_sample_gave_is_refused() -> None:
    class Initialised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.mean is None:
                self.mean = x.detach().mean(0)
            return x - self.mean

    with pytest.raises(TraceError, match=r"1\.mean when it first runs.*from the"):
        trace(nn.Sequential(nn.Linear(6, 4), Initialised()).double(), SAMPLE)


def test_a_layer_made_in_forward_is_refused() -> None:
    class Lazy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "linear"):
                self.linear = nn.Linear(x.shape[1], 4, dtype=x.dtype)
            return self.linear(x)

    for layer in (Lazy(), nn.LazyLinear(3)):
        model = nn.Sequential(nn.Linear(6, 4).double(), layer)
        with pytest.raises(TraceError, match="run the model once on a real micro-batch"):
            trace(model, SAMPLE)


# --- values -------------------------------------------------------------------------------------


class Checks(nn.Module):
    """A whole model that looks for numbers that went wrong."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.first, self.last = how, nn.Linear(6, 4), nn.Linear(4, 5)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.how == "isnan" and x.isnan().any():
            raise ValueError("not a number")
        if self.how == "either" and (torch.isnan(x).any() or torch.isinf(x).any()):
            x = torch.nan_to_num(x)
        if self.how == "finite" and not torch.isfinite(x).all():
            x = torch.nan_to_num(x)
        if self.how == "both" and (torch.isinf(x) | torch.isnan(x)).any():
            x = torch.nan_to_num(x)
        if self.how == "assert":
            assert not torch.isnan(x).any().item(), "not a number"
        return self.last(torch.tanh(x))


@two_plans
@pytest.mark.parametrize("how", ["isnan", "either", "finite", "both", "assert"])
def test_a_model_that_looks_for_numbers_that_went_wrong(how: str, plan: Plan) -> None:
    assert_exact(Checks(how), plan)


def test_numbers_that_went_wrong_are_noticed() -> None:
    made = data(1)
    made[0][0][0, 0] = torch.nan
    with pytest.raises(GemsError, match="looks for numbers that are not finite, and found some"):
        planned(Checks("isnan"), made, TWO)
    assert issubclass(LossError, GemsError)


class Masks(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.first, self.last = how, nn.Linear(6, 4), nn.Linear(4, 5)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.how == "mask":
            x = x + x[x > 0].sum()
        elif self.how == "nonzero":
            x = x + x.flatten()[x.flatten().gt(0).nonzero()[:, 0]].sum()
        elif self.how == "branch":
            x = x * 2 if x.mean() > 0 else x
        elif self.how == "item":
            x = x * x.detach().abs().max().item()
        return self.last(torch.tanh(x))


HOW_MASKED = ["mask", "nonzero", "branch", "item"]


@pytest.mark.parametrize("how", HOW_MASKED)
def test_masks_and_branches_of_the_whole_model_run_as_one_block(how: str) -> None:
    assert_exact(Masks(how), ONE)
    assert_exact(Masks(how), PLANS["data"])
    with pytest.raises(PlanError, match=r"2 stages, but Masks runs as one block.*nn\.Sequential"):
        planned(Masks(how), data(1), TWO)


@two_plans
@pytest.mark.parametrize("how", HOW_MASKED)
def test_masks_and_branches_of_a_part_are_one_block_of_it(how: str, plan: Plan) -> None:
    class Inner(Masks):
        def __init__(self) -> None:
            super().__init__(how)
            self.first, self.last = nn.Linear(6, 4).double(), nn.Identity()  # type: ignore

    torch.manual_seed(0)
    assert_exact(nn.Sequential(Inner(), nn.Tanh(), nn.Linear(4, 5).double()), plan)


def test_statistics_of_a_module_that_looks_at_values_are_updated_once_when_it_is_recomputed() -> (
    None
):
    """Story: batch norm changes them without a new version, so nobody knew that they change."""

    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(self.linear(x))
            return y if float(y.detach().sum()) > 0 else y * 0.5

    torch.manual_seed(0)
    plan = Plan(stages=2, micro_batches=1, schedule="gpipe", recompute="always")
    assert_exact(nn.Sequential(Looks(), nn.Linear(6, 5)).double(), plan)


def test_a_reentrant_region_without_gradients_before_it_trains_nothing_as_in_plain() -> None:
    class Region(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside, self.last = nn.Linear(6, 6), nn.Linear(6, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(checkpoint(self.inside, x, use_reentrant=True))

    torch.manual_seed(0)
    for plan in (ONE, TWO):
        assert_exact(Region().double(), plan)


class Branch(nn.Module):
    """Whether a gradient comes back through it depends on the numbers of the sample."""

    def __init__(self, how: str, sign: float) -> None:
        super().__init__()
        self.how, self.sign, self.layer = how, sign, nn.Linear(6, 6).double()

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if self.sign * float(x.detach()[0, 0]) > 0:
            return y
        return {"input": x, "detached": y.detach(), "new": torch.ones_like(y)}[self.how]


@two_plans
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("how", ["input", "detached", "new"])
def test_a_branch_that_trains_nothing_is_not_taken_for_all_of_them(
    how: str, first: bool, sign: float, plan: Plan
) -> None:
    """Recorded by the one branch or the other: two samples of opposite signs tell them apart."""
    torch.manual_seed(0)
    before = nn.Identity() if first else nn.Linear(6, 6).double()
    assert_exact(nn.Sequential(before, Branch(how, sign), nn.Linear(6, 5).double()), plan)


def test_a_mask_among_the_inputs() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 5).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) + x[x[:, 0] > 0].sum()

    torch.manual_seed(0)
    assert_exact(Masked(), ONE)


# --- buffers that depend on no sample -----------------------------------------------------------


class Steps(nn.Module):
    """Counts its forwards in a buffer, and works differently later."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("decay", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
            self.decay = self.decay * (1 - 0.1 / self.count)
        return x * self.decay


def normed(kind: str) -> nn.Module:
    torch.manual_seed(0)
    norm: Any = old_spectral_norm if kind == "old" else parametrizations.spectral_norm
    middle = Steps() if kind == "steps" else norm(nn.Linear(4, 4))
    return nn.Sequential(nn.Linear(6, 4), middle, nn.Tanh(), nn.Linear(4, 5)).double()


SAMPLES = {
    **PLANS,
    "1f1b": Plan(stages=2, micro_batches=3, schedule="1f1b"),
    "gems of four": Plan(stages=2, replications=2, schedule="gems"),
    "gems and data": Plan(stages=2, replications=1, data=2, schedule="gems"),
    "recomputed": Plan(stages=2, replications=1, schedule="gems", recompute="always"),
    "zero": Plan(stages=1, micro_batches=2, data=2, zero=3, schedule="sequential"),
}


NORMED = [
    pytest.param(kind, plan, id=f"{kind}-{name}")
    for kind in ("new", "old", "steps")
    for name, plan in SAMPLES.items()
    if kind == "new" or name in ("gems of four", "recomputed", "data")
]


@pytest.mark.parametrize(("kind", "plan"), NORMED)
def test_buffers_that_no_sample_changes_may_be_on_several_replicas(kind: str, plan: Plan) -> None:
    """Spectral norm: each forward takes one step of its power iteration, whoever runs it."""
    assert_exact(normed(kind), plan, made=data(3, 8))


def test_a_replica_that_runs_no_sample_changes_such_buffers_too() -> None:
    """Story: its weights were offloaded, and never loaded in a step without work for it."""
    torch.manual_seed(0)
    normed = parametrizations.spectral_norm(nn.Linear(6, 4)).double()
    model = nn.Sequential(normed, nn.Tanh(), nn.Linear(4, 5).double())
    plan = Plan(
        stages=2, micro_batches=1, bidirectional=True, schedule="sequential", offload="weights"
    )
    assert_exact(model, plan)


def test_a_buffer_that_samples_change_is_still_refused() -> None:
    class Center(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            return x - self.mean

    model = nn.Sequential(nn.Linear(6, 4), Center(), nn.Linear(4, 5)).double()
    with pytest.raises(PlanError, match=r"1\.mean is changed by"):
        planned(model, data(), TWO_WAYS)
    assert copy.deepcopy(model) is not model
