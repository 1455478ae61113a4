"""PipeDream-2BW: its update equation, its windows, its two versions of weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from gems.cli.main import main
from gems.errors import GemsError, LossError, PlanError, ShapeError
from gems.hardware import Device, Link, Machine
from gems.model.costs import Cost, Costs, Edge, together, unit
from gems.model.graph import Graph
from gems.planner.explain import chosen
from gems.planner.request import Request
from gems.planner.search import search
from gems.planner.two_buffers import step_seconds
from gems.plans.fields import BATCHES
from gems.plans.plan import Plan
from gems.plans.streaming import STREAM_HALOS
from gems.predict.memory_trace import live
from gems.predict.simulate import simulate, virtual
from gems.predict.timeline import Event, Timeline
from gems.schedule.action import Action, Kind, Schedule, parse
from gems.schedule.async_window import AT_ONCE, windows
from gems.schedule.build import lowered
from gems.schedule.lower.messages import receipts
from gems.schedule.validate import check
from gems.torch.tracing.trace import trace
from gems.torch.trainer import Trainer
from gems.transport.protocol import Transport
from gems.transport.threads import run
from tests import runs
from tests.exact import Recordings, batches, micro_batches, part, same_state
from tests.worlds import spawn

MAKERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=1e-2),
    "adam": lambda p: torch.optim.Adam(p, 0.01),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(),
        nn.Conv2d(4, 4, 3), nn.Tanh(), nn.BatchNorm2d(4, momentum=None),
        nn.Flatten(), nn.Linear(4 * 16, 8), nn.Tanh(), nn.Linear(8, 3),
    ]  # fmt: skip
    return nn.Sequential(*layers).double()


def by_equation(
    model: nn.Module, data: list[Any], count: int, make: Any, before_batch: Any = lambda *_: None
) -> tuple[list[float], Any]:
    """W(t+1) = W(t) - update(gradient of batch t at W(max(t-1, 0))), in one process."""
    model = copy.deepcopy(model).train()
    parameters = list(model.parameters())
    optimizer = make(parameters)
    before = [p.detach().clone() for p in parameters]
    losses = []
    for t, (inputs, targets) in enumerate(data):
        before_batch(model, t)
        newest = [p.detach().clone() for p in parameters]
        with torch.no_grad():
            for p, old in zip(parameters, before, strict=True):
                p.copy_(old)
        total = 0.0
        for x, y, share in micro_batches(inputs, targets, count):
            loss = cross_entropy(model(x), y) * share
            if loss.requires_grad:
                loss.backward()
            total += float(loss.detach())
        with torch.no_grad():
            for p, new in zip(parameters, newest, strict=True):
                p.copy_(new)
        optimizer.step()
        optimizer.zero_grad()
        before = newest
        losses.append(total)
    return losses, model.state_dict()


def trained(
    plan: Plan, model: nn.Module, data: list[Any], make: Any, flushes: tuple[int, ...] = ()
) -> tuple[list[float], Any]:
    """Losses and state of rank 0; all ranks must have the same."""

    def work(transport: Transport) -> Any:
        return on_rank(transport, copy.deepcopy(model), plan, data, make, flushes)

    with mock.patch("gems.torch.tracing.trace.record", Recordings()):
        first, *others = run(plan.world, work)
    for losses, state in others:
        assert losses == first[0]
        same_state(state, first[1], 0.0)
    return first


def on_rank(
    transport: Transport, model: nn.Module, plan: Plan, data: list[Any], make: Any, flushes: Any
) -> tuple[list[float], Any]:
    inputs = data[0][0]
    sample = part(inputs, 0, inputs.shape[0] // plan.total)
    trainer = Trainer(model, cross_entropy, make, sample, plan, transport=transport)
    losses = []
    for t, (inputs, targets) in enumerate(data):
        step = trainer.step(inputs, targets)
        losses += [step.loss] if step.updated else []
        if t in flushes and (rest := trainer.flush()):
            losses.append(rest.loss)
    if rest := trainer.flush():
        losses.append(rest.loss)
    return losses, trainer.state_dict()


PLANS = {
    "one stage": (Plan(micro_batches=2, schedule="2bw"), "momentum"),
    "two stages": (Plan(stages=2, micro_batches=2, schedule="2bw"), "sgd"),
    "three stages": (Plan(stages=3, micro_batches=4, schedule="2bw"), "adam"),
    "four stages": (Plan(stages=4, micro_batches=4, schedule="2bw"), "momentum"),
    "recomputing": (Plan(stages=3, micro_batches=3, schedule="2bw", recompute="always"), "adam"),
    "two copies": (Plan(stages=2, micro_batches=3, data=2, schedule="2bw"), "momentum"),
    "two copies, recomputing": (
        Plan(
            stages=2,
            micro_batches=2,
            data=2,
            schedule="2bw",
            recompute=("always", ("4", "5", "6", "7", "8")),
        ),
        "adam",
    ),
    "tiles": (Plan(stages=2, micro_batches=2, spatial=(2, 1), schedule="2bw"), "momentum"),
    "tiles and copies": (
        Plan(stages=2, micro_batches=2, spatial=(1, 2), local_dp=2, data=2, schedule="2bw"),
        "sgd",
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_weights_and_statistics_follow_the_update_equation(name: str) -> None:
    plan, maker = PLANS[name]
    data = batches((12, 2, 6, 6), 3, 5, torch.float64)
    expected = by_equation(network(), data, plan.total, MAKERS[maker])
    losses, state = trained(plan, network(), data, MAKERS[maker])
    assert losses == pytest.approx(expected[0], rel=1e-10)
    same_state(state, expected[1])


def test_a_flush_changes_nothing_but_when_things_are_done() -> None:
    plan, data = PLANS["three stages"][0], batches((12, 2, 6, 6), 3, 5, torch.float64)
    expected = by_equation(network(), data, plan.total, MAKERS["momentum"])
    for flushes in ((0,), (1, 2), (0, 1, 2, 3, 4)):
        losses, state = trained(plan, network(), data, MAKERS["momentum"], flushes)
        assert losses == pytest.approx(expected[0], rel=1e-10)
        same_state(state, expected[1])


@pytest.mark.parametrize("halo", STREAM_HALOS)
def test_a_stage_may_stream(halo: str) -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 4, 3, padding=1)]
    layers += [nn.Flatten(), nn.Linear(144, 3)]
    model, data = nn.Sequential(*layers).double(), batches((6, 2, 6, 6), 3, 4, torch.float64)
    plan = Plan(stages=2, micro_batches=3, stream=("2x2",), schedule="2bw", stream_halo=halo)
    expected = by_equation(model, data, 3, MAKERS["adam"])
    losses, state = trained(plan, model, data, MAKERS["adam"])
    assert losses == pytest.approx(expected[0], rel=1e-10)
    same_state(state, expected[1])


@pytest.mark.parametrize("halo", STREAM_HALOS)
def test_the_loss_of_a_streamed_stage_is_known_before_its_backward(halo: str) -> None:
    """It is reported once forwards are done, where with other schedules backward computes it."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 3, 1)]
    model, draw = nn.Sequential(*layers).double(), torch.Generator().manual_seed(1)
    data = [
        (torch.randn(6, 2, 6, 6, dtype=torch.float64), torch.randint(3, (6, 6, 6), generator=draw))
        for _ in range(3)
    ]
    streams = ("2x2", "2x2")
    plan = Plan(stages=2, micro_batches=3, stream=streams, schedule="2bw", stream_halo=halo)
    expected = by_equation(model, data, 3, MAKERS["momentum"])
    losses, state = trained(plan, model, data, MAKERS["momentum"])
    assert losses == pytest.approx(expected[0], rel=1e-10)
    same_state(state, expected[1])


