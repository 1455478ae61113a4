"""One assembly: trainer, commands and search compile a plan to the same stages, costs and schedule.

They used to assemble them by themselves, and differed in the bytes of optimizer state that they
left memory for.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from types import ModuleType

import pytest
import torch
from torch import nn

from gems.cli import plan as plan_command
from gems.cli import simulate as simulate_command
from gems.cli.model_options import model_from, sampled
from gems.errors import GemsError
from gems.files import to_json
from gems.hardware import machine
from gems.model.costs import Costs
from gems.planner.assign import stages
from gems.planner.compile import CompiledPlan, compile_plan
from gems.planner.request import Request
from gems.planner.search import search
from gems.plans.plan import Plan
from gems.torch.planning import Study
from gems.torch.setup import Setup, Surroundings, set_up
from gems.transport.threads import World
from tests.generate.plans import draw_plan

LAYERS, SIDE = 5, 16
MODEL = ("--model", "tests.test_compile:network", "--image-size", str(SIDE), "--batch-size", "2")
CPU = machine("cpu")
BUDGET = 200_000  # of bytes: some plans recompute, some have no order that fits


class Network(nn.Module):
    """Wide enough that optimizer state matters, with a skip."""

    def __init__(self) -> None:
        super().__init__()
        convs = [nn.Conv2d(8, 8, 3, padding=1) for _ in range(LAYERS - 1)]
        self.layers = nn.ModuleList([nn.Conv2d(3, 8, 3, padding=1), *convs])
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x = self.layers[0](x).relu()
        for layer in list(self.layers)[1:]:
            x = layer(x).relu()
        return self.norm(x + first).mean((2, 3))


def network() -> nn.Module:
    return Network()


def given(command: ModuleType, *options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add(parser.add_subparsers())
    name = command.__name__.rpartition(".")[2]
    return parser.parse_args([name, *MODEL, "--machine", "cpu", *options])


def prepared(plan: Plan | str, ranks: int, memory: int | None) -> Setup:
    """What a trainer starts with."""
    model = model_from(given(plan_command)).train()
    sample = torch.empty(2, 3, SIDE, SIDE)
    where = Surroundings(World(ranks).rank(0), torch.device("cpu"), CPU, memory, "fp32")
    return set_up(model, (), sample, plan, "estimate", None, where)


Contents = tuple[Plan, tuple[int, ...], Costs, str]


def contents(found: CompiledPlan | Setup) -> Contents:
    plan = found.plan
    if plan.grad_sync != "end":  # a trainer chooses by its cores
        plan = replace(plan, grad_sync="auto")
    return plan, tuple(found.stage_of), found.costs, str(found.schedule)


@cache
def study() -> Study:
    return Study(*sampled(given(plan_command)), CPU)


def drawn(number: int) -> Plan:
    r = Random(f"compile {number}")
    plan = Plan(**draw_plan(r, LAYERS, 2, tiles=number % 3 == 0, ranks=8, patches=False))
    return replace(plan, recompute="auto") if number % 5 == 1 else plan


@pytest.mark.parametrize("memory", [None, BUDGET])
@pytest.mark.parametrize("number", range(20))
def test_trainer_and_commands_compile_the_same(
    number: int, memory: int | None, tmp_path: Path
) -> None:
    plan = drawn(number)
    file = tmp_path / "plan.json"
    file.write_text(to_json(plan))
    options = ("--plan", str(file))
    budget = ("--memory", f"{memory}B") if memory else ()
    try:
        trained = contents(prepared(plan, plan.world, memory))
    except GemsError as error:
        with pytest.raises(type(error)) as raised:
            contents(plan_command.planned(given(plan_command, *options, *budget))[1])
        assert str(raised.value) == str(error)
        return
    planned = plan_command.planned(given(plan_command, *options, *budget))[1]
    assert contents(planned) == trained
    if memory is None:
        simulated = simulate_command.compiled(given(simulate_command, *options))
        assert contents(simulated) == trained
        assert simulated.timeline == planned.timeline


@pytest.mark.parametrize("memory", [None, 2 * BUDGET, 2**20])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_what_the_search_predicts_is_what_trainer_and_commands_compile(
    ranks: int, memory: int | None
) -> None:
    request = Request.on(CPU, ranks, memory)
    result = search(*study().graph, CPU, request)
    if not result.fitting:
        with pytest.raises(GemsError, match="nothing fits"):
            prepared("auto", ranks, memory)
        return
    best = result.best
    compiled = compile_plan(best.plan, *study().graph, CPU, request)
    assert compiled.plan == best.plan
    assert compiled.prediction == best.prediction
    budget = ("--memory", f"{memory}B") if memory else ()
    chosen, planned = plan_command.planned(given(plan_command, "--auto", str(ranks), *budget))
    assert chosen == best.plan
    assert contents(prepared("auto", ranks, memory)) == contents(compiled) == contents(planned)


def test_the_prediction_of_one_copy_is_that_of_all_ranks() -> None:
    for number in range(20):
        plan = drawn(number)
        compiled = study().compiled(plan, Request.of(plan))
        if not plan.asynchronous:
            assert compiled.prediction.seconds == pytest.approx(compiled.timeline.seconds)
        workspace = [max(compiled.costs[s].workspace for s in on) for on in plan.stages_on]
        pairs = zip(compiled.timeline.peaks, workspace, strict=True)
        fullest = max(peak.total + extra for peak, extra in pairs)
        assert compiled.prediction.bytes == pytest.approx(fullest, rel=1e-3), plan


def test_stages_are_even_in_time_unless_that_exceeds_the_budget() -> None:
    plan = Plan(stages=3, micro_batches=6)
    graph, costs = study().graph
    even = study().compiled(plan, Request.of(plan))
    needed = even.least_bytes[0]
    assert even.stage_of == tuple(stages(plan, graph, costs))
    assert study().compiled(plan, Request.of(plan, needed)).stage_of == even.stage_of
    tight = study().compiled(plan, Request.of(plan, 0.6 * needed))
    assert tight.stage_of == tuple(stages(plan, graph, costs, 0.6 * needed)) != even.stage_of
    assert tight.least_bytes[0] < needed


def test_greedy_orders_leave_memory_for_the_optimizer_that_is_asked_for() -> None:
    plan = Plan(stages=2, micro_batches=4, schedule="auto")
    adam, sgd = (Request(2, BUDGET, 4, state=state) for state in (2.0, 0.0))
    limits = [study().compiled(plan, request).activation_limit for request in (adam, sgd)]
    assert None not in limits
    costs = study().compiled(plan, adam).costs
    state = 2 * max(cost.gradients for cost in costs.items)
    assert 0 < limits[1] - limits[0] <= state
    assert study().compiled(plan, Request.of(plan)).activation_limit is None
