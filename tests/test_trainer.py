"""The Trainer: predict, state, optimizers, clipping, accumulation, precision, hooks."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gems import models
from gems.errors import GemsError, LossError, PlanError, ShapeError
from gems.plans.plan import Plan
from gems.torch.trainer import Trainer
from gems.transport.threads import run
from tests.exact import (
    Recordings,
    assert_equal,
    batches,
    close,
    micro_batches,
    plainly,
    planned,
    same_state,
    sgd,
)

Tensor = torch.Tensor
PLANS = {
    "one rank": Plan(stages=1, micro_batches=4, schedule="sequential"),
    "1f1b": Plan(stages=3, micro_batches=4),
    "gems": Plan(stages=3, replications=2, schedule="gems"),
    "fold × data 2": Plan(stages=4, micro_batches=2, schedule="auto", placement="fold", data=2),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return models.build("resnet_v1", depth=8, width=4, num_classes=5).double()


def data(steps: int = 2, samples: int = 8) -> list[Any]:
    return batches((samples, 3, 8, 8), 5, steps, torch.float64)


def on_ranks(plan: Plan, work: Any, model: Any = None, **options: Any) -> list[Any]:
    """`work(trainer)` on every rank of a plan."""
    model = model or network()
    options = {"loss": F.cross_entropy, "optimizer": sgd} | options

    def body(transport: Any) -> Any:
        sample = torch.empty(2, 3, 8, 8, dtype=next(model.parameters()).dtype)
        mine = copy.deepcopy(model)
        return work(Trainer(mine, sample=sample, plan=plan, transport=transport, **options))

    with mock.patch("gems.torch.tracing.trace.record", Recordings()):
        return run(plan.world, body)


# --- predict ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("samples", [3, 9])
def test_predict_is_the_plain_model_in_evaluation_mode(name: str, samples: int) -> None:
    model = network()
    x = data(1, samples)[0][0]
    with torch.no_grad():  # statistics that are not those of the start
        model(torch.randn(8, 3, 8, 8, dtype=torch.float64))
    expected = copy.deepcopy(model).eval()(x).detach()

    def work(trainer: Trainer) -> Tensor:
        found = trainer.predict(x)
        assert trainer.model.training, "predict leaves the mode as it was"
        assert not found.requires_grad
        return found

    for found in on_ranks(PLANS[name], work, model):
        close(name, found, expected)


def test_predict_between_steps_changes_nothing() -> None:
    expected = planned(network(), data(), PLANS["gems"])

    def work(trainer: Trainer) -> Any:
        for images, labels in data():
            trainer.step(images, labels)
            trainer.predict(images)
        return trainer.state_dict()

    for state in on_ranks(PLANS["gems"], work):
        same_state(state, expected.state, 0.0)


def test_predict_gives_whatever_the_model_gives() -> None:
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)
            self.scale = nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> Any:
            y = self.a(x)
            return {"most": y.argmax(1), "two": (self.b(y) * self.scale, [y]), "name": "many"}

    model, x = Many(), torch.randn(5, 3)
    expected = model(x)
    plan = Plan(stages=2, micro_batches=2)

    def work(transport: Any) -> Any:
        return Trainer(copy.deepcopy(model), sample=x[:2], plan=plan, transport=transport).predict(
            x
        )

    for found in run(2, work):
        assert found["name"] == "many"
        assert torch.equal(found["most"], expected["most"])
        torch.testing.assert_close(found["two"][0], expected["two"][0].detach())
        torch.testing.assert_close(found["two"][1][0], expected["two"][1][0].detach())


def test_a_trainer_without_a_loss_can_only_predict() -> None:
    trainer = Trainer(network(), sample=data()[0][0][:2], plan=PLANS["one rank"])
    assert trainer.predict(data()[0][0]).shape == (8, 5)
    with pytest.raises(GemsError, match="can only predict"):
        trainer.step(*data()[0])
    with pytest.raises(GemsError, match="nothing has run yet"):
        Trainer(network(), sample=data()[0][0][:2], plan=PLANS["one rank"]).timeline()


# --- state ------------------------------------------------------------------------------------


def test_the_state_dict_is_the_plain_models_and_loads_under_another_plan() -> None:
    expected = plainly(network(), data(2), 4)
    states = on_ranks(PLANS["gems"], lambda t: (t.step(*data(2)[0]), t.state_dict())[1])
    plain = network()
    plain.load_state_dict(states[0])

    def go_on(trainer: Trainer) -> Any:
        trainer.load_state_dict(plain.state_dict())
        before = trainer.state_dict()
        trainer.step(*data(2)[1])
        return before, trainer.state_dict()

    make = {"optimizer": lambda p: torch.optim.SGD(p, 0.05)}
    for before, _ in on_ranks(PLANS["fold × data 2"], go_on, **make):
        same_state(before, states[0], 0.0)

    # Plain SGD has no state of its own, so going on elsewhere is like never having stopped.
    expected = plainly(network(), data(2), 4, make=make["optimizer"])
    states = on_ranks(PLANS["gems"], lambda t: (t.step(*data(2)[0]), t.state_dict())[1], **make)
    plain.load_state_dict(states[-1])
    for _, after in on_ranks(PLANS["fold × data 2"], go_on, **make):
        same_state(after, expected.state)


def test_state_dict_tensors_are_nobodys_but_the_callers() -> None:
    def work(trainer: Trainer) -> Any:
        state = trainer.state_dict()
        for tensor in state.values():
            tensor.zero_()
        return trainer.state_dict()

    for state in on_ranks(PLANS["1f1b"], work):
        same_state(state, network().state_dict(), 0.0)


def test_a_state_dict_that_is_not_the_models_is_refused_with_all_its_problems() -> None:
    state = network().state_dict()
    first, *_, last = state
    del state[last]
    state[first] = torch.zeros(1)
    state["other"] = torch.zeros(1)
    trainer = Trainer(network(), sample=data()[0][0][:2], plan=PLANS["one rank"])
    with pytest.raises(ShapeError) as error:
        trainer.load_state_dict(state)
    assert f"missing: {last}" in str(error.value)
    assert "unexpected: other" in str(error.value)
    assert f"{first} has shape (1,)" in str(error.value)


def test_tied_weights_keep_both_of_their_names_in_the_state_dict() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 5)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.b(self.a(x).relu()))

    made = batches((4, 6), 5, 2, torch.float64)
    plan = Plan(stages=["a", "b", "c"], micro_batches=2)
    found, expected = planned(Tied().double(), made, plan), plainly(Tied().double(), made, 2)
    assert_equal(found, expected)
    assert torch.equal(found.state["a.weight"], found.state["b.weight"])
    Tied().double().load_state_dict(found.state)


# --- optimizers -------------------------------------------------------------------------------

OPTIMIZERS = {
    "Adam": lambda p: torch.optim.Adam(p, 1e-2),
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 1e-3, momentum=0.5),
}


@pytest.mark.parametrize("plan", ["1f1b", "fold × data 2"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_works_on_each_ranks_own_parameters(name: str, plan: str) -> None:
    make = OPTIMIZERS[name]
    found = planned(network(), data(3), PLANS[plan], make=make)
    # Adam divides by what may be tiny, hence the wider tolerance.
    assert_equal(found, plainly(network(), data(3), 4, make=make), 1e-7)


def test_a_learning_rate_schedule_is_the_users_own() -> None:
    model, made = network(), data(4)
    optimizer = sgd(model.parameters())
    rate = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1)
    for images, labels in made:
        for x, y, share in micro_batches(images, labels, 4):
            (F.cross_entropy(model(x), y) * share).backward()
        optimizer.step()
        optimizer.zero_grad()
        rate.step()

    def work(trainer: Trainer) -> Any:
        rate = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 2, 0.1)
        for images, labels in made:
            trainer.step(images, labels)
            rate.step()
        return trainer.state_dict()

    for state in on_ranks(PLANS["1f1b"], work):
        same_state(state, model.state_dict())


def test_a_rank_without_parameters_still_has_an_optimizer() -> None:
    plan = Plan(stages=[["0"], ["1"], ["2"]], micro_batches=2)
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 5)).double()
    made = batches((4, 6), 5, 2, torch.float64)
    assert_equal(planned(model, made, plan), plainly(model, made, 2))


@pytest.mark.parametrize("plan", list(PLANS))
@pytest.mark.parametrize("largest", [0.1, 100.0])
def test_clipping_is_by_the_norm_of_the_whole_gradient(plan: str, largest: float) -> None:
    found = planned(network(), data(), PLANS[plan], clip=largest)
    assert_equal(found, plainly(network(), data(), 4, clip=largest))


def test_the_norm_is_shown_when_clipping_and_counts_tied_weights_once() -> None:
    shared = nn.Linear(5, 5)
    model = nn.Sequential(shared, nn.ReLU(), shared).double()
    made = batches((4, 5), 5, 1, torch.float64)
    plain = copy.deepcopy(model)
    F.cross_entropy(plain(made[0][0]), made[0][1]).backward()
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
    plan = Plan(stages=[["0"], ["1", "0:2"]], micro_batches=1)

    def work(transport: Any) -> Any:
        mine = copy.deepcopy(model)
        trainer = Trainer(
            mine, F.cross_entropy, sgd, made[0][0], plan, transport=transport, clip=1e9
        )
        return trainer.step(*made[0]).norm

    for norm in run(2, work):
        assert norm == pytest.approx(float(expected), rel=1e-10)


# --- several calls of step per update ---------------------------------------------------------


@pytest.mark.parametrize("plan", list(PLANS))
def test_accumulating_is_one_big_step_and_buffers_see_every_sample(plan: str) -> None:
    """Three calls of unequal size, so the average is over samples and not over calls."""
    made = [data(1, n)[0] for n in (8, 8, 3)]
    parts = [part for x, y in made for part in micro_batches(x, y, 4)]
    model = network().train()
    optimizer = sgd(model.parameters())
    for x, y, _ in parts:
        (F.cross_entropy(model(x), y) * len(x) / 19).backward()
    optimizer.step()
    found = planned(network(), made, PLANS[plan], accumulate=3)
    assert found.updated == [False, False, True]
    same_state(found.state, model.state_dict())


def test_accumulating_with_clipping_clips_the_average() -> None:
    made = data(1)[0]
    halves = [tuple(t[:4] for t in made), tuple(t[4:] for t in made)]
    plan = Plan(stages=3, micro_batches=2)
    found = planned(network(), halves, plan, accumulate=2, clip=0.1)
    same_state(found.state, plainly(network(), [made], 4, clip=0.1).state)


# --- precision --------------------------------------------------------------------------------


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.mid, self.head = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mid(self.norm(self.conv(x)).relu()).mean((2, 3)))


SPLIT = Plan(stages=2, micro_batches=2, schedule="zero-bubble")


@pytest.mark.parametrize("plan", [Plan(stages=3, micro_batches=2), SPLIT], ids=["1f1b", "split"])
def test_bf16_is_plain_autocast(plan: Plan) -> None:
    made = batches((4, 3, 8, 8), 5, 2, torch.float32)

    class Autocast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Small()

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.inner(x)

    expected = plainly(Autocast(), made, 2, lambda y, t: F.cross_entropy(y.float(), t))
    found = planned(
        Small(), made, plan, lambda y, t: F.cross_entropy(y.float(), t), precision="bf16"
    )
    for mine, theirs in zip(found.losses, expected.losses, strict=True):
        assert mine == pytest.approx(theirs, rel=2e-3)
    for name, tensor in found.state.items():
        assert tensor.dtype == torch.float32
        close(name, tensor, expected.state[f"inner.{name}"], 2e-3)
    exact = planned(Small(), made, plan)
    assert exact.losses != found.losses, "it really ran in bf16"


def test_fp16_scales_the_loss_and_skips_an_overflowing_step_on_every_rank() -> None:
    made = batches((4, 3, 8, 8), 5, 1, torch.float32)[0]

    def work(trainer: Trainer) -> Any:
        trainer.session.scale.value = 2.0**40  # far beyond what half precision holds
        before = trainer.state_dict()
        skipped = trainer.step(*made)
        after, scale = trainer.state_dict(), trainer.session.scale.value
        trainer.session.scale.value = 2.0**8
        taken = trainer.step(*made)
        return before, after, trainer.state_dict(), skipped.updated, taken.updated, scale

    results = on_ranks(SPLIT, work, Small(), precision="fp16")
    for before, after, later, skipped, taken, scale in results:
        assert (skipped, taken, scale) == (False, True, 2.0**39)
        same_state(after, before, 0.0)
        assert any(not torch.equal(later[name], after[name]) for name in later)
    plain = Small()
    optimizer = sgd(plain.parameters())
    F.cross_entropy(plain(made[0]), made[1]).backward()
    optimizer.step()
    same_state(results[0][2], plain.state_dict(), 2e-3)


def test_an_unknown_precision_and_too_little_accumulation_are_refused() -> None:
    sample = data()[0][0][:2]
    with pytest.raises(PlanError, match="choose one of fp32, bf16, fp16"):
        Trainer(network(), sample=sample, plan=Plan(), precision="fp8")
    with pytest.raises(PlanError, match="at least one step"):
        Trainer(network(), sample=sample, plan=Plan(), accumulate=0)


# --- what people do to their models -----------------------------------------------------------


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_hooks_of_the_users_modules_and_parameters_still_fire(schedule: str) -> None:
    seen: list[str] = []

    def work(transport: Any) -> Any:
        model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 5)).double()
        trainer = Trainer(
            model,
            F.cross_entropy,
            sgd,
            made[0][0][:2],
            Plan(stages=2, micro_batches=2, schedule=schedule),
            transport=transport,
        )
        trainer.step(*made[0])  # hooks come later than the first step
        for name, module in model.named_children():
            module.register_forward_hook(lambda *_, n=name: seen.append(f"forward {n}"))
            module.register_full_backward_hook(lambda *_, n=name: seen.append(f"backward {n}"))
        for name, p in trainer.session.weights.named_parameters().items():
            p.register_post_accumulate_grad_hook(lambda _, n=name: seen.append(f"grad {n}"))
        trainer.step(*made[1])

    made = batches((4, 6), 5, 2, torch.float64)
    run(2, work)
    names = [f"{i}.{k}" for i in (0, 2) for k in ("weight", "bias")]
    wanted = [f"{what} {i}" for what in ("forward", "backward") for i in range(3)]
    wanted += [f"grad {name}" for name in names]
    assert sorted(seen) == sorted(2 * wanted), "once for each of two micro-batches"


def test_unfreezing_layers_in_mid_training_is_noticed() -> None:
    """The recording knew that nothing in front of the frozen layer wanted a gradient."""

    def frozen() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 5)).double()
        model[0].requires_grad_(False)
        return model

    made = batches((4, 6), 5, 3, torch.float64)
    plain = frozen()
    first = copy.deepcopy(plain)  # ranks that are threads share one generator
    optimizer = sgd(plain.parameters())
    for step, (x, y) in enumerate(made):
        plain[0].requires_grad_(step > 0)
        F.cross_entropy(plain(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    def work(transport: Any) -> Any:
        model = copy.deepcopy(first)
        plan = Plan(stages=2, micro_batches=2)
        trainer = Trainer(model, F.cross_entropy, sgd, made[0][0][:2], plan, transport=transport)
        for step, (x, y) in enumerate(made):
            model[0].requires_grad_(step > 0)
            trainer.step(x, y)
        return trainer.state_dict()

    for state in run(2, work):
        same_state(state, plain.state_dict())


@pytest.mark.parametrize("plan", ["1f1b", "gems"])
def test_what_the_loss_does_not_use_gets_no_gradient(plan: str) -> None:
    """Not even zeros: weight decay would shrink it, and momentum go on pushing."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.aside = nn.Linear(6, 6), nn.Linear(6, 6)
            self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 5)

        def forward(self, x: Tensor) -> Any:
            x = self.a(x)
            aside = self.aside(x)
            return self.c(self.b(x).relu()), aside

    made = batches((8, 6), 5, 3, torch.float64)
    main = lambda output, target: F.cross_entropy(output[0], target)  # noqa: E731
    found = planned(Two().double(), made, PLANS[plan], main)
    assert_equal(found, plainly(Two().double(), made, 4, main))
    assert found.gradients[0]["aside.weight"] is None