def test_a_batch_that_the_model_does_not_take_leaves_the_one_before_alone() -> None:
    wrong = (torch.zeros(6, 2, 9, 9, dtype=torch.float64), DATA[0][1])

    def work(trainer: Trainer) -> Any:
        trainer.step(*DATA[0])
        with pytest.raises(ShapeError, match="the model does not take inputs"):
            trainer.step(*wrong)
        return trainer.state_dict()

    _, expected = by_equation(network(), DATA[:1], 3, MAKERS["momentum"])
    for state in on_ranks(THREE, work):
        same_state(state, expected)


def test_batches_may_have_other_sizes() -> None:
    data = batches((12, 2, 6, 6), 3, 5, torch.float64)
    data[1:3] = batches((4, 2, 6, 6), 3, 1, torch.float64) + batches(
        (5, 2, 6, 6), 3, 1, torch.float64
    )
    data[4] = (data[4][0][:2], data[4][1][:2])  # fewer samples than micro-batches
    plan = PLANS["three stages"][0]
    expected = by_equation(network(), data, plan.total, MAKERS["adam"])
    losses, state = trained(plan, network(), data, MAKERS["adam"])
    assert losses == pytest.approx(expected[0], rel=1e-10)
    same_state(state, expected[1])


@pytest.mark.parametrize("recompute", ("never", "always"))
def test_weights_may_be_frozen_for_a_while_between_batches(recompute: str) -> None:
    plan, data = THREE if recompute == "never" else replace(THREE, recompute="always"), DATA[:5]

    def freeze(model: nn.Module, t: int) -> None:
        for name, p in model.named_parameters():
            p.requires_grad_(t not in (0, 1) if name == "3.weight" else t != 3)

    def work(trainer: Trainer) -> Any:
        losses = []
        for t, batch in enumerate(data):
            if t == 2:
                freeze(trainer.model, t)
                with pytest.raises(GemsError, match="while a batch is in flight; call flush"):
                    trainer.step(*batch)
            if t in (2, 3, 4) and (rest := trainer.flush()):
                losses.append(rest.loss)
            freeze(trainer.model, t)
            step = trainer.step(*batch)
            losses += [step.loss] if step.updated else []
        return losses, trainer.state_dict()

    expected = by_equation(network(), data, 3, MAKERS["momentum"], freeze)
    for losses, state in on_ranks(plan, work):
        assert losses == pytest.approx(expected[0][:-1], rel=1e-10)
        same_state(state, expected[1])


