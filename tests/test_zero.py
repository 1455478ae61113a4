"""State that is shared out over the holders of a stage (ZeRO): the same numbers, fewer bytes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gems.cli.main import main
from gems.draw.svg import svg
from gems.errors import PlanError, ScheduleError
from gems.plans.plan import Plan
from gems.predict.timeline import Memory
from gems.schedule.action import Schedule, parse
from gems.schedule.build import lowered
from gems.schedule.machine import ScheduleMachine
from gems.schedule.validate import check, require
from gems.torch.trainer import Trainer
from gems.transport.protocol import Transport
from gems.transport.threads import run
from tests.exact import (
    Outcome,
    Recordings,
    batches,
    drawing,
    join,
    part,
    plainly,
    same_state,
    samples_in,
    sgd,
)
from tests.saved import Net, adamw, momentum, on_ranks, trained
from tests.test_generated import LAYERS, Generated, loss, networks, plans, sizes, some_data
from tests.worlds import spawn

Tensor = torch.Tensor
Make = Callable[[Any], torch.optim.Optimizer]
UNITS = Plan(stages=3, ranks=1, schedule="sequential", data=3)


class Small(nn.Module):
    """Statistics, a layer that never runs, a frozen one, and sizes that no number of ranks cuts
    evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Conv2d(3, 5, 3, padding=1), nn.BatchNorm2d(5)
        self.fixed = nn.Conv2d(5, 5, 1).requires_grad_(False)
        self.b, self.lost = nn.Conv2d(5, 3, 3, padding=1), nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fixed(self.norm(self.a(x)).relu())
        return self.head(self.b(x).relu().mean((2, 3)) * self.scale)


def small() -> nn.Module:
    torch.manual_seed(0)
    return Small().double()


def data(steps: int = 3) -> list[Any]:
    return batches((8, 3, 6, 6), 5, steps, torch.float64)


def stepped(
    transport: Transport,
    model: nn.Module,
    data: list[Any],
    plan: Plan,
    loss: Any = nn.functional.cross_entropy,
    make: Make = sgd,
    **options: Any,
) -> Outcome:
    """Losses and the state at the end; gradients are not looked at: no rank has them all."""
    inputs = data[0][0]
    sample = part(inputs, 0, -(-samples_in(inputs) // plan.total))
    trainer = Trainer(model, loss, make, sample, plan, transport=transport, **options)
    found = Outcome(losses=[trainer.step(x, y).loss for x, y in data])
    found.state, found.timeline = trainer.state_dict(), trainer.timeline()
    return found


def planned(model: nn.Module, data: list[Any], plan: Plan, *args: Any, **options: Any) -> Outcome:
    def work(transport: Transport) -> Outcome:
        return stepped(transport, copy.deepcopy(model), data, plan, *args, **options)

    with mock.patch("gems.torch.tracing.trace.record", Recordings()):
        return join(run(plan.world, work))


def assert_same(found: Outcome, expected: Outcome) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=1e-10)
    same_state(found.state, expected.state)


# --- the same numbers -----------------------------------------------------------------------------


@st.composite
def sharing(draw: Any) -> Plan:
    """Any plan of more than one holder, with any level that it can have."""
    plan = replace(draw(plans()), data=draw(st.integers(2, 3)))
    return replace(plan, zero=draw(st.integers(1, 2 if plan.bidirectional else 3)))


@settings(max_examples=settings().max_examples // 6, report_multiple_bugs=False)
@given(networks(list(LAYERS)), sharing(), sizes, st.booleans())
def test_a_generated_model_whose_state_is_shared_out_trains_like_the_plain_one(
    model: Generated, plan: Plan, samples: list[int], extra: bool
) -> None:
    data = some_data(samples, extra)
    assert_same(
        planned(model, data, plan, loss, adam), plainly(model, data, plan.total, loss, adam)
    )


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 0.01, weight_decay=0.1, amsgrad=True)


def groups(parameters: Any) -> torch.optim.Optimizer:
    """By the shape of whole parameters."""
    parameters = list(parameters)
    flat, rest = ([p for p in parameters if (p.ndim < 2) == is_flat] for is_flat in (True, False))
    return torch.optim.Adam([{"params": flat, "lr": 0.03}, {"params": rest, "weight_decay": 0.1}])


OPTIMIZERS: dict[str, Make] = {
    "groups": groups,
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.9, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1, initial_accumulator_value=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, 0.01),
    "rprop": lambda p: torch.optim.Rprop(p, 0.01),
}