def test_a_batch_on_which_the_loss_is_not_a_number_changes_nothing_and_is_an_error() -> None:
    images, labels = data(1)[0]

    def work(trainer: Trainer) -> Any:
        before = trainer.state_dict()
        with pytest.raises(LossError, match="no update was made"):
            trainer.step(images * float("nan"), labels)
        after = trainer.state_dict()
        return {n: t for n, t in before.items() if "running" not in n}, after

    for before, after in on_ranks(PLANS["1f1b"], work):
        for name, tensor in before.items():
            if "num_batches" not in name:
                assert torch.equal(after[name], tensor), name


def test_a_loss_of_more_than_one_number_is_refused() -> None:
    every = lambda y, t: F.cross_entropy(y, t, reduction="none")  # noqa: E731
    trainer = Trainer(network(), every, sgd, data()[0][0][:2], PLANS["one rank"])
    with pytest.raises(ShapeError, match=r"loss must give one number.*got \(2,\)"):
        trainer.step(*data()[0])


def test_inputs_of_unequal_length_are_refused() -> None:
    trainer = Trainer(network(), F.cross_entropy, sgd, data()[0][0][:2], PLANS["one rank"])
    with pytest.raises(ShapeError, match="equally many"):
        trainer.step((torch.zeros(2, 3), torch.zeros(3, 3)), torch.zeros(2))
    with pytest.raises(ShapeError, match=r"does not take inputs float64\[2, 7, 8, 8\]"):
        trainer.step(torch.zeros(8, 7, 8, 8, dtype=torch.float64), torch.zeros(8).long())