def test_dropout_does_not_depend_on_the_stages() -> None:
    def dropping() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 3)
        ).double()

    data = batches((8, 4), 3, 4, torch.float64)
    one = trained(Plan(micro_batches=4, schedule="2bw"), dropping(), data, MAKERS["sgd"])
    for recompute in ("never", "always"):
        plan = Plan(stages=3, micro_batches=4, schedule="2bw", recompute=recompute)
        several = trained(plan, dropping(), data, MAKERS["sgd"])
        assert several[0] == pytest.approx(one[0], rel=1e-12)
        same_state(several[1], one[1], 1e-12)


def processed(transport: Transport, plan: Plan, data: list[Any]) -> tuple[list[float], Any]:
    return on_rank(transport, network(), plan, data, MAKERS["momentum"], (2,))


def test_ranks_that_are_processes_come_to_the_same() -> None:
    plan = Plan(stages=2, micro_batches=3, data=2, schedule="2bw", recompute=("always", "never"))
    data = batches((12, 2, 6, 6), 3, 6, torch.float64)
    expected = by_equation(network(), data, plan.total, MAKERS["momentum"])
    for losses, state in spawn(plan.world, processed, plan, data):
        assert losses == pytest.approx(expected[0], rel=1e-10)
        same_state(state, expected[1])


# --- a run and its ends ---------------------------------------------------------------------------


def on_ranks(
    plan: Plan, work: Callable[[Trainer], Any], model: nn.Module | None = None, **options: Any
) -> list[Any]:
    options = {"optimizer": MAKERS["momentum"], "loss": cross_entropy} | options
    model = model or network()  # here: threads share torch's generator

    def body(transport: Transport) -> Any:
        sample = torch.empty(2, 2, 6, 6, dtype=torch.float64)
        return work(
            Trainer(copy.deepcopy(model), sample=sample, plan=plan, transport=transport, **options)
        )

    with mock.patch("gems.torch.tracing.trace.record", Recordings()):
        return run(plan.world, body)


THREE = Plan(stages=3, micro_batches=3, schedule="2bw")
DATA = batches((6, 2, 6, 6), 3, 6, torch.float64)


