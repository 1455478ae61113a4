"""A loss with trainable parameters of its own, and penalties on weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from gems.errors import CheckpointError, GemsError, PlanError, ShapeError
from gems.plans.plan import Plan
from gems.torch.trainer import Trainer
from gems.transport.protocol import Transport
from gems.transport.threads import run
from tests.exact import call, micro_batches, same_state
from tests.worlds import spawn

Tensor = torch.Tensor


class Net(nn.Module):
    """Pixels in, classes of pixels out; a layer is used twice, and one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.shared = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 3, 1)
        self.b, self.fixed = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 1)
        self.head = nn.Conv2d(3, 3, 1)
        self.fixed.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(self.a(x).tanh())
        x = self.b(self.fixed(x)).tanh()
        return self.head(self.shared(x))


class Tempered(nn.Module):
    """A trained temperature per class, one that gets no gradient, and one that does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(3, 1, 1) + 0.5)
        self.inner = nn.ModuleDict({"bias": nn.Conv2d(3, 3, 1)})
        self.unused = nn.Parameter(torch.ones(2))
        self.fixed = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(self.inner["bias"](output * self.scale) * self.fixed, target)


def made() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return Net().double(), Tempered().double()


MADE = made()  # ranks that are threads share torch's generator


def parts() -> tuple[nn.Module, nn.Module]:
    return copy.deepcopy(MADE)


def data(steps: int = 3, samples: tuple[int, ...] = (4, 4, 3)) -> list[Any]:
    draw = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(n, 2, 6, 6, generator=draw, dtype=torch.float64),
            torch.randint(3, (n, 6, 6), generator=draw),
        )
        for n in samples[:steps]
    ]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.3, momentum=0.9, weight_decay=0.01)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, 0.05)


def plainly(
    plan: Plan, make: Any = sgd, clip: float | None = None, penalty: Any = None, steps: int = 3
) -> Any:
    """Losses, the model's state and the loss's, of one process."""
    model, loss = parts()
    trained = [*model.parameters(), *loss.parameters()]
    optimizer, losses = make(trained), []
    for inputs, targets in data(steps):
        total = 0.0
        for x, y, share in micro_batches(inputs, targets, plan.total):
            value = loss(call(model, x), y)
            if penalty is not None:
                value = value + penalty(list(model.named_parameters()))
            (value * share).backward()
            total += float(value.detach()) * share
        if clip is not None:
            nn.utils.clip_grad_norm_(trained, clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, model.state_dict(), _trained(loss)


def _trained(loss: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in loss.named_parameters() if p.requires_grad}


def rank(transport: Transport, plan: Plan, make: Any = sgd, **options: Any) -> Any:
    model, loss = parts()
    trainer = Trainer(
        model, loss, make, torch.empty(2, 2, 6, 6).double(), plan, transport=transport, **options
    )
    losses = [trainer.step(x, y).loss for x, y in data()]
    return losses, trainer.state_dict(), trainer.loss_state_dict()


def check(found: list[Any], expected: Any) -> None:
    for losses, state, of_loss in found:
        assert losses == pytest.approx(expected[0], rel=1e-10)
        same_state(state, expected[1])
        same_state(of_loss, expected[2])


L2L = {"stages": 2, "ranks": 1, "micro_batches": 2, "schedule": "l2l"}
PLANS: dict[str, Plan] = {
    "one rank": Plan(stages=1, micro_batches=2, schedule="sequential"),
    "1f1b": Plan(stages=2, micro_batches=2),
    "eager": Plan(stages=2, micro_batches=2, optimizer_step="eager"),
    "copies": Plan(stages=2, micro_batches=2, data=2),
    "both ways": Plan(stages=2, replications=1, schedule="gems"),
    "both ways, split": Plan(stages=2, replications=1, schedule="gems-zb"),
    "recomputed": Plan(stages=2, micro_batches=2, recompute="always"),
    "tiles": Plan(stages=2, micro_batches=2, spatial=[(2, 1), (2, 1)]),
    "tiles, copies": Plan(stages=1, micro_batches=1, spatial=(1, 2), data=2),
    "slices": Plan(stages=2, micro_batches=1, spatial=(2, 1), local_dp=2),
    "streamed": Plan(stages=2, ranks=1, micro_batches=2, stream=(2, 1), schedule="sequential"),
    "zero=1": Plan(stages=2, micro_batches=2, data=2, zero=1),
    "zero=2": Plan(stages=2, micro_batches=2, data=2, zero=2),
    "zero=3": Plan(stages=2, micro_batches=2, data=2, zero=3),
    "zero=3, eager": Plan(**L2L, data=2, zero=3, optimizer_step="eager"),
    "offload": Plan(**L2L, offload="weights:disk"),  # type: ignore[arg-type]
    "offload, eager": Plan(**L2L, offload="weights", optimizer_step="eager"),  # type: ignore[arg-type]
    "optimizer": Plan(stages=2, micro_batches=2, offload="optimizer"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", PLANS)
def test_parameters_of_the_loss_train_as_in_one_process(name: str) -> None:
    plan = PLANS[name]
    make = adam if len(name) % 2 else sgd
    check(run(plan.world, lambda to: rank(to, plan, make)), plainly(plan, make))


def test_they_count_in_the_norm_that_is_clipped() -> None:
    for name in ("copies", "zero=3", "offload"):
        plan = PLANS[name]
        found = run(plan.world, lambda to, plan=plan: rank(to, plan, clip=0.05))
        check(found, plainly(plan, clip=0.05))


def test_with_two_versions_of_weights_there_are_two_of_them() -> None:
    """2BW on two ranks is 2BW on one, whose numbers are those of weights one update old."""

    def trained(plan: Plan) -> Any:
        def work(transport: Transport) -> Any:
            model, loss = parts()
            untied = copy.deepcopy(model)
            untied.shared = nn.Identity()
            sample = torch.empty(2, 2, 6, 6).double()
            trainer = Trainer(untied, loss, sgd, sample, plan, transport=transport)
            losses = [trainer.step(x, y).loss for x, y in data()][1:]
            return losses, trainer.state_dict(), trainer.loss_state_dict()

        return run(plan.world, work)

    expected = trained(Plan(stages=1, micro_batches=2, schedule="2bw"))[0]
    check(trained(Plan(stages=2, micro_batches=2, schedule="2bw")), expected)


@pytest.mark.parametrize("name", ["copies", "tiles"])
def test_over_gloo(name: str) -> None:
    check(spawn(PLANS[name].world, rank, PLANS[name]), plainly(PLANS[name]))


# --- saving ---------------------------------------------------------------------------------------


def saved(transport: Transport, plan: Plan, folder: Path, load: bool) -> Any:
    model, loss = parts()
    if load:
        for p in (*model.parameters(), *loss.parameters()):
            p.data.zero_() if p.requires_grad else None
    sample = torch.empty(2, 2, 6, 6).double()
    trainer = Trainer(model, loss, adam, sample, plan, transport=transport)
    batches = data()
    if load:
        trainer.load(folder / "saved")
        batches = batches[2:]
    losses = [trainer.step(x, y).loss for x, y in (batches if load else batches[:2])]
    if not load:
        trainer.save(folder / "saved")
    return losses, trainer.state_dict(), trainer.loss_state_dict()


def test_a_checkpoint_has_them_whatever_the_plan(tmp_path: Path) -> None:
    run(PLANS["zero=3"].world, lambda to: saved(to, PLANS["zero=3"], tmp_path, load=False))
    losses, *states = plainly(PLANS["zero=3"], adam)
    for name in ("zero=3", "both ways, 2", "offload, 4"):
        plan = {
            "both ways, 2": Plan(stages=2, replications=2, schedule="gems"),
            "offload, 4": Plan(**{**L2L, "micro_batches": 4}, offload="weights:disk"),
        }.get(name, PLANS["zero=3"])
        found = run(plan.world, lambda to, plan=plan: saved(to, plan, tmp_path, load=True))
        check(found, (losses[2:], *states))


def test_a_checkpoint_without_them_is_rejected(tmp_path: Path) -> None:
    def save(transport: Transport) -> None:
        sample = torch.empty(2, 2, 6, 6).double()
        trainer = Trainer(
            parts()[0], cross_entropy, adam, sample, PLANS["1f1b"], transport=transport
        )
        trainer.step(*data()[0])
        trainer.save(tmp_path / "saved")

    run(2, save)
    with pytest.raises(CheckpointError, match="missing: loss:scale"):
        run(2, lambda to: saved(to, PLANS["1f1b"], tmp_path, load=True))


# --- penalties ------------------------------------------------------------------------------------


def lasso(named: Any) -> Tensor:
    return 0.01 * sum(p.abs().sum() for name, p in named if not name.endswith("bias"))


@pytest.mark.parametrize("name", [n for n in PLANS if n not in ("optimizer", "zero=2")])
def test_a_regularizer_is_a_penalty_in_the_plain_loss(name: str) -> None:
    plan = PLANS[name]
    found = run(plan.world, lambda to: rank(to, plan, regularizer=lasso))
    check(found, plainly(plan, penalty=lasso))


def test_a_regularizer_gives_one_number() -> None:
    plan = PLANS["1f1b"]
    with pytest.raises(ShapeError, match=r"one number as a tensor.*got \(2,\)"):
        run(2, lambda to: rank(to, plan, regularizer=lambda named: torch.ones(2)))
    with pytest.raises(PlanError, match="regularizer is added to a loss"):
        plan = Plan(stages=2, micro_batches=2, schedule="2bw")
        run(2, lambda to: rank(to, plan, regularizer=lasso))


# --- what a loss cannot have ----------------------------------------------------------------------


def stepped(transport: Transport, plan: Plan, loss: Any, model: nn.Module | None = None) -> None:
    sample = torch.empty(2, 2, 6, 6).double()
    trainer = Trainer(model or parts()[0], loss, sgd, sample, plan, transport=transport)
    trainer.step(*data()[0])


def penalised(model: nn.Module, captured: bool) -> Any:
    known = list(model.parameters())

    def loss(output: Tensor, target: Tensor) -> Tensor:
        weights = known if captured else model.parameters()
        return cross_entropy(output, target) + 1e-3 * sum(p.norm() for p in weights)

    return loss


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("name", ["1f1b", "both ways", "tiles", "zero=3"])
def test_a_penalty_on_weights_that_are_elsewhere_is_rejected(name: str, captured: bool) -> None:
    def work(transport: Transport) -> None:
        model = parts()[0]
        stepped(transport, PLANS[name], penalised(model, captured), model)

    with pytest.raises(GemsError, match=r"(?s)weight_decay.*regularizer="):
        run(PLANS[name].world, work)


def test_the_error_names_the_parameters() -> None:
    def each(captured: bool) -> Any:
        def one(transport: Transport) -> None:
            model = parts()[0]
            stepped(transport, PLANS["1f1b"], penalised(model, captured), model)

        return one

    with pytest.raises(GemsError, match=r"does not have a\.weight"):
        run(2, each(False))
    with pytest.raises(GemsError, match=r"a\.weight of the model"):
        run(2, each(True))


def test_a_penalty_on_one_rank_that_has_all_is_exact() -> None:
    def work(transport: Transport) -> Any:
        model, loss = parts()
        sample = torch.empty(2, 2, 6, 6).double()
        both = lambda x, y: loss(x, y) + lasso(list(model.named_parameters()))  # noqa: E731
        with pytest.raises(GemsError, match=r"a trainable tensor of shape \(3, 1, 1\)"):
            Trainer(model, both, sgd, sample, PLANS["one rank"], transport=transport).step(
                *data()[0]
            )
        model, loss = parts()

        class Both(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.loss = loss

            def forward(self, output: Tensor, target: Tensor) -> Tensor:
                return self.loss(output, target) + lasso(list(model.named_parameters()))

        trainer = Trainer(model, Both(), sgd, sample, PLANS["one rank"], transport=transport)
        losses = [trainer.step(x, y).loss for x, y in data()]
        of_loss = {n.removeprefix("loss."): p for n, p in trainer.loss_state_dict().items()}
        return losses, trainer.state_dict(), of_loss

    check(run(1, work), plainly(PLANS["one rank"], penalty=lasso))


def test_what_belongs_to_nobody_is_rejected() -> None:
    """Nobody would sum or save it."""
    free = nn.Parameter(torch.ones(3, 1, 1).double())
    with pytest.raises(GemsError, match=r"shape \(3, 1, 1\)"):
        run(2, lambda to: stepped(to, PLANS["1f1b"], lambda x, y: cross_entropy(x * free, y)))


def test_a_loss_that_changes_its_buffers_is_rejected() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            self.seen += 1
            return cross_entropy(output, target)

    with pytest.raises(GemsError, match="changes its buffers seen"):
        run(2, lambda to: stepped(to, PLANS["1f1b"], Counting()))
