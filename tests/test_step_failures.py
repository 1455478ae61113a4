"""A step that fails leaves the trainer as before the step, or says that it is unusable."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gems.engine.executor import Engine
from gems.errors import GemsError, LossError
from gems.plans.plan import Plan
from gems.schedule.action import Action
from gems.torch.trainer import Trainer
from gems.transport.protocol import Transport
from gems.transport.threads import run
from tests.exact import Recordings, plainly, same_state, sgd
from tests.worlds import spawn

Tensor = torch.Tensor
ONE = Plan(stages=1, micro_batches=2, schedule="sequential")
FAMILIES = {
    "one rank": ONE,
    "pipeline": Plan(stages=3, micro_batches=3),
    "zero-bubble": Plan(stages=2, micro_batches=2, schedule="zero-bubble"),
    "gems": Plan(stages=2, schedule="gems", replications=1),
    "copies, zero 3": Plan(stages=2, micro_batches=2, data=2, zero=3),
    "tiles": Plan(stages=2, spatial=["1x2"], micro_batches=2),
    "offloaded, eager": Plan(
        stages=2, ranks=1, schedule="l2l", offload="weights:host", optimizer_step="eager"
    ),
    "recomputed": Plan(stages=2, micro_batches=3, recompute="always"),
}


class Net(nn.Module):
    """Statistics, dropout, and a count of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.2)
        self.body = nn.Conv2d(4, 4, 3, padding=1)
        self.last = nn.BatchNorm2d(4, momentum=None)
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.norm(self.stem(x)).relu())
        return self.head(self.last(self.body(x)).mean((2, 3)))


def data(steps: int = 4, samples: int = 6) -> list[Any]:
    draw = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(samples, 3, 8, 8, generator=draw, dtype=torch.float64),
            torch.randint(5, (samples,), generator=draw),
        )
        for _ in range(steps)
    ]


def network() -> nn.Module:
    torch.manual_seed(0)
    return Net().double()


def trainer_on(transport: Transport, plan: Plan, **options: Any) -> Trainer:
    sample = torch.empty(3, 3, 8, 8, dtype=torch.float64)
    options = {"loss": F.cross_entropy, "optimizer": sgd} | options
    model = copy.deepcopy(options.pop("model", None)) or network()
    return Trainer(model, sample=sample, plan=plan, transport=transport, **options)


def on_ranks(plan: Plan, work: Callable[[Trainer], Any], **options: Any) -> list[Any]:
    options = {"model": network()} | options  # here: threads share torch's generator
    with mock.patch("gems.torch.tracing.trace.record", Recordings()):
        return run(plan.world, lambda transport: work(trainer_on(transport, plan, **options)))


# --- losses that are no numbers -------------------------------------------------------------------

LATE = [name for name, plan in FAMILIES.items() if plan.optimizer_step == "end"]


@pytest.mark.parametrize("name", LATE)
@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"clip": 0.1}], ids=str)
def test_training_goes_on_after_a_loss_that_is_no_number(name: str, options: Any) -> None:
    """Story: gradients, the count of samples and running statistics of the bad batch stayed, and
    the next step destroyed the model. Now it is as if the bad batch had never been given."""
    good = data()

    def spoiled(trainer: Trainer) -> Any:
        losses = []
        for x, y in good:
            before = torch.get_rng_state()
            with pytest.raises(LossError, match="all is as before the step"):
                trainer.step(x * math.nan, y)
            assert torch.equal(before, torch.get_rng_state())
            losses.append(trainer.step(x, y).loss)
        return losses, trainer.state_dict(), trainer.steps

    def plain(trainer: Trainer) -> Any:
        losses = [trainer.step(x, y).loss for x, y in good]
        return losses, trainer.state_dict(), trainer.steps

    plan = FAMILIES[name]
    expected = on_ranks(plan, plain, **options)
    for found, wanted in zip(on_ranks(plan, spoiled, **options), expected, strict=True):
        assert found[0] == wanted[0]
        assert found[2] == wanted[2]
        for key, tensor in wanted[1].items():
            assert torch.equal(found[1][key], tensor), key


def test_a_checkpoint_after_a_bad_batch_is_the_one_before_it(tmp_path: Any) -> None:
    def work(trainer: Trainer) -> Any:
        trainer.step(*data()[0])
        before = trainer.state_dict()
        with pytest.raises(LossError):
            trainer.step(data()[1][0] * math.nan, data()[1][1])
        trainer.save(tmp_path / "after")
        trainer.step(*data()[2])
        trainer.load(tmp_path / "after")
        return before, trainer.state_dict()

    for before, after in on_ranks(FAMILIES["gems"], work):
        for key, tensor in before.items():
            assert torch.equal(after[key], tensor), key


def test_2bw_with_running_statistics_is_unusable_after_a_loss_that_is_no_number() -> None:
    """Two batches are in flight when it is known, and both have changed the statistics."""
    plan = Plan(stages=2, micro_batches=2, schedule="2bw")

    def work(trainer: Trainer) -> None:
        trainer.step(*data()[0])
        trainer.step(data()[1][0] * math.nan, data()[1][1])
        with pytest.raises(LossError, match="Running statistics"):
            trainer.step(*data()[2])
        assert_unusable(trainer)

    on_ranks(plan, work)


# --- a loss that raises ---------------------------------------------------------------------------


class Failing:
    """Cross entropy that fails when it is called for the n-th time."""

    def __init__(self, at: int) -> None:
        self.at, self.calls = at, 0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.at:
            raise RuntimeError("no loss today")
        return F.cross_entropy(output, target)