@pytest.mark.parametrize("stages", (3, 2))
def test_a_run_goes_on_from_a_checkpoint_bit_for_bit(tmp_path: Path, stages: int) -> None:
    """Both versions of the weights are in it; under another number of stages, to rounding."""

    def steps(trainer: Trainer, data: list[Any]) -> list[float]:
        losses = [trainer.step(*batch).loss for batch in data]
        rest = trainer.flush()
        return [x for x in losses if not math.isnan(x)] + [rest.loss if rest else math.nan]

    def whole(trainer: Trainer) -> Any:
        steps(trainer, DATA[:3])
        trainer.save(tmp_path / "three")
        return steps(trainer, DATA[3:]), trainer.state_dict()

    def resumed(trainer: Trainer) -> Any:
        trainer.load(tmp_path / "three")
        return steps(trainer, DATA[3:]), trainer.state_dict()

    def schedule(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    expected, state = on_ranks(THREE, whole, scheduler=schedule)[0]
    plan = Plan(stages=stages, micro_batches=3, schedule="2bw")
    losses, again = on_ranks(plan, resumed, scheduler=schedule)[0]
    assert losses == pytest.approx(expected, rel=0 if stages == 3 else 1e-12)
    same_state(again, state, 0.0 if stages == 3 else 1e-12)


def test_a_synchronous_plan_takes_the_newest_weights_of_a_checkpoint(tmp_path: Path) -> None:
    def saved(trainer: Trainer) -> Any:
        for batch in DATA[:2]:
            trainer.step(*batch)
        trainer.save(tmp_path / "two")
        return trainer.state_dict()

    def loaded(trainer: Trainer) -> Any:
        trainer.load(tmp_path / "two")
        return trainer.state_dict(), trainer.step(*DATA[2]).loss

    state = on_ranks(THREE, saved)[0]
    plain, _ = on_ranks(Plan(stages=2, micro_batches=3), loaded)[0]
    same_state(plain, state, 0.0)


def test_predictions_are_of_all_batches_so_far_and_weights_can_be_set() -> None:
    def work(trainer: Trainer) -> Any:
        first = trainer.state_dict()
        for batch in DATA[:2]:
            trainer.step(*batch)
        scores, state = trainer.predict(DATA[2][0]), trainer.state_dict()
        trainer.load_state_dict(first)
        again = [trainer.step(*batch) for batch in DATA[:3]]
        assert [step.updated for step in again] == [False, True, True]
        assert math.isnan(again[0].loss)
        trainer.close()
        return scores, state, [step.loss for step in again[1:]]

    scores, state, losses = on_ranks(THREE, work, optimizer=MAKERS["sgd"])[0]
    expected, after = by_equation(network(), DATA[:2], 3, MAKERS["sgd"])
    same_state(state, after)
    model = network()
    model.load_state_dict(after)
    torch.testing.assert_close(scores, model.eval()(DATA[2][0]), rtol=1e-10, atol=1e-12)
    assert losses == pytest.approx(expected, rel=1e-10)  # it began anew


def test_a_learning_rate_schedule_steps_with_updates() -> None:
    def work(trainer: Trainer) -> list[float]:
        rates = []
        for batch in DATA[:3]:
            trainer.step(*batch)
            assert trainer.optimizer is not None
            rates.append(trainer.optimizer.param_groups[0]["lr"])
        return rates

    def halved(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    sgd = lambda p: torch.optim.SGD(p, 0.1)  # noqa: E731
    for rates in on_ranks(THREE, work, optimizer=sgd, scheduler=halved):
        assert rates == [0.1, 0.05, 0.025]


def test_a_loss_that_is_no_number_makes_no_update_and_training_can_go_on() -> None:
    bad = (torch.full_like(DATA[0][0], math.nan), DATA[0][1])

    def work(trainer: Trainer) -> Any:
        trainer.step(*DATA[0])
        trainer.step(*bad)
        with pytest.raises(LossError, match=r"the loss is nan in step 1; no update"):
            trainer.step(*DATA[1])
        state = trainer.state_dict()
        trainer.step(*DATA[2])
        return state, trainer.flush()

    model = nn.Sequential(*(m for m in network() if not isinstance(m, nn.BatchNorm2d)))
    found = on_ranks(THREE, work, model, optimizer=MAKERS["sgd"])
    _, expected = by_equation(model, DATA[:1], 3, MAKERS["sgd"])
    for state, last in found:
        same_state(state, expected)
        assert last is not None and math.isfinite(last.loss)


@pytest.mark.parametrize("step", (0, 2))
def test_ranks_with_different_batches_are_told(step: int) -> None:
    def work(trainer: Trainer) -> None:
        for t, (inputs, targets) in enumerate(DATA):
            if t == step and trainer.rank == 0:
                inputs, targets = inputs[:5], targets[:5]
            trainer.step(inputs, targets)

    with pytest.raises(ShapeError, match="ranks were given different batches"):
        on_ranks(THREE, work)


def test_a_copy_with_another_batch_is_told_before_it_makes_an_update() -> None:
    plan = Plan(stages=1, micro_batches=3, data=2, schedule="2bw")

    def work(trainer: Trainer) -> None:
        for t, (inputs, targets) in enumerate(DATA):
            if t == 2 and trainer.rank == 0:
                inputs, targets = inputs[:5], targets[:5]
            trainer.step(inputs, targets)

    with pytest.raises(ShapeError, match="ranks were given different batches"):
        on_ranks(plan, work)


@pytest.mark.parametrize("odd", range(3))
@pytest.mark.parametrize("calls", [("flush", "step"), ("step", "flush")])
@pytest.mark.parametrize("name", ["stages", "copies"])
def test_a_flush_beside_a_step_is_noticed_by_every_rank(
    odd: int, calls: tuple[str, str], name: str
) -> None:
    """One rank of three is in the first call, the others in the second. Once only the stages behind
    noticed, and the others waited for them or went on."""
    plan = {"stages": THREE, "copies": Plan(micro_batches=2, data=3, schedule="2bw")}[name]
    found = [""] * 3

    def work(trainer: Trainer) -> None:
        for batch in DATA[:3]:
            trainer.step(*batch)
        mine = calls[trainer.rank != odd]
        with pytest.raises(GemsError) as caught:
            for _ in range(3):  # copies alone may go on for a window
                trainer.flush() if mine == "flush" else trainer.step(*DATA[3])
                mine = "step"
        found[trainer.rank] = str(caught.value)
        with pytest.raises(GemsError, match="failed in the middle of a step"):
            trainer.step(*DATA[4])

    on_ranks(plan, work)
    for text in found:
        assert "ranks are in different calls" in text and f"rank {odd}: {calls[0]}" in text, found


def test_a_trainer_that_failed_says_so() -> None:
    calls = []

    def failing(output: Any, target: Any) -> Any:
        calls.append(output)
        if len(calls) == 5:
            raise RuntimeError("no loss today")
        return cross_entropy(output, target)

    def work(trainer: Trainer) -> None:
        with pytest.raises((RuntimeError, GemsError)):
            for batch in DATA:
                trainer.step(*batch)
        with pytest.raises(GemsError, match="failed in the middle of a step"):
            trainer.step(*DATA[0])
        trainer.close()

    on_ranks(THREE, work, loss=failing)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"clip": 1.0}, "clip=1.0 wants the norm of all stages"),
        ({"precision": "fp16"}, "use 'bf16'"),
        ({"accumulate": 2}, "give the plan more micro-batches"),
        ({"schedule": parse("0: 0F0 0B0\n")}, "leave out schedule"),
    ],
)
def test_what_would_be_a_flush_is_refused(options: Any, why: str) -> None:
    with pytest.raises(PlanError, match=why):
        on_ranks(Plan(schedule="2bw"), lambda trainer: None, **options)


