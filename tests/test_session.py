"""A loop and optimizers of the caller's over a session: the numbers of the same loop on one device,
and what is called out of turn raises."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import ExponentialLR

import gems
from gems.errors import GemsError, PeerError, PlanError
from gems.plans.plan import Plan
from gems.torch.session import Session
from gems.transport.protocol import Transport
from gems.transport.threads import run
from tests.exact import batches, call, close, drawing, micro_batches, same_state
from tests.worlds import spawn

ACCUMULATED = 3  # the batches that each optimizer step is made of


class Network(nn.Module):
    """Convolutions, running statistics, and weights that its first and last stages share."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.body = nn.Sequential(
            nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(),
            nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(),
        )  # fmt: skip
        self.last = nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.last(self.body(self.stem(x))).mean((2, 3)))


class Tied(Network):
    def __init__(self) -> None:
        super().__init__()
        self.last.weight = self.body[0].weight


def network(kind: type[nn.Module] = Network) -> nn.Module:
    with drawing(0):
        return kind().double()


def data(steps: int = 2 * ACCUMULATED) -> list[Any]:
    """Batches of different sizes, the last one uneven over micro-batches."""
    whole = batches((8, 3, 8, 8), 5, steps, torch.float64)
    return [(x[: 8 - i % 3], y[: 8 - i % 3]) for i, (x, y) in enumerate(whole)]


def two(parameters: Any) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """Biases and scales by Adam, the rest by SGD with momentum."""
    parameters = list(parameters)
    adam = torch.optim.Adam([p for p in parameters if p.dim() < 2], lr=0.01)
    sgd = torch.optim.SGD([p for p in parameters if p.dim() > 1], 0.05, momentum=0.9)
    return sgd, adam


def plainly(model: nn.Module, given: list[Any], count: int, clip: float | None = None) -> Any:
    """The caller's loop on one device: losses, gradients before each step, the state after."""
    model = copy.deepcopy(model).train()
    optimizers = two(model.parameters())
    decay = ExponentialLR(optimizers[0], 0.5)
    losses, gradients = [], []
    for start in range(0, len(given), ACCUMULATED):
        window = given[start : start + ACCUMULATED]
        samples = sum(len(y) for _, y in window)
        for inputs, targets in window:
            total = 0.0
            for x, y, share in micro_batches(inputs, targets, count):
                loss = cross_entropy(call(model, x), y)
                (loss * share * len(targets) / samples).backward()
                total += loss.item() * share
            losses.append(total)
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        decay.step()
    return losses, gradients, model.state_dict()


def drive(session: Session, given: list[Any]) -> tuple[list[float], list[Any]]:
    """The same loop over a session."""
    losses, gradients = [], []
    for i, (inputs, targets) in enumerate(given):
        last = (i + 1) % ACCUMULATED == 0
        losses.append(session.forward_backward(inputs, targets, update=last).loss)
        if last:
            held, factor = session.weights.named_parameters(), session.gradient_factor
            gradients.append({n: p.grad * factor for n, p in held.items() if p.grad is not None})
            assert session.optimizer_step()
    return losses, gradients


