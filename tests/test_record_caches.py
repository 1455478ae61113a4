"""No cache keeps a tensor of the recording: later runs would compute with a tensor that has no
numbers (transformers' DeBERTa did so in the constants of a scripted function)."""

from __future__ import annotations

import threading
import types
import weakref
from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from gems.errors import TraceError
from gems.plans.plan import Plan
from gems.torch.tracing.frozen import ENTRIES
from gems.torch.tracing.trace import trace
from tests.changes import TWO, TWO_WAYS, data, plainly, planned
from tests.exact import assert_equal

Tensor = torch.Tensor
two_plans = pytest.mark.parametrize("plan", [TWO, TWO_WAYS], ids=["two", "gems"])
SAMPLE = torch.empty(2, 6, dtype=torch.float64)


def cosines(width: int) -> Tensor:
    return torch.arange(width, dtype=torch.float64).cos()


# --- where a table may be kept ------------------------------------------------------------------


class Tables:
    """Of a class that is no module."""

    kept: ClassVar[dict[int, Tensor]] = {}

    @staticmethod
    def of(width: int) -> Tensor:
        if width not in Tables.kept:
            Tables.kept[width] = cosines(width)
        return Tables.kept[width]

    @staticmethod
    @lru_cache
    def cached(width: int) -> Tensor:
        return cosines(width)

    @lru_cache  # noqa: B019
    def method(self, width: int) -> Tensor:
        return cosines(width)


def attribute(width: int) -> Tensor:
    if not hasattr(attribute, "kept"):
        attribute.kept = cosines(width)  # type: ignore[attr-defined]
    return attribute.kept  # type: ignore[attr-defined]


def default(width: int, kept: dict[int, Tensor] = {}) -> Tensor:  # noqa: B006
    if width not in kept:
        kept[width] = cosines(width)
    return kept[width]


def keyword(width: int, *, kept: dict[int, Tensor] = {}) -> Tensor:  # noqa: B006
    if width not in kept:
        kept[width] = cosines(width)
    return kept[width]


def remembering(function: Callable[[int], Tensor]) -> Callable[[int], Tensor]:
    kept: dict[int, Tensor] = {}

    def inner(width: int) -> Tensor:
        if width not in kept:
            kept[width] = function(width)
        return kept[width]

    return inner


decorated = remembering(lambda width: attribute(width) + default(width))
inner = types.ModuleType("inner")
outer = types.ModuleType("outer")
exec("kept = {}\ndef of(n, make):\n    return kept.setdefault(n, make(n))", vars(inner))
setattr(outer, "inner", inner)  # noqa: B010


@torch.jit.script
def scripted(x: Tensor, width: int) -> Tensor:
    scale = torch.log(torch.tensor(7.0)).type_as(x)  # a constant: the compiler computes it once
    return x * torch.arange(width).to(x.dtype).cos() * scale


class Scripted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.log(torch.tensor(7.0)).type_as(x)


class Keeps(nn.Module):
    tables: ClassVar[dict[int, Tensor]] = {}
    table: Tensor | None = None

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.helper = how, Tables()
        self.linear = nn.Linear(4, 4)
        self.scripted = torch.jit.script(Scripted())

    @cached_property
    def property(self) -> Tensor:
        return cosines(4)

    def __deepcopy__(self, memo: Any) -> Any:
        new = type(self)(self.how).double()
        new.load_state_dict(self.state_dict())
        return new

    def forward(self, x: Tensor) -> Tensor:
        return HOWS[self.how](self, self.linear(x), x.shape[-1])


def of_instance(module: Keeps, x: Tensor, width: int) -> Tensor:
    if width not in module.tables:
        module.tables[width] = cosines(width)
    return x * module.tables[width]


def of_class(module: Keeps, x: Tensor, width: int) -> Tensor:
    if Keeps.table is None:
        Keeps.table = cosines(width)
    return x * Keeps.table


def new_of_class(module: Keeps, x: Tensor, width: int) -> Tensor:
    if not hasattr(Keeps, "late"):
        type(module).late = cosines(width)  # type: ignore[attr-defined]
    return x * module.late  # type: ignore[operator]


HOWS: dict[str, Callable[[Keeps, Tensor, int], Tensor]] = {
    "class, by instance": of_instance,
    "class, by name": of_class,
    "class, new": new_of_class,
    "cached_property": lambda m, x, n: x * m.property,
    "other class": lambda m, x, n: x * Tables.of(n),
    "static lru_cache": lambda m, x, n: x * Tables.cached(n),
    "lru_cache of a helper": lambda m, x, n: x * m.helper.method(n),
    "function attribute": lambda m, x, n: x * attribute(n),
    "default": lambda m, x, n: x * default(n),
    "keyword": lambda m, x, n: x * keyword(n),
    "decorator": lambda m, x, n: x * decorated(n),
    "module in a module": lambda m, x, n: x * outer.inner.of(n, cosines),
    "script": lambda m, x, n: scripted(x, n),
    "scripted module": lambda m, x, n: m.scripted(x),
}