def test_weights_of_several_stages_are_refused() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.b.weight = self.a.weight

        def forward(self, x: Any) -> Any:
            return self.b(torch.tanh(self.a(x)))

    def work(transport: Transport) -> None:
        plan = Plan(stages=(("a",), ("b",)), schedule="2bw")
        Trainer(Tied(), cross_entropy, MAKERS["sgd"], torch.empty(1, 4), plan, transport=transport)

    with pytest.raises(PlanError, match=r"a\.weight: used by several stages"):
        run(2, work)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (
            {"stages": 4, "micro_batches": 3},
            "at least as many micro-batches as stages, but there are 3",
        ),
        ({"bidirectional": True, "micro_batches": 2}, "one direction"),
        ({"data": 2, "zero": 1}, "zero=1 does not shard the second weight version"),
        ({"grad_sync": "end"}, "2bw has none"),
        ({"recompute": "except_last"}, "needs a last micro-batch"),
    ],
)
def test_plans_that_two_buffers_do_not_fit_are_refused(options: Any, why: str) -> None:
    with pytest.raises(PlanError, match=why):
        Plan(schedule="2bw", **options)


def test_several_stages_on_a_rank_are_refused() -> None:
    with pytest.raises(PlanError, match="puts one stage on each rank"):
        lowered(Plan(stages=4, ranks=2, schedule="2bw"))
    over = Plan(stages=2, spatial=(1, 2), placement=((0, 1), 1), micro_batches=2, schedule="2bw")
    with pytest.raises(PlanError, match="puts one stage on each rank"):
        lowered(over)


# --- the order ------------------------------------------------------------------------------------


def sizes() -> list[Plan]:
    found = [
        Plan(stages=p, micro_batches=m, data=d, recompute=recompute, schedule="2bw")
        for p in (1, 2, 3, 5)
        for m in (p, p + 1, 2 * p)
        for d, recompute in ((1, "never"), (2, "always"))
    ]
    skips = ((0, 1), (1, 2), (2, 3), (0, 2), (0, 3))
    found.append(Plan(stages=4, micro_batches=5, edges=skips, schedule="2bw"))
    found.append(Plan(stages=3, spatial=[(2, 2), (1, 2)], micro_batches=4, schedule="2bw"))
    return found


