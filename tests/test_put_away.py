"""Weights, gradients and the optimizer's state that are put away, and L2L: the same numbers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from benchmarks.l2l import train as benchmark
from benchmarks.l2l.run import watched
from gems.errors import GemsError, LossError, PlanError, ScheduleError
from gems.hardware import Link, bytes_of, machine
from gems.model.costs import Cost, Costs
from gems.plans.plan import Plan
from gems.predict.simulate import simulate
from gems.schedule.action import Kind, parse
from gems.schedule.build import lowered
from gems.schedule.machine import ScheduleMachine
from gems.schedule.validate import check, require
from gems.torch.trainer import Trainer
from gems.transport.protocol import Transport
from gems.transport.threads import run
from tests.exact import Outcome, drawing, join, plainly, same_state, sgd
from tests.saved import COPIES, GEMS, ONE, TWO, adamw, momentum, network, on_ranks, trained
from tests.test_generated import LAYERS, Generated, loss, networks, plans, sizes, some_data
from tests.test_zero import adam, assert_same, data, planned, small, stepped
from tests.worlds import spawn

Tensor = torch.Tensor
L2L = Plan(stages=3, ranks=1, schedule="l2l", micro_batches=2, offload="weights:disk")
each_place = pytest.mark.parametrize("place", ["host", "disk"])
each_way = pytest.mark.parametrize("updates", ["end", "eager"])


# --- the same numbers -----------------------------------------------------------------------------


@st.composite
def putting_away(draw: Any) -> Plan:
    """Any plan, with anything put away that can be: also with shared state, and L2L."""
    plan = replace(draw(plans()), offload=f"{draw(st.sampled_from(WHAT))}:{draw(WHERE)}")
    if draw(st.booleans()):
        plan = replace(L2L, stages=plan.depth, data=plan.data, offload=plan.offload)
    plan = replace(plan, recompute=draw(st.sampled_from(("never", "always", "except_last"))))
    if plan.data > 1:
        plan = replace(plan, zero=draw(st.integers(0, 2 if plan.bidirectional else 3)))
    eager = plan.zero in (0, 3) and draw(st.booleans())
    return replace(plan, optimizer_step="eager" if eager else "end")


WHAT = ("weights", "optimizer")
WHERE = st.sampled_from(("host", "disk"))


@settings(max_examples=settings().max_examples // 8, report_multiple_bugs=False)
@given(networks(list(LAYERS)), putting_away(), sizes, st.booleans())
def test_a_generated_model_whose_state_is_put_away_trains_like_the_plain_one(
    model: Generated, plan: Plan, samples: list[int], extra: bool
) -> None:
    some = some_data(samples, extra)
    found = planned(model, some, plan, loss, adam)
    assert_same(found, plainly(model, some, plan.total, loss, adam))


MAKES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": sgd,
    "adam": adam,
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1, initial_accumulator_value=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, 0.01),  # looks at parameters as a whole
}


@each_way
@pytest.mark.parametrize("name", MAKES)
def test_l2l_is_the_plain_loop_bit_for_bit(name: str, updates: str) -> None:
    found = planned(small(), data(), replace(L2L, optimizer_step=updates), make=MAKES[name])
    expected = plainly(small(), data(), 2, make=MAKES[name])
    assert found.losses == expected.losses
    same_state(found.state, expected.state, 0.0)


PLANS = {
    "the idle replica of GEMS": replace(GEMS, offload="weights"),
    "two directions, shared out": replace(GEMS, data=2, zero=2, offload="weights:disk"),
    "ZeRO-Infinity": replace(L2L, data=2, micro_batches=1, zero=3),
    "copies, each for itself": replace(L2L, data=2, offload="weights:host"),
    "the state alone": replace(COPIES, offload="optimizer:disk"),
    "the state alone, shared out": replace(COPIES, zero=1, offload="optimizer:host"),
    "tiles": Plan(stages=2, spatial=(1, 2), micro_batches=2, offload="weights:disk"),
    "streamed": Plan(stages=2, ranks=1, stream="2x2", schedule="gpipe", offload="weights"),
}


@pytest.mark.parametrize("name", PLANS)
def test_clipped_gradients_are_those_of_all_stages(name: str) -> None:
    plan = PLANS[name]
    found = planned(small(), data(), plan, make=adam, clip=0.5)
    assert_same(found, plainly(small(), data(), plan.total, make=adam, clip=0.5))


@each_place
@pytest.mark.parametrize("what", WHAT)
def test_several_calls_make_one_update_and_learning_rates_change(what: str, place: str) -> None:
    rates = lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5)  # noqa: E731
    plain, away = (
        planned(small(), data(4), plan, make=adam, scheduler=rates, accumulate=2)
        for plan in (replace(L2L, offload=()), replace(L2L, offload=f"{what}:{place}"))
    )
    assert away.losses == plain.losses
    same_state(away.state, plain.state, 0.0)


@each_place
def test_a_step_that_overflows_makes_no_update_and_the_next_one_does(place: str) -> None:
    x, y = data(1)[0]
    states = []
    for offload in ("", f"weights:{place}"):
        (found,) = run(1, lambda t, offload=offload: scaled(t, offload, x.float(), y))
        assert found[:2] == (False, True)
        states.append(found[2])
    same_state(states[1], states[0], 0.0)


def scaled(transport: Transport, offload: str, x: Tensor, y: Tensor) -> Any:
    plan, lose = replace(L2L, offload=offload), nn.functional.cross_entropy
    options = {"precision": "fp16", "transport": transport}
    trainer = Trainer(small().float(), lose, momentum, torch.empty(4, 3, 6, 6), plan, **options)
    assert trainer.session.scale is not None
    trainer.session.scale.value = 2.0**40
    first = trainer.step(x, y).updated
    trainer.session.scale.value = 2.0
    return first, trainer.step(x, y).updated, trainer.state_dict()


def over_gloo(transport: Transport, plans: list[Plan]) -> list[Outcome]:
    return [stepped(transport, small(), data(), plan, make=adam) for plan in plans]


def test_gloo_processes_come_to_the_plain_model() -> None:
    both = [PLANS["ZeRO-Infinity"], replace(L2L, data=2, optimizer_step="eager")]
    for at, outcomes in enumerate(zip(*spawn(2, over_gloo, both), strict=True)):
        expected = plainly(small(), data(), both[at].total, make=adam)
        assert_same(join(list(outcomes)), expected)


def test_a_loss_that_is_no_number_updates_nothing() -> None:
    def work(transport: Transport) -> None:
        plan = replace(L2L, optimizer_step="eager")
        lose = lambda a, b: a.sum() * torch.nan  # noqa: E731
        sample = torch.empty(4, 3, 6, 6, dtype=torch.float64)
        trainer = Trainer(small(), lose, sgd, sample, plan, transport=transport)
        names = ("a.weight", "head.weight")
        before = [trainer.session.weights.copy(name).clone() for name in names]
        with pytest.raises(LossError, match="no update was made"):
            trainer.step(*data(1)[0])
        for name, weight in zip(names, before, strict=True):
            assert torch.equal(trainer.session.weights.copy(name), weight)
        with pytest.raises(GemsError, match="has failed in the middle of a step"):
            trainer.state_dict()

    run(1, work)


@pytest.mark.parametrize("place", ["host", "disk"])
def test_a_stage_is_updated_while_the_one_before_it_runs_where_that_takes_no_memory(
    place: str,
) -> None:
    """L2L-p: beside the work on the host; from disk all of a stage would be here meanwhile."""
    came = threading.Event()

    class Patient(torch.optim.SGD):
        by_parameter = True

        def step(self, closure: Any = None) -> Any:
            overlaps.append(came.wait(10.0 if place == "host" else 0.0))
            return super().step(closure)

    def work(transport: Transport) -> None:
        plan = replace(L2L, optimizer_step="eager", offload=f"weights:{place}")
        make = lambda parameters: Patient(parameters, 0.1)  # noqa: E731
        sample = torch.empty(4, 3, 6, 6, dtype=torch.float64)
        trainer = Trainer(small(), nn.CrossEntropyLoss(), make, sample, plan, transport=transport)
        backward = trainer.session.adapter.backward

        def noticed(stage: int, *rest: Any, **more: Any) -> Any:
            if stage == 1:
                came.set()
            return backward(stage, *rest, **more)

        trainer.session.adapter.backward = noticed  # type: ignore[method-assign]
        trainer.step(*data(1)[0])
        assert trainer.session.adapter.resident_memory().gradients == 0
        trainer.close()

    overlaps: list[bool] = []
    run(1, work)
    assert overlaps == [place == "host", True, True]


def test_an_update_that_fails_beside_the_work_ends_the_step() -> None:
    class Broken(torch.optim.SGD):
        by_parameter = True

        def step(self, closure: Any = None) -> Any:
            raise ValueError("no step today")

    def work(transport: Transport) -> None:
        plan = replace(L2L, optimizer_step="eager", offload="weights:host")
        make = lambda parameters: Broken(parameters, 0.1)  # noqa: E731
        sample = torch.empty(4, 3, 6, 6, dtype=torch.float64)
        trainer = Trainer(small(), nn.CrossEntropyLoss(), make, sample, plan, transport=transport)
        with pytest.raises(ValueError, match="no step today"):
            trainer.step(*data(1)[0])

    run(1, work)


# --- the order ------------------------------------------------------------------------------------


def test_l2l_in_text() -> None:
    late = "0: 0U 0F0 1U 0F1 0D 1F0 2U 1F1 1D 2F0 2F1 2R0 2B0 2R1 1U 2B1 2D 2A"
    late += " 1R0 1B0 1R1 0U 1B1 1D 1A 0R0 0B0 0R1 0B1 0D 0A\n"
    assert str(lowered(L2L)) == late.replace("0A\n", "0A 0O 1O 2O\n")
    eager = late.replace("2A ", "2A 2O ").replace("1A ", "1A 1O ").replace("0A\n", "0A 0O\n")
    assert str(lowered(replace(L2L, optimizer_step="eager"))) == eager
    assert parse(eager) == lowered(replace(L2L, optimizer_step="eager"))


def test_each_direction_fetches_for_itself() -> None:
    schedule = lowered(replace(GEMS, offload="weights"))
    ends = [row[-1] for row in schedule.ranks]
    assert [a.kind for a in ends] == [Kind.OPTIMIZER_STEP] * 3
    fetched = [[a.stage for a in row if a.kind is Kind.UNSHARD] for row in schedule.ranks]
    assert fetched == [[0, 2, 0, 2], [1], [2, 0, 2, 0]]  # rank 1 has one stage in both directions
    assert len(list(ScheduleMachine(schedule, replace(GEMS, offload="weights")))) == sum(
        len(row) for row in schedule.ranks
    )


def test_check_finds_weights_that_are_not_there_and_updates_out_of_place() -> None:
    plan = replace(L2L, stages=1, micro_batches=1, optimizer_step="eager", recompute="never")
    assert check(parse("0: 0U 0F0 0R0 0B0 0D 0A 0O"), plan) == []
    for text, complaint in {
        "0: 0F0 0R0 0B0 0A 0O": "0F0 has no weights; it needs 0U before it",
        "0: 0U 0F0 0R0 0B0 0D 0O 0A": "0O comes before 0A",
        "0: 0U 0F0 0R0 0B0 0D 0A": "rank 0 never does 0O",
        "0: 0U 0F0 0R0 0B0 0D 0A 0O 0O": "0O is the second of its stage",
    }.items():
        with pytest.raises(ScheduleError, match=complaint):
            require(parse(text), plan)
    eager = replace(L2L, optimizer_step="eager")
    with pytest.raises(ScheduleError, match="2O comes before 0A, 1A"):
        require(lowered(eager), replace(eager, optimizer_step="end"))


def test_what_cannot_be_is_refused_with_the_reason() -> None:
    with pytest.raises(PlanError, match=r"runs all stages on one rank.*give ranks=1, and data=N"):
        lowered(Plan(stages=2, schedule="l2l"))
    with pytest.raises(PlanError, match="zero=1 would all-gather the updated shards"):
        Plan(stages=2, data=2, zero=1, optimizer_step="eager")
    with pytest.raises(PlanError, match="grad_sync='end' puts them last; remove one"):
        Plan(optimizer_step="eager", grad_sync="end")
    with pytest.raises(PlanError, match="choose one of end, eager"):
        Plan(optimizer_step="never")
    with pytest.raises(PlanError, match="2bw cannot offload"):
        Plan(stages=2, schedule="2bw", offload="weights")
    eager = replace(L2L, optimizer_step="eager")
    with pytest.raises(
        PlanError, match="clip must see all of them first; use optimizer_step='end'"
    ):
        planned(small(), data(1), eager, clip=1.0)
    with pytest.raises(PlanError, match="precision='fp16' must see all of them first"):
        planned(small(), data(1), eager, precision="fp16")
    with pytest.raises(PlanError, match=r"LBFGS may need all parameters at once.*by_parameter"):
        planned(small(), data(1), L2L, make=torch.optim.LBFGS)


# --- bytes ----------------------------------------------------------------------------------------


def layered(transport: Transport, plan: Plan) -> Any:
    """Peaks as they were counted and as they are foreseen, and every moment of the last step."""
    with drawing(0):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)))
    make = lambda p: torch.optim.Adam(p, 0.1)  # noqa: E731
    sample = torch.empty(2, 64)
    trainer = Trainer(model, nn.functional.mse_loss, make, sample, plan, transport=transport)
    x = torch.randn(2 * plan.total, 64, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        trainer.step(x, x)
    seen = trainer.timeline()
    return seen.peaks, trainer.forecast().peaks, seen.memory[trainer.rank], trainer.peak


COUNTED = {
    **{f"l2l, {updates}": replace(L2L, optimizer_step=updates) for updates in ("end", "eager")},
    "copies": Plan(ranks=1, schedule="sequential", data=2),
    "shared out": Plan(ranks=1, schedule="sequential", data=2, zero=3),
    "gems": Plan(schedule="gems"),
}


@pytest.mark.parametrize("offload", ["weights:host", "weights:disk", "optimizer:disk"])
@pytest.mark.parametrize("name", COUNTED)
def test_bytes_are_foreseen(name: str, offload: str) -> None:
    plan = replace(COUNTED[name], stages=4, ranks=COUNTED[name].ranks if name != "gems" else 4)
    plan = replace(plan, offload=offload)
    for counted, foreseen, *_ in run(plan.world, lambda t: layered(t, plan))[:1]:
        for mine, theirs in zip(counted, foreseen, strict=True):
            assert mine.total == pytest.approx(theirs.total, rel=0.01)


@each_way
def test_l2l_never_holds_more_than_two_layers(updates: str) -> None:
    plan = replace(L2L, stages=4, micro_batches=3, optimizer_step=updates)
    ((_, _, moments, peak),) = run(1, lambda t: layered(t, plan))
    one = 4 * (64 * 64 + 64)
    assert max(m.weights for _, m in moments) == 2 * one
    assert max(m.gradients for _, m in moments) == one
    assert moments[-1][1].weights == moments[-1][1].gradients == 0
    reduced = 4 * one if updates == "end" else one  # gradients that are offloaded at a time
    most = max(m.offloaded for _, m in moments)
    assert most == 3 * 4 * one + reduced, "weights, twice that for Adam, gradients"
    assert moments[-1][1].offloaded == 3 * 4 * one
    assert peak < 7 * one, "one stage with its gradient and state, and a few activations"


def test_time_counts_what_is_fetched() -> None:
    """Weights come while the layer before runs, if the disk is fast enough."""
    cost = Cost(f=1.0, i=1.0, w=1.0, activations=8.0, weights=100.0, gradients=100.0)

    def seconds(disk: float, offload: str) -> float:
        there = replace(machine("cpu"), disk=Link(latency=0.0, bandwidth=disk))
        plan = Plan(stages=4, ranks=1, schedule="l2l", micro_batches=8, offload=offload)
        return simulate(lowered(plan), plan, Costs((cost,) * 4), there).seconds

    stays, fast = seconds(1.0, ""), seconds(1e9, "weights:disk")
    # 8 forwards while 100 bytes come: at 1 byte per second the disk is waited for.
    assert fast == pytest.approx(stays, rel=1e-3)
    assert seconds(1.0, "weights:disk") > stays + 4 * (100 - 8)


# --- checkpoints ----------------------------------------------------------------------------------

SAVED = {
    "plain": ONE,
    "disk": replace(L2L, micro_batches=4),
    "host": replace(L2L, micro_batches=4, offload="weights", optimizer_step="eager"),
    "state": replace(TWO, offload="optimizer:disk"),
    "infinity": replace(L2L, data=2, zero=3),
    "gems": replace(GEMS, offload="weights:disk"),
}


@pytest.mark.parametrize("make", [momentum, adamw])
def test_checkpoints_go_from_any_place_to_any_other(make: Any, tmp_path: Path) -> None:
    def save(trainer: Trainer) -> Any:
        trained(trainer, 0, 2)
        trainer.save(tmp_path / name)
        return trained(trainer, 2, 4), trainer.state_dict()

    def load(trainer: Trainer) -> Any:
        trainer.load(tmp_path / name)
        return trained(trainer, 2, 4), trainer.state_dict()

    expected: Any = None
    names = list(SAVED)
    for at, name in enumerate(names):
        found, *_ = on_ranks(SAVED[name], save, optimizer=make)
        expected = expected or found
        loaded, *_ = on_ranks(SAVED[names[at - 1]], load, 1, optimizer=make)
        for went, state in (found, loaded):
            assert went == pytest.approx(expected[0], rel=1e-10)
            same_state(state, expected[1])


@pytest.mark.parametrize("name", ["disk", "host", "infinity"])
def test_weights_are_given_and_predict_where_they_are_put_away(name: str) -> None:
    def work(trainer: Trainer) -> Any:
        trainer.load_state_dict(state)
        return trainer.state_dict(), trainer.predict(x)

    x = torch.randn(8, 3, 8, 8, dtype=torch.float64)
    state = {label: 1.5 * t if t.dim() else t for label, t in network().state_dict().items()}
    ((_, scores),) = on_ranks(ONE, work)
    for found, there in on_ranks(SAVED[name], work):
        same_state(found, state, 0.0)
        torch.testing.assert_close(there, scores, rtol=1e-12, atol=0.0)


# --- a model that does not fit --------------------------------------------------------------------


def test_a_model_on_the_meta_device_is_made_stage_by_stage() -> None:
    """The same weights, and never those of two stages at once."""
    most = 0

    def initialize(module: nn.Module) -> None:
        nonlocal most
        sizes = [p.untyped_storage().nbytes() for p in everything.parameters()]
        most = max(most, sum(1 for size in sizes if size))
        for p in module.parameters(recurse=False):
            nn.init.normal_(p)

    states = []
    for offload in ("", "weights:disk", "weights:host"):
        with torch.device("meta"):
            everything = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
        most = 0
        plan = replace(L2L, stages=4, offload=offload)

        def work(transport: Transport, model: nn.Module = everything, plan: Plan = plan) -> Any:
            options = {"transport": transport, "initialize": initialize}
            lose = nn.functional.mse_loss
            return Trainer(model, lose, sgd, torch.empty(2, 8), plan, **options).state_dict()

        states += run(1, work)
        assert most == (1 if offload else 4)
    for state in states[1:]:
        same_state(state, states[0], 0.0)


def test_state_beyond_the_memory_of_a_process_trains_from_disk() -> None:
    """The process is watched from outside: weights, gradients and Adam alone would not fit."""
    layers, width, cap = 20, 1448, bytes_of("512MiB")
    assert 4 * 4 * layers * width**2 > cap
    found = watched("l2l-p", layers, width, steps=2)
    assert found.losses[1] < found.losses[0]
    assert found.resident < cap
    x, y = benchmark.data(width)
    with torch.no_grad():
        for number in range(layers):
            x = benchmark.Layer(number, width)(x)
        assert found.losses[0] == pytest.approx(float(nn.functional.mse_loss(x, y)), rel=1e-5)