@pytest.mark.parametrize("at", [1, 2, 3])
def test_one_rank_goes_on_after_a_loss_that_raised(at: int) -> None:
    model = network()
    model.drop.p = 0.0  # type: ignore[union-attr]
    expected = plainly(model, data(), 2)

    def work(trainer: Trainer) -> Any:
        with pytest.raises(RuntimeError, match="no loss today"):
            for batch in data():
                trainer.step(*batch)
        for batch in data()[trainer.steps :]:
            trainer.step(*batch)
        return trainer.state_dict()

    (state,) = on_ranks(ONE, work, loss=Failing(at), model=model)
    same_state(state, expected.state)


# --- an error at every action ---------------------------------------------------------------------


class Fault(Exception):
    pass


@dataclass
class Injected:
    """Raises on one rank before its n-th action of the second step, or after the last one."""

    rank: int
    at: int
    count: int = 0

    def run(self, plain: Callable[[Engine, Action], None]) -> Callable[[Engine, Action], None]:
        def patched(engine: Engine, action: Action) -> None:
            if engine.transport.rank == self.rank and getattr(engine, "armed", False):
                if self.count == self.at:
                    raise Fault(f"at {action}")
                self.count += 1
            plain(engine, action)

        return patched


def assert_unusable(trainer: Trainer) -> None:
    """Nothing can be done with it any more, and it says so at once."""
    batch = data()[0]
    calls: list[Callable[[], Any]] = [
        lambda: trainer.step(*batch),
        lambda: trainer.predict(batch[0]),
        trainer.state_dict,
        lambda: trainer.load_state_dict({}),
        lambda: trainer.save("nowhere"),
        lambda: trainer.load("nowhere"),
        lambda: trainer.export("nowhere.pt"),
        trainer.timeline,
        trainer.forecast,
    ]
    for call in calls:
        with pytest.raises(GemsError, match=r"make a new one,? and load the last checkpoint"):
            call()


def broken_at(plan: Plan, rank: int, at: int) -> int:
    """Break one action of a rank; gives how many actions came before."""
    fault = Injected(rank, at)
    model = network()
    model.drop.p = 0.0  # type: ignore[union-attr]

    def work(trainer: Trainer) -> None:
        trainer.step(*data()[0])
        before = trainer.state_dict() if trainer.transport.world == 1 else {}
        engine = (
            trainer.session.async_pipeline.engine.engine
            if trainer.session.async_pipeline
            else trainer.session.engine
        )
        engine.armed = True  # type: ignore[attr-defined]
        try:
            trainer.step(*data()[1])
            trainer.flush()
        except BaseException as error:
            cause = repr(error)
            assert isinstance(error, Fault) or "Fault" in cause or "at " in cause, cause
        else:
            return
        if (
            trainer.session.failed is None and trainer.session.async_pipeline is None
        ):  # as before the step
            engine.armed = False  # type: ignore[attr-defined]
            same_state(trainer.state_dict(), before, 0.0)
            assert all(p.grad is None for p in trainer.parameters())
            for batch in data()[1:]:
                trainer.step(*batch)
            same_state(trainer.state_dict(), plainly(model, data(), plan.total).state)
        else:
            assert_unusable(trainer)

    with mock.patch.object(Engine, "_run", fault.run(Engine._run)):
        on_ranks(plan, work, model=model)
    return fault.count


FAMILIES_AND_2BW = FAMILIES | {"2bw": Plan(stages=2, micro_batches=2, schedule="2bw")}


@pytest.mark.parametrize("name", FAMILIES_AND_2BW)
def test_an_error_at_any_action_of_any_rank_ends_the_step_on_all(name: str) -> None:
    plan = FAMILIES_AND_2BW[name]
    for rank in range(plan.world):
        at = 0
        while broken_at(plan, rank, at) == at:  # until there is no such action
            at += 1
        assert at > 3, "hardly anything was broken"


def break_one(transport: Transport, plan: Plan, rank: int, at: int) -> str:
    fault = Injected(rank, at)
    with mock.patch.object(Engine, "_run", fault.run(Engine._run)):
        trainer = trainer_on(transport, plan)
        trainer.step(*data()[0])
        trainer.session.engine.armed = True  # type: ignore[attr-defined]
        try:
            trainer.step(*data()[1])
        except BaseException as error:
            assert_unusable(trainer)
            return repr(error)
    return ""


@pytest.mark.parametrize("name", ["pipeline", "copies, zero 3"])
def test_processes_end_the_step_when_one_breaks(name: str) -> None:
    plan = FAMILIES[name]
    for at in (1, 9):
        said = spawn(plan.world, break_one, plan, 1, at)
        assert "Fault" in said[1]
        assert all(said), said


# --- the optimizer step ---------------------------------------------------------------------------


class Fragile(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        if self.state:
            raise RuntimeError("half-way")
        return super().step(closure)


def test_an_optimizer_that_fails_leaves_an_unusable_trainer() -> None:
    def work(trainer: Trainer) -> None:
        trainer.step(*data()[0])
        with pytest.raises(RuntimeError, match="half-way"):
            trainer.step(*data()[1])
        assert_unusable(trainer)

    on_ranks(ONE, work, optimizer=lambda p: Fragile(p, 0.1, momentum=0.9))
    on_ranks(FAMILIES["pipeline"], work, optimizer=lambda p: Fragile(p, 0.1, momentum=0.9))