@pytest.mark.parametrize("plan", sizes(), ids=str)
def test_every_window_but_the_first_is_the_same(plan: Plan) -> None:
    """One of them is proven in an unrolled run, and all are, because they are alike."""
    schedule = lowered(plan)
    proofs = receipts(schedule, plan.unrolled)
    for rank, row in enumerate(schedule.ranks):
        mine = windows(row, proofs[rank], plan)
        turns = [mine.first[0], *(mine.next[t % AT_ONCE] for t in range(1, BATCHES))]
        unrolled = [a for window in (*turns, mine.drain[1]) for a in window.actions]
        m = plan.micro_batches
        pairs = list(zip(unrolled, row, strict=True))
        for named, action in pairs:
            assert (named.kind, named.stage, named.way, named.peer) == (
                action.kind, action.stage, action.way, action.peer
            )  # fmt: skip
            assert named.micro_batch % m == action.micro_batch % m
        # No name is in use twice: a stash is gone before its name comes again.
        under_way = set()
        for named, _ in pairs:
            if named.computes and named.kind is Kind.FORWARD:
                assert named.micro_batch not in under_way
                under_way.add(named.micro_batch)
            elif named.computes and named.kind is Kind.BACKWARD:
                under_way.remove(named.micro_batch)
        assert not under_way


def test_the_window_of_two_stages_as_text() -> None:
    plan = Plan(stages=2, micro_batches=2, schedule="2bw")
    schedule = lowered(plan)
    rows = [windows(row, {}, plan) for row in schedule.ranks]
    shown = [" ".join(map(str, row.next[0].actions)) for row in rows]
    assert shown == [
        "0B3<1 0F0 0F0>1 0B3 0A 0B0<1 0F1 0F1>1 0O 0B0",
        "1F0<0 1F0 1F1<0 1O 1B0 1B0>0 1F1 1B1 1B1>0 1A",
    ]
    assert [" ".join(map(str, row.drain[0].actions)) for row in rows] == ["0B1<1 0B1 0A 0O", "1O"]


def changed(schedule: Schedule, rank: int, work: Callable[[list[Action]], None]) -> Schedule:
    rows = [list(row) for row in schedule.ranks]
    work(rows[rank])
    return Schedule(tuple(map(tuple, rows)))


def test_check_finds_updates_in_the_wrong_place() -> None:
    plan = Plan(stages=2, micro_batches=2, schedule="2bw")
    schedule, update, total = (
        lowered(plan),
        Action(Kind.OPTIMIZER_STEP, 0),
        Action(Kind.ALL_REDUCE, 0),
    )
    assert check(schedule, plan) == []

    def late(row: list[Action]) -> None:
        row.remove(update)
        row.insert(len(row) - 1, update)

    found = check(changed(schedule, 0, late), plan)
    assert any(
        "adds to gradients of batch 0, which wait for their step" in fault for fault in found
    )
    assert any("needs weights after 1 optimizer steps, not 0" in fault for fault in found)

    def early(row: list[Action]) -> None:
        row.remove(total)
        row.insert(0, total)

    found = check(changed(schedule, 0, early), plan)
    assert "rank 0, step 0: 0A comes before 2 backwards of batch 0" in found
    found = check(changed(schedule, 0, lambda row: row.remove(update)), plan)
    assert "rank 0 has 4 all-reduces and 3 optimizer steps, not 4 each" in found


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 2), (4, 4), (4, 7), (8, 8)])
def test_there_is_no_bubble_with_equal_stages(p: int, m: int) -> None:
    for recompute, seconds in (("never", 3), ("always", 4)):
        plan = Plan(stages=p, micro_batches=m, recompute=recompute, schedule="2bw")
        timeline = simulate(lowered(plan), plan, unit(p))
        assert timeline.seconds == m * seconds and timeline.bubble == 0
        most = range(p, 0, -1) if recompute == "never" else [1] * p
        assert timeline.max_in_flight == tuple(most)


def test_the_slowest_stage_sets_the_pace() -> None:
    plan = Plan(stages=4, micro_batches=5, schedule="2bw")
    costs = Costs(tuple(Cost(f, f, f) for f in (1.0, 2.5, 1.0, 0.5)))
    assert simulate(lowered(plan), plan, costs).seconds == pytest.approx(5 * 7.5)


