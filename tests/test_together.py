"""All that a plan can say, said at once: schedule, placement, cuts, copies and every way to save.

A case is a plan that its number draws, on a small residual network in float64; three steps of it
must give the plain model's losses and state. What a plan refuses is drawn again. More of them, or
one again:

    GEMS_TOGETHER=2000 .venv/bin/python -m pytest tests/test_together.py -q -k case_17_
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import pytest
import torch
from torch import nn

from gems.errors import PlanError, ScheduleError
from gems.plans.fields import ASYNCHRONOUS
from gems.plans.fields import SCHEDULES as ALL
from gems.plans.offload import WHERE
from gems.plans.plan import Plan
from gems.plans.streaming import STREAM_HALOS
from gems.schedule.action import Kind
from gems.schedule.build import lowered
from tests.exact import Outcome, batches, plainly, same_state
from tests.test_zero import planned

Tensor = torch.Tensor
SCHEDULES = [name for name in ALL if name != ASYNCHRONOUS]  # which is not what the plain model does
CASES = int(os.environ.get("GEMS_TOGETHER", "64"))
RANKS = 8
SAMPLES = 8
LAYERS = ("first", "norm", "second", "third", "pool", "wide", "head")


class Net(nn.Module):
    """A skip over two layers, statistics, a pooling, and a head that sees the whole image."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4) if norm else nn.Identity()
        self.second, self.third = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.pool, self.wide = nn.MaxPool2d(2), nn.Conv2d(4, 6, 3, stride=2, padding=1)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x)).relu()
        x = x + self.third(self.second(x).relu())
        return self.head(self.wide(self.pool(x)).relu().mean((2, 3)))


STATE = ("activations", "weights", "optimizer")  # that is offloaded; values: see test_values.py


def some(r: Random, chance: float, value: Any, otherwise: Any) -> Any:
    return value if r.random() < chance else otherwise


def a_plan(r: Random, streams: bool) -> Plan:
    """Anything; it may well be one that cannot be."""
    stages = r.randint(1, 4)
    grids = [r.choice(((1, 2), (2, 1), (2, 2))) for _ in range(r.randint(1, stages))]
    entries: list[Any] = ["never", "always", "except_last", ("",)]
    entries += [tuple(r.sample(LAYERS, 2)), tuple(r.sample(LAYERS, 4))]
    schedule = r.choice(SCHEDULES)
    placement: Any = r.choice(("straight", "fold"))
    if r.random() < 0.2:
        placement = tuple(r.randrange(stages) for _ in range(stages))
    what = r.sample(STATE, r.randint(1, len(STATE)))
    return Plan(
        stages=stages,
        micro_batches=r.choice((1, 2, 4, 4)),
        schedule=schedule,
        data=r.choice((1, 2)),
        ranks=some(r, 0.3, 1, 0),
        placement=some(r, 0.4, placement, "straight"),
        bidirectional=some(r, 0.3, True, None) if schedule == "auto" else None,
        spatial=some(r, 0.4, tuple(grids), ()),
        local_dp=some(r, 0.15, 2, 1),
        halo=some(r, 0.2, "d2", "d1"),
        max_in_flight=some(r, 0.2, 1, 0) if schedule == "auto" else 0,
        grad_sync=r.choice(("overlap", "end")),
        recompute=some(r, 0.3, tuple(r.choice(entries) for _ in range(stages)), r.choice(entries)),
        stream=some(r, 0.5, (r.choice(((2, 2), (3, 1))),), ()) if streams else (),
        zero=some(r, 0.6, r.randint(1, 3), 0),
        offload=some(r, 0.6, [f"{w}:{r.choice(WHERE)}" for w in what], ()),
        optimizer_step=some(r, 0.2, "eager", "end"),
    )


def drawn(number: int) -> tuple[Plan, bool]:
    """The plan of a case, and whether its network has BatchNorm: none may, if it streams."""
    r = Random(f"together {number}")
    norm = r.random() < 0.6
    while True:
        try:
            plan = a_plan(r, not norm)
            order = lowered(plan)
        except (PlanError, ScheduleError):
            continue
        if plan.activations[0].offload and not any(a.kind is Kind.STORE for _, a in order):
            continue  # nothing waits long enough
        if plan.world <= RANKS and plan.total <= SAMPLES:
            if plan.zero and all(len(holders) == 1 for holders in plan.replica_groups):
                continue
            halo = Random(f"halo {number}").choice(STREAM_HALOS)
            return (replace(plan, stream_halo=halo) if plan.stream else plan), norm


def model(norm: bool) -> nn.Module:
    torch.manual_seed(0)
    return Net(norm).double()


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 0.01, weight_decay=0.1)


@cache
def expected(norm: bool, micro_batches: int) -> Outcome:
    return plainly(model(norm), data(), micro_batches, make=adam)


def data() -> list[Any]:
    return batches((SAMPLES, 3, 9, 8), 3, 3, torch.float64)


@pytest.mark.parametrize("number", range(CASES), ids=lambda n: f"case_{n}_")
def test_a_plan_that_says_many_things_trains_like_the_plain_model(number: int) -> None:
    plan, norm = drawn(number)
    plain = expected(norm, plan.total)
    try:
        found = planned(model(norm), data(), plan, make=adam)
        assert found.losses == pytest.approx(plain.losses, rel=1e-10)
        same_state(found.state, plain.state)
    except BaseException as error:
        error.add_note(f"case {number}, norm {norm}: {plan}")
        raise


def test_the_cases_say_all_there_is() -> None:
    """What is never drawn is never tested."""
    plans = [drawn(number)[0] for number in range(64)]
    seen = Counter(plan.schedule for plan in plans)
    assert set(seen) == set(SCHEDULES)
    assert {plan.zero for plan in plans} == {0, 1, 2, 3}
    assert {part for plan in plans for part in plan.offload} == {
        f"{what}:{where}" for what in STATE for where in WHERE
    }
    for both in (
        lambda p: p.cut and p.zero and p.offload,
        lambda p: p.cut and p.recompute != "never" and p.offload,
        lambda p: p.bidirectional and p.offload and p.zero,
        lambda p: p.stream and p.offload,
        lambda p: p.stream_halo == "carry",
        lambda p: p.ranks < p.depth and p.offload,
        lambda p: p.data > 1 and p.cut and p.zero,
    ):
        assert any(map(both, plans))