@pytest.mark.parametrize("zero", (1, 2, 3))
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_that_work_cell_by_cell_do_so_on_pieces(name: str, zero: int) -> None:
    make, plan = OPTIMIZERS[name], replace(UNITS, zero=zero)
    expected = plainly(small(), data(), plan.total, make=make, clip=0.5)
    assert_same(planned(small(), data(), plan, make=make, clip=0.5), expected)


TEAMS = {
    "tiles and slices": Plan(stages=2, spatial=(2, 1), local_dp=2, micro_batches=2, zero=3),
    "a stage laid over another": Plan(
        stages=2, spatial=(1, 2), placement=((0, 1), 0), schedule="gpipe", micro_batches=3, data=2,
        zero=3,
    ),
    "two directions": Plan(stages=3, schedule="gems", replications=2, zero=2),
    "two directions, copies": Plan(stages=2, schedule="gems-zb", replications=1, data=2, zero=2),
    "streamed": Plan(stages=2, ranks=1, stream="2x2", schedule="gpipe", data=2, zero=3),
    "sync at the end": Plan(
        stages=4, placement="fold", schedule="gpipe", data=2, grad_sync="end", zero=3
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TEAMS)
def test_teams_and_both_directions_share_out_as_well(name: str) -> None:
    plan = TEAMS[name]
    assert_same(planned(small(), data(), plan), plainly(small(), data(), plan.total))


@pytest.mark.parametrize("zero", (1, 3))
def test_weights_without_a_gradient_are_left_alone_and_a_window_of_calls_makes_one_update(
    zero: int,
) -> None:
    """`lost` never gets a gradient: decay would change it if its piece had one of zeros."""
    plan = replace(UNITS, data=2, zero=zero)
    found = planned(small(), data(4), plan, make=adam, accumulate=2)
    whole = planned(small(), data(4), replace(plan, zero=0), make=adam, accumulate=2)
    assert found.losses == whole.losses
    assert torch.equal(found.state["lost.weight"], small().state_dict()["lost.weight"])
    for name, tensor in whole.state.items():
        assert torch.equal(found.state[name], tensor), name


class Detached(nn.Module):
    """What `a` gives crosses to the next stage, and no gradient comes back: it travels as zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(4, 4), nn.Linear(4, 4), Last()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.a(x), self.b(x))


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 5)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.out(b + a.detach())


@pytest.mark.parametrize("zero", (1, 2, 3))
def test_weights_that_no_gradient_leads_to_are_left_alone(zero: int) -> None:
    torch.manual_seed(0)
    model = Detached().double()
    some = [(torch.randn(4, 4).double(), torch.arange(4)) for _ in range(2)]
    plan = Plan(stages=(("a", "b"), ("head",)), data=2, zero=zero)
    assert_same(planned(model, some, plan, make=adam), plainly(model, some, 2, make=adam))


def test_a_step_that_overflows_makes_no_update_and_the_next_one_does() -> None:
    model, (x, y) = small().float(), batches((8, 3, 6, 6), 5, 1, torch.float32)[0]

    def scaled(transport: Transport, zero: int) -> Any:
        plan, lose = replace(UNITS, data=2, zero=zero), nn.functional.cross_entropy
        mine, options = copy.deepcopy(model), {"precision": "fp16", "transport": transport}
        trainer = Trainer(mine, lose, momentum, torch.empty(4, 3, 6, 6), plan, **options)
        assert trainer.session.scale is not None
        trainer.session.scale.value = 2.0**40
        first = trainer.step(x, y).updated
        trainer.session.scale.value = 2.0
        return first, trainer.step(x, y).updated, trainer.state_dict()

    with mock.patch("gems.torch.tracing.trace.record", Recordings()):
        plain, *_ = run(2, lambda transport: scaled(transport, 0))
        for zero in (1, 2, 3):
            for first, second, state in run(2, lambda t, zero=zero: scaled(t, zero)):
                assert (first, second) == (False, True)
                assert all(torch.equal(state[name], plain[2][name]) for name in state)


def test_learning_rates_change_for_pieces_too() -> None:
    rates = lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5)  # noqa: E731
    plain, shared = (
        planned(small(), data(), replace(UNITS, zero=zero), make=adam, scheduler=rates)
        for zero in (0, 3)
    )
    same_state(shared.state, plain.state, 0.0)


def over_gloo(transport: Transport, plans: list[Plan]) -> list[Outcome]:
    return [stepped(transport, small(), data(), plan, make=adam) for plan in plans]


def test_gloo_processes_come_to_the_plain_model() -> None:
    plans = [replace(UNITS, data=2, zero=zero) for zero in (1, 2, 3)]
    expected = plainly(small(), data(), 2, make=adam)
    for outcomes in zip(*spawn(2, over_gloo, plans), strict=True):
        assert_same(join(list(outcomes)), expected)


# --- fewer bytes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("zero", (0, 1, 2, 3))
@pytest.mark.parametrize("copies", (2, 4))
def test_bytes_follow_the_published_formulas(zero: int, copies: int) -> None:
    """float32 and Adam, 4 + 4 + 8 bytes per parameter: see gems/plans/residency.py. Each piece
    also counts its steps, in 4 bytes more."""

    def work(transport: Transport) -> tuple[Memory, Memory, int]:
        with drawing(0):
            model = nn.Sequential(nn.Flatten(), nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 5))
        plan = Plan(stages=1, schedule="sequential", data=copies, zero=zero)
        lose, make = nn.functional.cross_entropy, lambda p: torch.optim.Adam(p, 0.1)
        trainer = Trainer(model, lose, make, torch.empty(2, 3, 2, 2), plan, transport=transport)
        x, y = batches((2 * copies, 3, 2, 2), 5, 1, torch.float32)[0]
        for _ in range(2):
            trainer.step(x, y)
        assert trainer.session.measured is not None
        steps = 4 * len(trainer.optimizer.state) if trainer.optimizer else 0
        reduced = [m for _, m in trainer.session.measured.memory[0] if m.gradients][-1]
        return reduced, trainer.session.adapter.resident_memory(), steps

    found = run(copies, work)
    cells = 12 * 10 + 10 + 10 * 5 + 5
    part = -(-cells // copies)
    for rank, (summed, rest, steps) in enumerate(found):
        own = min(part, cells - rank * part)
        whole = cells if zero == 0 else part * copies
        assert summed.weights == 4 * (part if zero == 3 else whole)
        assert summed.gradients == 4 * (part if zero > 1 else whole)
        assert summed.optimizer == 8 * (own if zero else cells) + steps
        assert rest == replace(summed, gradients=0)


def test_stages_of_one_rank_are_whole_one_after_the_other() -> None:
    """What FSDP calls units: at most two stages have weights, and one has a whole gradient."""
    plan = Plan(stages=4, ranks=1, schedule="sequential", data=2, zero=3)
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)]
    model = nn.Sequential(*layers)
    one = 64 * 64 + 64
    x = [(torch.randn(4, 64), torch.randn(4, 64))]
    found = planned(model, x, plan, nn.functional.mse_loss, momentum)
    for row in found.timeline.memory:
        assert max(m.weights for _, m in row) == 4 * (2 * one + 4 * one // 2)
        assert max(m.gradients for _, m in row) <= 4 * (2 * one + 2 * one // 2)


# --- the order of gathers -------------------------------------------------------------------------


def test_gathers_are_asked_for_early_and_parse_back() -> None:
    """While a stage runs, the weights of the next one travel."""
    found = lowered(Plan(stages=4, ranks=1, schedule="sequential", data=2, zero=3))
    assert str(found).splitlines()[0] == (
        "0: 0U 1U 0F0 0D 2U 1F0 1D 3U 2F0 2D 3F0 2U 3B0 3D 3A 1U 2B0 2D 2A 0U 1B0 1D 1A 0B0 0D 0A"
        " 0O 1O 2O 3O"
    )
    assert parse(str(found)) == found


def changed(schedule: Schedule, rank: int, old: str, new: str) -> Schedule:
    rows = str(schedule).splitlines()
    assert old in rows[rank]
    rows[rank] = rows[rank].replace(old, new, 1)
    return parse("\n".join(" ".join(row.split()) for row in rows))


def test_check_finds_gathers_that_are_missing_crossed_or_for_nothing() -> None:
    plan = Plan(stages=4, ranks=1, schedule="sequential", data=2, zero=3)
    good = lowered(plan)
    assert not check(good, plan)
    faults = check(changed(good, 0, "0U ", ""), plan)
    assert "rank 0, step 1: 0F0 has no weights; it needs 0U before it" in faults
    (fault, *_) = check(changed(good, 1, "0U 1U", "1U 0U"), plan)
    assert "ranks 0 and 1 reduce and gather stages [0, 1, 2, 3] in different orders" in fault
    (fault, *_) = check(changed(good, 0, "0D 0A", "0A"), plan)
    assert fault == "rank 0 never reshards the weights of stages [0]"
    (fault, *_) = check(good, replace(plan, zero=2))
    assert "0U has nothing to do" in fault
    with pytest.raises(ScheduleError, match="are here already"):
        require(changed(good, 0, "0U 1U", "0U 0U"), plan)


def test_what_needs_weights_waits_until_all_ranks_have_come_to_gather_them() -> None:
    plan = Plan(stages=1, data=2, zero=3, schedule="sequential")
    stuck = ScheduleMachine(parse("0: 0U 0F0\n1: 0F1@1\n"), plan)
    assert [str(action) for _, action in stuck] == ["0U", "0F1@1"]
    assert [(rank, str(action)) for rank, _, action, _ in stuck.stuck()] == [(0, "0F0")]


@pytest.mark.parametrize("bidirectional", (False, True))
@pytest.mark.parametrize("placement", ("straight", "fold"))
def test_many_stages_of_a_rank_are_shared_out_without_a_deadlock(
    placement: str, bidirectional: bool
) -> None:
    """`lowered` proves what it gives; a sum waits for the one before, on all holders of both."""
    for stages, copies in ((3, 1), (4, 2), (6, 2)):
        ranks = 2 if placement == "straight" else 0
        plan = Plan(
            stages=stages, ranks=ranks, placement=placement, schedule="auto", micro_batches=4,
            bidirectional=bidirectional, data=copies,
        )  # fmt: skip
        for zero in (1, 2) if bidirectional else (1, 2, 3):
            lowered(replace(plan, zero=zero))


def test_gathers_are_drawn_as_predicted_and_as_measured(tmp_path: Path) -> None:
    options = "--stages 3 --ranks 1 --schedule sequential --data 2 --zero 3 --machine v100"
    network = "--model resnet-v1 --num-layers 8 --image-size 16"
    picture = tmp_path / "step.svg"
    assert main(["draw", *options.split(), *network.split(), "--svg", str(picture)]) == 0
    assert "unshard weights" in picture.read_text()
    measured = planned(small(), data(1), replace(UNITS, zero=3)).timeline
    assert "unshard weights" in svg(measured) and "0U" in {e.action for e in measured.events}


# --- what cannot be -------------------------------------------------------------------------------


def test_what_cannot_be_shared_out_is_refused_with_the_reason() -> None:
    with pytest.raises(PlanError, match="zero is 4; choose one of 0, 1, 2, 3"):
        Plan(zero=4)
    with pytest.raises(PlanError, match="two directions need them at different times; use zero=2"):
        Plan(stages=2, schedule="gems", zero=3)
    with pytest.raises(PlanError, match="each stage is on one rank; give the plan data-parallel"):
        planned(small(), data(1), Plan(stages=1, zero=1))
    for make in (torch.optim.Adafactor, torch.optim.LBFGS, Mine):
        with pytest.raises(PlanError, match=f"{make.__name__} may need a parameter as a whole"):
            planned(small(), data(1), replace(UNITS, data=2, zero=1), make=make)


class Mine(torch.optim.SGD):
    """Somebody's own optimizer, of which nobody knows what it does."""


class Known(Mine):
    """It says that it works cell by cell, and has state before the first step."""

    elementwise = True

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, 0.1, momentum=0.9)
        for p in self.param_groups[0]["params"]:
            cells = torch.arange(p.numel(), dtype=p.dtype).view_as(p)
            self.state[p]["momentum_buffer"] = cells / 100