# --- bytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", (2, 4))
def test_memory_is_the_published(p: int) -> None:
    """2|W|/p + |A|/p + p|A_in| with recomputation, 2|W|/p + |A| + p|A_in| without, on the stage
    with most micro-batches under way; |A| is what all stages keep besides their inputs A_in."""
    weights, inner, inputs = 1000, 70, 5
    edges = tuple(Edge(s, s + 1, inputs, inputs) for s in range(p - 1))
    cost = Cost(activations=inputs + inner, weights=weights, gradients=weights)
    costs = Costs((cost,) * p, edges)
    for recompute, activations in (("always", inner), ("never", p * inner)):
        plan = Plan(stages=p, micro_batches=p, schedule="2bw", recompute=recompute)
        for rank, (row, meter) in enumerate(live(lowered(plan), plan, costs, state=0.0)):
            here = p - rank  # micro-batches under way
            got = inputs if rank else 0  # what the first stage reads is the data, which none sends
            waiting = here * inputs if recompute == "never" else inputs + (here - 1) * got
            most = max(memory.activations for memory in row)
            assert most == waiting + activations * (here / p if recompute == "never" else 1)
            assert {memory.weights for memory in row} == {2 * weights}
            assert meter.peak.total >= 2 * weights + most
        first = live(lowered(plan), plan, costs, state=0.0)[0][0]
        if recompute == "never":
            assert max(m.activations for m in first) == p * inner + p * inputs


BYTES = {
    "three stages": Plan(stages=3, micro_batches=4, schedule="2bw"),
    "recomputing": Plan(
        stages=3, micro_batches=3, schedule="2bw", recompute=("always", "always", "never")
    ),
    "two copies": Plan(stages=2, micro_batches=2, data=2, schedule="2bw"),
}


@pytest.mark.parametrize("name", BYTES)
def test_bytes_of_every_moment_are_predicted(name: str) -> None:
    plan = BYTES[name]
    data = batches((2 * plan.total, 2, 6, 6), 3, 4, torch.float64)

    def work(trainer: Trainer) -> Any:
        seen = []
        for batch in data:
            trainer.step(*batch)
            seen.append(trainer.timeline())
        return seen, trainer

    seen, trainer = on_ranks(plan, work)[0]
    said = live(trainer.schedule, trainer.plan, trainer.costs, state=1.0)
    proofs = receipts(trainer.schedule, trainer.plan.unrolled)
    for rank, (row, _) in enumerate(said):
        parts = windows(trainer.schedule.ranks[rank], proofs[rank], trainer.plan)
        counts = [len(parts.first[0].actions), *(len(parts.next[0].actions),) * 3]
        start = sum(counts[:3])
        expected = row[start : start + counts[3]]
        measured = [memory for _, memory in seen[3].memory[rank]]
        assert list(dict.fromkeys(measured)) == list(dict.fromkeys(expected)), f"rank {rank}"


def test_a_step_sets_nothing_but_the_state_of_its_batch() -> None:
    """Whatever is added must belong to one StepState, as two batches are in flight."""

    def work(trainer: Trainer) -> None:
        runner = trainer.session.runner
        shared = (trainer.session.adapter, runner, runner.programs, runner.loss)
        before = [dict(vars(thing)) for thing in shared]
        trainer.step(*DATA[0])
        for thing, was in zip(shared, before, strict=True):
            assert all(was[name] is value for name, value in vars(thing).items())
        assert trainer.session.async_pipeline is not None
        first = trainer.session.async_pipeline.batches.newest()
        trainer.step(*DATA[0])
        assert trainer.session.async_pipeline.batches.states == [
            first,
            trainer.session.async_pipeline.batches.newest(),
        ]

    on_ranks(Plan(schedule="2bw", micro_batches=3), work)


# --- the planner ----------------------------------------------------------------------------------

LINK = Link(1e9, 0.0)
MACHINE = Machine("even", Device("d", 1e12, 1e12, 10**9, 0.0, 1.0, 1.0), LINK, LINK)


def chain(weight: int = 1) -> tuple[Graph, Costs]:
    """Eight equal layers; each sends the next 1000 bytes."""
    layers = [nn.Linear(250, 250) for _ in range(8)]
    graph = trace(nn.Sequential(*layers), torch.empty(1, 250)).graph
    size = weight * 250 * 251 * 4
    cost = Cost(1e-3, 1e-3, 1e-3, activations=1000, weights=size, gradients=size)
    return graph, Costs((cost,) * len(graph.blocks))


