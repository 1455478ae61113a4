"""Complex parameters, real ones that are viewed as complex, and gradients by row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gems.errors import PlanError
from gems.plans.plan import Plan
from gems.torch.trainer import Trainer
from gems.transport.protocol import Transport
from gems.transport.threads import run
from tests.exact import join, plainly
from tests.test_zero import planned, stepped
from tests.worlds import spawn

Tensor = torch.Tensor
L2L = {"stages": 2, "ranks": 1, "micro_batches": 2, "schedule": "l2l"}
PLANS: dict[str, Plan] = {
    "1f1b": Plan(stages=2, micro_batches=2),
    "copies": Plan(stages=2, micro_batches=2, data=2),
    "gems": Plan(stages=2, replications=1, schedule="gems"),
    "zero=1": Plan(stages=2, micro_batches=2, data=2, zero=1),
    "zero=2": Plan(stages=2, micro_batches=2, data=2, zero=2),
    "zero=3": Plan(stages=2, micro_batches=1, data=3, zero=3),
    "host": Plan(**L2L, offload="weights", optimizer_step="eager"),  # type: ignore[arg-type]
    "disk": Plan(**L2L, offload="weights:disk"),  # type: ignore[arg-type]
    "optimizer": Plan(stages=2, micro_batches=2, offload="optimizer:disk"),  # type: ignore[arg-type]
    "disk, zero=3": Plan(**L2L, data=2, zero=3, offload="weights:disk"),  # type: ignore[arg-type]
}


class Spectral(nn.Module):
    """Odd sizes before parameters that are viewed as complex numbers, and complex ones."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.rand(3))
        self.filter = nn.Parameter(torch.rand(6, 2))  # real and imaginary
        self.one = nn.Parameter(torch.rand(()))
        self.mixed = nn.Parameter(torch.rand(6, 6, dtype=torch.cfloat))
        self.offset = nn.Parameter(torch.rand(6, dtype=torch.cfloat))
        self.last, self.pairs = nn.Linear(6, 3), nn.Parameter(torch.rand(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        z = torch.view_as_complex(self.filter) * x.repeat(1, 2) + self.shift.repeat(2)
        z = (z * self.one) @ self.mixed + self.offset
        return self.last(z.abs()) * torch.view_as_complex(self.pairs).abs()


class Words(nn.Module):
    """Rows of a table, and a table that is used by two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 4, sparse=True)
        self.twice = nn.Embedding(11, 4, sparse=True)
        self.middle, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.middle(self.table(x) + self.twice(x)).tanh()
        return self.head(y + self.twice(x)).mean(1)


def spectral() -> nn.Module:
    torch.manual_seed(0)
    model = Spectral()
    for p in model.parameters():
        p.data = p.data.to(torch.complex128 if p.is_complex() else torch.float64)
    return model


def words() -> nn.Module:
    torch.manual_seed(0)
    return Words().double()


def data(kind: str, steps: int = 3) -> list[Any]:
    draw = torch.Generator().manual_seed(1)
    found = []
    for samples in (6, 6, 5)[:steps]:
        x = torch.randn(samples, 3, generator=draw, dtype=torch.float64)
        if kind == "words":
            x = torch.randint(11, (samples, 5), generator=draw)
        found.append((x, torch.randint(3, (samples,), generator=draw)))
    return found


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.3, momentum=0.9)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, 0.05)


def adagrad(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, 0.1)


def same(found: Any, expected: Any) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=1e-10)
    assert list(found.state) == list(expected.state)
    for name, theirs in expected.state.items():
        torch.testing.assert_close(found.state[name], theirs, rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.parametrize("name", PLANS)
def test_complex_parameters_train_as_in_one_process(name: str) -> None:
    for make, clip in ((adam, None), (sgd, None if PLANS[name].optimizer_step == "eager" else 0.1)):
        found = planned(spectral(), data("x"), PLANS[name], make=make, clip=clip)
        same(found, plainly(spectral(), data("x"), PLANS[name].total, make=make, clip=clip))


@pytest.mark.parametrize("name", PLANS)
def test_gradients_by_row_train_as_in_one_process(name: str) -> None:
    for make in (sgd, adagrad):
        found = planned(words(), data("words"), PLANS[name], make=make)
        same(found, plainly(words(), data("words"), PLANS[name].total, make=make))


def test_gradients_by_row_are_accumulated_and_clipped() -> None:
    steps = data("words", 2)
    both = [tuple(torch.cat(pair) for pair in zip(*steps, strict=True))]
    for name in ("1f1b", "copies", "host"):
        plan = PLANS[name]
        clip = None if plan.optimizer_step == "eager" else 0.1
        found = planned(words(), steps, plan, make=sgd, accumulate=2, clip=clip)
        dense = words()
        dense.table.sparse = dense.twice.sparse = False  # torch cannot clip sparse gradients
        expected = plainly(dense, both, 2 * plan.total, make=sgd, clip=clip)
        for key, theirs in expected.state.items():
            torch.testing.assert_close(found.state[key], theirs, rtol=1e-10, atol=1e-10, msg=key)


def test_an_optimizer_of_rows_keeps_them_or_is_rejected() -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(11, 3, sparse=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.table(x).mean(1)

    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SparseAdam(list(parameters), 0.1)

    torch.manual_seed(0)
    model, alone = Rows().double(), Plan(stages=1, micro_batches=2, schedule="sequential")
    found = planned(model, data("words"), alone, make=make)
    same(found, plainly(model, data("words"), 2, make=make))

    def work(transport: Transport) -> None:
        sample = torch.zeros(1, 5, dtype=torch.int64)
        plan = Plan(stages=1, micro_batches=1, data=2)
        Trainer(Rows(), nn.functional.cross_entropy, make, sample, plan, transport=transport)

    with pytest.raises(PlanError, match=r"SparseAdam wants sparse.*table\.weight.*Adam"):
        run(2, work)


def rank(transport: Transport, kind: str, name: str) -> Any:
    model = spectral() if kind == "x" else words()
    return stepped(transport, model, data(kind), PLANS[name], make=sgd)


@pytest.mark.parametrize(("kind", "name"), [("x", "zero=3"), ("x", "1f1b"), ("words", "copies")])
def test_over_gloo(kind: str, name: str) -> None:
    model = spectral() if kind == "x" else words()
    found = join(spawn(PLANS[name].world, rank, kind, name))
    same(found, plainly(model, data(kind), PLANS[name].total, make=sgd))