def opened(transport: Transport, model: nn.Module, plan: Plan, **options: Any) -> Session:
    sample = torch.empty(-(-8 // plan.total), 3, 8, 8, dtype=torch.float64)
    return Session(model, cross_entropy, sample, plan, transport=transport, **options)


def add_two(session: Session) -> None:
    """Two optimizers that were made of the whole model, as a framework's hooks would."""
    sgd, adam = two(session.model.parameters())
    session.add_optimizer(sgd, scheduler=lambda optimizer: ExponentialLR(optimizer, 0.5))
    session.add_optimizer(adam)


def rank(transport: Transport, kind: type[nn.Module], plan: Plan, clip: float | None) -> Any:
    with opened(transport, network(kind), plan, clip=clip) as session:
        add_two(session)
        losses, gradients = drive(session, data())
        return losses, gradients, session.state_dict()


PLANS = {
    "one rank": Plan(stages=1, micro_batches=2),
    "1f1b": Plan(stages=3, micro_batches=3),
    "zero-bubble": Plan(stages=2, micro_batches=2, schedule="zero-bubble"),
    "gems": Plan(stages=2, replications=1, schedule="gems"),
    "copies": Plan(stages=2, micro_batches=2, data=2),
    "tiles": Plan(stages=2, micro_batches=2, spatial=[(1, 2), 1]),
    "zero 1": Plan(stages=1, micro_batches=2, data=2, zero=1),
    "zero 2": Plan(stages=2, micro_batches=2, data=2, zero=2),
    "zero 3": Plan(stages=1, micro_batches=2, data=2, zero=3),
}


def compare(found: list[Any], expected: Any, *, sharded: bool) -> None:
    losses, gradients, state = expected
    for mine, theirs, held in found:
        torch.testing.assert_close(mine, losses, rtol=1e-10, atol=1e-10)
        same_state(held, state)
        for window, plain in zip(theirs, gradients, strict=True):
            assert sharded or window, "a rank that has no gradients"
            for name, gradient in window.items():
                close(name, gradient, plain[name])


@pytest.mark.parametrize("name", PLANS)
def test_a_loop_with_two_optimizers_gives_the_plain_loops_numbers(name: str):
    plan, kind = PLANS[name], Network if name == "copies" else Tied
    found = run(plan.world, lambda transport: rank(transport, kind, plan, None))
    compare(found, plainly(network(kind), data(), plan.total), sharded=plan.zero > 0)


@pytest.mark.parametrize("name", ["1f1b", "gems", "zero 2"])
def test_the_clip_sees_the_gradients_of_both_optimizers(name: str):
    plan = PLANS[name]
    found = run(plan.world, lambda transport: rank(transport, Network, plan, 0.05))
    compare(found, plainly(network(), data(), plan.total, 0.05), sharded=plan.zero > 0)


@pytest.mark.parametrize("name", ["1f1b", "gems", "tiles", "zero 1"])
def test_over_processes(name: str):
    plan = PLANS[name]
    found = spawn(plan.world, rank, Tied, plan, None)
    compare(found, plainly(network(Tied), data(), plan.total), sharded=plan.zero > 0)


def test_eager_and_offloaded_steps_take_one_optimizer_with_groups():
    def groups(parameters: Any) -> torch.optim.Optimizer:
        biases = [p for p in parameters if p.dim() < 2]
        rest = [p for p in parameters if p.dim() > 1]
        return torch.optim.SGD(
            [{"params": rest}, {"params": biases, "lr": 0.01}], 0.05, momentum=0.9
        )

    model = network().train()
    plain = groups(list(model.parameters()))
    for inputs, targets in data():
        for x, y, share in micro_batches(inputs, targets, 2):
            (cross_entropy(model(x), y) * share).backward()
        plain.step()
        plain.zero_grad()
    for more in ({"optimizer_step": "eager"}, {"offload": "optimizer"}, {"offload": "weights"}):
        plan = Plan(stages=2, micro_batches=2, **more)

        def work(transport: Transport, plan: Plan = plan) -> Any:
            session = opened(transport, network(), plan)
            session.add_optimizer(groups)
            for inputs, targets in data():
                session.forward_backward(inputs, targets)
                session.optimizer_step()
            return session.state_dict()

        for state in run(2, work):
            same_state(state, model.state_dict())


# --- state ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after"), [("copies", "zero 2"), ("zero 1", "copies"), ("gems", "zero-bubble")]
)
def test_two_optimizers_and_a_schedule_go_on_from_a_checkpoint(
    before: str, after: str, tmp_path: Path
):
    """Saved in the middle of an accumulation, under one plan, and loaded under another."""
    given, path = data(4 * ACCUMULATED), tmp_path / "step-1"
    middle = 2 * ACCUMULATED + 1

    def work(transport: Transport, plan: Plan, saves: bool) -> Any:
        session = opened(transport, network(), plan)
        add_two(session)
        if saves:
            drive(session, given[:middle])
            session.save(path, extra={"at": middle})
            return None
        extra = session.load(path)
        assert extra == {"at": middle}
        for i, (inputs, targets) in enumerate(given[middle:], middle):
            last = (i + 1) % ACCUMULATED == 0
            session.forward_backward(inputs, targets, update=last)
            if last:
                session.optimizer_step()
        return session.state_dict()

    plans = PLANS[before], PLANS[after]
    assert plans[0].total == plans[1].total, "running statistics see the same micro-batches"
    run(plans[0].world, lambda transport: work(transport, plans[0], True))
    expected = plainly(network(), given, plans[0].total)[2]
    for state in run(plans[1].world, lambda transport: work(transport, plans[1], False)):
        same_state(state, expected)


def test_a_checkpoint_of_other_optimizers_is_rejected(tmp_path: Path):
    def work(transport: Transport) -> None:
        one = opened(transport, network(), PLANS["one rank"])
        one.add_optimizer(torch.optim.SGD(one.parameters(), 0.1))
        one.save(tmp_path / "one")
        other = opened(transport, network(), PLANS["one rank"])
        add_two(other)
        before = other.state_dict()
        with pytest.raises(GemsError, match="1 optimizers in the checkpoint, 2 here"):
            other.load(tmp_path / "one")
        same_state(other.state_dict(), before, 0.0)

    run(1, work)


# --- out of turn ---------------------------------------------------------------------------------


def alone(body: Callable[[Session], None], plan: Plan | None = None, **options: Any) -> None:
    """With a session on each of its ranks."""
    plan = plan or PLANS["one rank"]

    def work(transport: Transport) -> None:
        with opened(transport, network(), plan, **options) as session:
            body(session)

    run(plan.world, work)


def test_complete_gradients_are_stepped_with_or_forgotten():
    def body(session: Session) -> None:
        optimizer = session.add_optimizer(torch.optim.SGD(session.parameters(), 0.1))
        with pytest.raises(GemsError, match="no gradients to step with"):
            session.optimizer_step()
        before = session.state_dict()
        session.forward_backward(*data()[0])
        with pytest.raises(GemsError, match="optimizer_step"):
            session.forward_backward(*data()[1])
        for method in (session.save, session.load):
            with pytest.raises(GemsError, match="gradients wait"):
                method("nowhere")
        with pytest.raises(GemsError, match="call optimizer_step"):
            optimizer.step()
        session.zero_grad()
        with pytest.raises(GemsError, match="no gradients to step with"):
            session.optimizer_step(optimizer)
        changed = {n for n, x in session.state_dict().items() if not torch.equal(x, before[n])}
        assert changed == {n for n in before if "running" in n or "tracked" in n}

    alone(body)


def test_one_of_two_optimizers_may_step_alone():
    def body(session: Session) -> None:
        add_two(session)
        sgd, adam = (own.optimizer for own in session.optimizers)
        before = session.state_dict()
        session.forward_backward(*data()[0])
        session.optimizer_step(adam)
        after = session.state_dict()
        for name in dict(session.model.named_parameters()):
            same = torch.equal(before[name], after[name])
            assert same == (before[name].dim() > 1), name
        with pytest.raises(GemsError, match="no gradients to step with"):
            session.optimizer_step(adam)
        session.optimizer_step(sgd)
        session.forward_backward(*data()[1])

    alone(body)


def test_optimizers_that_step_one_by_one_follow_one_loss_scale():
    """The first one's step may change the scale; gradients were scaled by the one before."""

    def body(session: Session, apart: bool) -> None:
        add_two(session)
        assert session.scale is not None
        session.scale.patience = 1  # it doubles with every step
        for batch in data():
            session.forward_backward(*batch)
            if apart:
                for own in list(session.optimizers):
                    assert session.optimizer_step(own.optimizer)
            else:
                assert session.optimizer_step()
        assert session.scale.value == 2.0 ** (16 + len(data()))
        states.append(session.state_dict())

    states: list[Any] = []
    for apart in (False, True):
        alone(partial(body, apart=apart), precision="fp16")
    same_state(states[1], states[0], 0.0)


def test_an_optimizer_of_named_parameters_is_taken():
    def body(session: Session) -> None:
        session.add_optimizer(torch.optim.SGD(session.model.named_parameters(), 0.1))
        before = session.state_dict()
        session.forward_backward(*data()[0])
        session.optimizer_step()
        after = session.state_dict()
        assert not any(torch.equal(before[n], after[n]) for n in before if before[n].dim() > 1)

    alone(body, PLANS["zero 1"])


def test_what_a_session_cannot_do_raises():
    def shared(session: Session) -> None:
        session.add_optimizer(torch.optim.SGD(session.parameters(), 0.1))
        with pytest.raises(PlanError, match="is in two optimizers"):
            session.add_optimizer(torch.optim.Adam(session.parameters()))
        assert len(session.optimizers) == 1

    def foreign(session: Session) -> None:
        with pytest.raises(PlanError, match="is not the session's"):
            session.add_optimizer(torch.optim.SGD([nn.Parameter(torch.zeros(3))], 0.1))

    def staged(session: Session) -> None:
        session.add_optimizer(lambda ps: torch.optim.SGD(ps, 0.1))
        with pytest.raises(PlanError, match="one with several parameter groups"):
            session.add_optimizer(lambda ps: torch.optim.SGD(ps, 0.1))

    def early(session: Session) -> None:
        with pytest.raises(GemsError, match="add_optimizer"):
            session.forward_backward(*data()[0])

    def windows(session: Session) -> None:
        session.add_optimizer(lambda ps: torch.optim.SGD(ps, 0.1))
        with pytest.raises(PlanError, match=r"use gems\.Trainer"):
            session.forward_backward(*data()[0])

    alone(shared)
    alone(foreign)
    alone(staged, Plan(stages=1, micro_batches=2, offload="optimizer"))
    alone(early, Plan(stages=1, micro_batches=2, optimizer_step="eager"))
    alone(windows, Plan(stages=2, micro_batches=2, schedule="2bw"))


def test_ranks_that_disagree_on_an_update_are_named():
    def work(transport: Transport) -> None:
        session = opened(transport, network(), PLANS["copies"])
        session.add_optimizer(torch.optim.SGD(session.parameters(), 0.1))
        session.forward_backward(*data()[0], update=transport.rank != 1)

    with pytest.raises((GemsError, PeerError), match=r"update"):
        run(PLANS["copies"].world, work)


def test_settings_of_the_loop_are_compared():
    def work(transport: Transport) -> None:
        settings = {"warm-up steps": 10 + transport.rank}
        session = opened(transport, network(), PLANS["copies"], settings=settings)
        session.add_optimizer(torch.optim.SGD(session.parameters(), 0.1))

    with pytest.raises(GemsError, match="warm-up steps"):
        run(PLANS["copies"].world, work)


def test_it_is_a_public_name_and_closes():
    assert gems.Session is Session

    def work(transport: Transport) -> None:
        session = opened(transport, network(), PLANS["one rank"])
        session.close()
        with pytest.raises(GemsError, match="this session was closed"):
            session.forward_backward(*data()[0])

    run(1, work)