def test_an_optimizer_of_ones_own_may_say_that_it_works_cell_by_cell() -> None:
    plan = replace(UNITS, data=2, zero=2)
    expected = plainly(small(), data(), plan.total, make=Known)
    assert_same(planned(small(), data(), plan, make=Known), expected)


# --- checkpoints ----------------------------------------------------------------------------------

COPIES = Plan(stages=2, micro_batches=2, data=2)


@pytest.mark.parametrize("make", (adamw, momentum))
def test_checkpoints_go_from_any_level_to_any_other_bit_for_bit(tmp_path: Path, make: Make) -> None:
    def whole(trainer: Trainer) -> Any:
        losses = trained(trainer, 0, 5)
        return losses, trainer.state_dict()

    def half(trainer: Trainer) -> None:
        trained(trainer, 0, 2)
        trainer.save(tmp_path / f"zero-{trainer.plan.zero}")

    level = {zero: replace(COPIES, zero=zero) for zero in (0, 1, 2, 3)}
    losses, expected = on_ranks(COPIES, whole, optimizer=make)[0]
    for plan in level.values():
        on_ranks(plan, half, optimizer=make)
    for there, here in ((0, 1), (0, 3), (1, 0), (2, 3), (3, 0), (3, 2)):

        def rest(trainer: Trainer, there: int = there) -> Any:
            trainer.load(tmp_path / f"zero-{there}")
            return trained(trainer, 2, 5), trainer.state_dict()

        for found, state in on_ranks(level[here], rest, weights=1, optimizer=make):
            assert found == losses[2:], (there, here)
            assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_a_checkpoint_of_shared_state_loads_on_one_rank_and_weights_come_and_go(
    tmp_path: Path,
) -> None:
    def save(trainer: Trainer) -> Any:
        trained(trainer, 0, 2)
        trainer.save(tmp_path / "one")
        return trainer.state_dict(), trainer.predict(
            batches((8, 3, 8, 8), 5, 1, torch.float64)[0][0]
        )

    def load(trainer: Trainer) -> Any:
        trainer.load(tmp_path / "one")
        assert trainer.optimizer is not None
        sums = [x["exp_avg"].sum() for x in trainer.optimizer.state.values()]
        return trainer.state_dict(), len(sums)

    def give(trainer: Trainer) -> Any:
        trainer.load_state_dict(state)
        return trainer.state_dict()

    plan = replace(COPIES, zero=3)
    (state, scores), *_ = on_ranks(plan, save, optimizer=adamw)
    assert scores.shape == (8, 5)
    one = Plan(stages=1, micro_batches=4, schedule="sequential")
    ((loaded, count),) = on_ranks(one, load, weights=1, optimizer=adamw)
    assert count == len(list(Net().parameters()))
    for found in (loaded, *on_ranks(plan, give, weights=2)):
        assert all(torch.equal(found[name], state[name]) for name in state)