def forget_tables() -> None:
    for table in (Keeps.tables, Tables.kept, vars(inner)["kept"]):
        table.clear()
    Keeps.table = None
    for cache in (Tables.cached, Tables.method):
        cache.cache_clear()
    for function in (default, keyword):
        (function.__kwdefaults__ or {"kept": (function.__defaults__ or ({},))[0]})["kept"].clear()
    for owner, name in ((Keeps, "late"), (attribute, "kept")):
        if hasattr(owner, name):
            delattr(owner, name)


@pytest.fixture(autouse=True)
def empty() -> Any:
    forget_tables()
    yield
    forget_tables()


def model_of(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), make(), nn.Tanh(), make(), nn.Linear(4, 5)).double()


@two_plans
@pytest.mark.parametrize("how", HOWS)
def test_a_recording_leaves_no_tensor_in_a_cache(how: str, plan: Plan) -> None:
    model = model_of(lambda: Keeps(how))
    for _ in range(3):  # a scripted function is compiled in its second run
        assert not trace(model, SAMPLE).record.leaves
    found = planned(model, data(), plan)
    given = torch.randn(2, 6, dtype=torch.float64)
    assert not isinstance(model(given), FakeTensor)
    forget_tables()
    assert_equal(found, plainly(model, data(), plan.total))


@pytest.mark.parametrize("how", HOWS)
def test_a_cache_that_was_filled_before_is_used(how: str) -> None:
    model = model_of(lambda: Keeps(how))
    expected = model(torch.ones(2, 6, dtype=torch.float64))
    found = planned(model, data(), TWO)
    assert_equal(found, plainly(model, data(), TWO.total))
    assert torch.equal(model(torch.ones(2, 6, dtype=torch.float64)), expected)


class Looks(Keeps):
    """Runs as one block, since it looks at values: tried on fake tensors first."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * 2 if float(y.detach().sum()) > 0 else y


@pytest.mark.parametrize("how", HOWS)
def test_a_block_that_runs_on_real_numbers_finds_no_fake_tensor(how: str) -> None:
    model = model_of(lambda: Looks(how))
    assert trace(model, SAMPLE).record.leaves
    assert not isinstance(model(torch.ones(2, 6, dtype=torch.float64)), FakeTensor)
    found = planned(model, data(), TWO)
    assert_equal(found, plainly(model, data(), TWO.total))


# --- where GEMS does not take it out again ------------------------------------------------------

WEAK: weakref.WeakKeyDictionary[Any, Tensor] = weakref.WeakKeyDictionary()
LOCAL = threading.local()
MANY = dict.fromkeys(range(-ENTRIES - 1, 0), torch.zeros(()))  # more than are compared


class Hidden(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.linear = how, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "WEAK":
            if Hidden not in WEAK:
                WEAK[Hidden] = cosines(4)
            return self.linear(x) * WEAK[Hidden]
        if self.how == "MANY":
            if 4 not in MANY:
                MANY[4] = cosines(4)
            return self.linear(x) * MANY[4]
        if not hasattr(LOCAL, "table"):
            LOCAL.table = cosines(4)
        return self.linear(x) * LOCAL.table


@pytest.mark.parametrize(
    "how, name", [("WEAK", "WEAK"), ("MANY", "MANY"), ("LOCAL", "a threading.local")]
)
def test_a_cache_that_gems_cannot_empty_is_rejected_by_name(how: str, name: str) -> None:
    def empty_them() -> None:
        WEAK.clear()
        MANY.pop(4, None)
        vars(LOCAL).clear()

    empty_them()
    model = model_of(lambda: Hidden(how))
    with pytest.raises(TraceError, match=rf"{name}.*run the model once on a real micro-batch"):
        trace(model, SAMPLE)
    empty_them()
    model(torch.ones(2, 6, dtype=torch.float64))  # the remedy
    trace(model, SAMPLE)
    if how != "LOCAL":  # ranks are threads here, each with another threading.local
        assert_equal(planned(model, data(), TWO), plainly(model, data(), TWO.total))
    empty_them()


def test_a_counter_of_a_class_is_rejected() -> None:
    class Counts(nn.Module):
        runs = 0

        def forward(self, x: Tensor) -> Tensor:
            Counts.runs += 1
            return x * Counts.runs

    with pytest.raises(TraceError, match=r"runs.* in every run"):
        trace(model_of(Counts), SAMPLE)
    assert Counts.runs == 0


class Absent:
    """As MONAI has it in place of a package that is not installed."""

    def __getattr__(self, name: str) -> Any:
        raise ImportError("no such package")


PACKAGE = Absent()


def test_a_name_of_a_package_that_is_not_installed_is_left_alone() -> None:
    class Optional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return PACKAGE.load(x) if x.shape[0] > 100 else self.linear(x) * Tables.of(4)

    trace(model_of(Optional), SAMPLE)
    assert not Tables.kept
