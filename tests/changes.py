"""Training while Python changes the model between steps, plainly and under plans. Not a test."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from gems.plans.plan import Plan
from gems.torch.trainer import Trainer
from gems.transport.protocol import Transport
from gems.transport.threads import run
from tests.exact import Outcome, assert_equal, batches, micro_batches, part, samples_in, sgd

building = threading.Lock()  # models that are built anew share torch's generator
Change = Callable[[nn.Module, int], None]
ONE = Plan(stages=1, micro_batches=2, schedule="sequential")
TWO = Plan(stages=2, micro_batches=2, schedule="gpipe")
TWO_WAYS = Plan(stages=2, replications=1, schedule="gems")
COPIES = Plan(stages=1, micro_batches=1, data=2, schedule="sequential")
PLANS = {"one": ONE, "two": TWO, "gems": TWO_WAYS, "data": COPIES}


def data(steps: int = 3, samples: int = 4, width: int = 6) -> list[Any]:
    return batches((samples, width), 5, steps, torch.float64)


def nothing(model: nn.Module, step: int) -> None:
    """No change between steps."""


def plainly(
    model: nn.Module, made: list[Any], count: int, change: Change = nothing, loss: Any = None
) -> Outcome:
    model = copy.deepcopy(model).train()
    optimizer = sgd(model.parameters())
    found = Outcome()
    for step, (inputs, targets) in enumerate(made):
        change(model, step)
        total = 0.0
        for x, y, share in micro_batches(inputs, targets, count):
            value = (loss or cross_entropy)(model(x), y) * share
            value.backward()
            total += float(value.detach())
        found.losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    found.state = model.state_dict()
    return found


def planned(
    model: nn.Module,
    made: list[Any],
    plan: Plan,
    change: Change = nothing,
    look: Callable[[Trainer], Any] | None = None,
    loss: Any = None,
    **options: Any,
) -> Outcome:
    """What all ranks agreed on; `look` sees each trainer at the end."""

    def work(transport: Transport) -> Outcome:
        with building:
            mine = copy.deepcopy(model).train()
        inputs = made[0][0]
        sample = part(inputs, 0, -(-samples_in(inputs) // plan.total))
        trainer = Trainer(
            mine, loss or cross_entropy, sgd, sample, plan, transport=transport, **options
        )
        found = Outcome()
        for step, (inputs, targets) in enumerate(made):
            change(mine, step)
            found.losses.append(trainer.step(inputs, targets).loss)
        found.state = trainer.state_dict()
        if look is not None:
            look(trainer)
        return found

    outcomes = run(plan.world, work)
    for other in outcomes[1:]:
        assert other.losses == outcomes[0].losses
        for name, tensor in outcomes[0].state.items():
            assert torch.equal(other.state[name], tensor), name
    return outcomes[0]


def assert_exact(
    model: nn.Module, plan: Plan, change: Change = nothing, made: list[Any] | None = None,
    **options: Any,
) -> None:  # fmt: skip
    made = data() if made is None else made
    expected = plainly(model, made, plan.total, change, options.get("loss"))
    assert_equal(planned(model, made, plan, change, **options), expected)