def test_the_published_rule_of_a_steps_length() -> None:
    plan = Plan(stages=2, micro_batches=4, data=2, schedule="2bw")
    cost = Cost(1.0, 1.0, 1.0, gradients=1e9)
    costs = Costs((cost, cost), (Edge(0, 1, 10**8, 10**8),))
    # The second stage gets outputs, the first gradients: 0.1 s each.
    assert step_seconds(plan, costs, MACHINE) == pytest.approx(4 * 3.1)
    again = replace(plan, recompute="always")
    assert step_seconds(again, costs, MACHINE) == pytest.approx(4 * (4 / 3 * 3 + 0.1))
    heavy = Costs((replace(cost, gradients=2e10), cost), costs.messages)
    assert step_seconds(plan, heavy, MACHINE) == pytest.approx(20.0)  # 2 (N - 1) / N bytes / s


def test_the_planner_chooses_width_depth_and_keep_if_asked_for() -> None:
    graph, costs = chain()
    roomy = Request(4, 1e9, 8, schedule="2bw")
    found = search(graph, costs, MACHINE, roomy)
    assert {c.plan.schedule for c in (*found.fitting, *found.rest)} == {"2bw"}
    assert (found.best.plan.data, found.best.plan.depth) == (4, 1)  # sums travel beside the work
    # Weights in two versions, gradients, Adam's state: all of the model does not fit, a half does.
    size = costs[0].weights
    half = search(graph, costs, MACHINE, replace(roomy, memory=5 * 4.5 * size))
    assert (half.best.plan.data, half.best.plan.depth) == (2, 2)
    tight = 5 * 2 * size + 11_000
    quarter = search(graph, costs, MACHINE, replace(roomy, memory=tight)).best
    assert quarter.plan.depth == 4 and set(quarter.plan.recompute_by_stage) != {"never"}
    # A slow link: sums of four copies take longer than the forward that they run beside.
    slow = replace(MACHINE, link=Link(1e8, 0.0))
    deep = search(graph, costs, slow, roomy)
    wide = next(c for c in deep.fitting if c.plan.depth == 1)
    assert wide.seconds > step_seconds(wide.plan, Costs((together(costs.items),)), slow)
    none = search(graph, costs, MACHINE, replace(roomy, micro_batches=3))
    with pytest.raises(PlanError, match="3 micro-batches a step cannot be split evenly"):
        chosen(none)


def test_the_planner_never_chooses_older_weights_by_itself() -> None:
    graph, costs = chain()
    found = search(graph, costs, MACHINE, Request(2, 1e9, 4), prune=False)
    assert "2bw" not in {c.plan.schedule for c in (*found.fitting, *found.rest)}


def test_a_virtual_step_is_one_of_the_middle_of_a_run() -> None:
    plan = Plan(stages=2, micro_batches=2, schedule="2bw")
    schedule = lowered(plan)
    window = [windows(row, {}, plan).next[1] for row in schedule.ranks]
    costs = {"F": 1.0, "B": 2.0}
    events = tuple(
        Event(rank, str(a), 0.0, 0.0, costs[a.kind.value])
        for rank, part in enumerate(window)
        for a in part.actions
        if a.computes
    )
    found = virtual(Timeline(events), schedule, plan)
    assert found.seconds == 6.0 and found.bubble == 0


# --- the command line -----------------------------------------------------------------------------


def test_gems_train_notes_each_loss_at_its_step_and_resumes(tmp_path: Path) -> None:
    """Nine samples, three of them a step, so that epochs and checkpoints end with a flush."""
    options = ("--schedule", "2bw", "--parts", 3, "--num-epochs", 2, "--save")
    options += ("--no-enable-evaluation",)
    whole = runs.trained(tmp_path / "whole", *options)
    assert whole.of("step") == [1, 2, 3, 4, 5, 6]
    assert all(map(math.isfinite, whole.losses))
    first = runs.trained(tmp_path / "parts", *options, "--steps", 2)
    assert first.losses == whole.losses[:2]
    again = runs.trained(tmp_path / "parts", *options, "--resume")
    assert again.of("step") == [1, 2, 3, 4, 5, 6] and again.losses == whole.losses
    assert {"timeline.json", "schedule.svg", "virtual.svg", "report.html"} <= whole.files


def test_gems_plan_chooses_among_plans_of_one_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--model", "tests.tiny:net", "--image-size", "8", "--num-classes", "2"]
    assert main(["plan", *model, "--auto", "2", "--schedule", "2bw"]) == 0
    shown = capsys.readouterr().out
    assert "two versions" in shown and "pipeline" not in shown
    assert main(["plan", *model, "--auto", "2", "--schedule", "gpipe"]) == 0
    assert "1f1b" not in capsys.readouterr().out
