"""All ranks start from the same weights and do the same; the rank that differs is named."""

from __future__ import annotations

import copy
import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gems.distributed.consensus import Claim, difference
from gems.errors import GemsError, PeerError, ShapeError
from gems.plans.plan import Plan
from gems.torch import fingerprint
from gems.torch.runtime.microbatch import split
from gems.torch.trainer import Trainer
from gems.transport.protocol import Transport
from gems.transport.threads import run
from tests.exact import plainly, same_state, sgd
from tests.worlds import spawn

Tensor = torch.Tensor
PIPELINE = Plan(stages=2, micro_batches=2)
PLANS = {
    "gems": Plan(stages=2, schedule="gems", replications=1),
    "copies": Plan(stages=1, micro_batches=1, data=2),
    "copies, zero 1": Plan(stages=1, micro_batches=1, data=2, zero=1),
    "copies, zero 3": Plan(stages=1, micro_batches=1, data=2, zero=3),
    "tiles": Plan(stages=2, spatial=["1x2", "1x2"], micro_batches=2),
    "gems, offloaded": Plan(stages=2, schedule="gems", offload="weights:host"),
    "copies, eager": Plan(stages=1, micro_batches=2, data=2, optimizer_step="eager"),
    "2bw": Plan(stages=1, micro_batches=2, data=2, schedule="2bw"),
}


class Net(nn.Module):
    """Everything that replicas could start with differently: weights, buffers of several types."""

    def __init__(self, constant: Tensor | None = None) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.body = nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(4, 5)
        self.frozen = nn.Conv2d(4, 4, 1).requires_grad_(False)
        self.register_buffer("shift", torch.randn(4, 1, 1))
        self.register_buffer("mask", torch.rand(4, 1, 1) > 0.3, persistent=False)
        self.register_buffer("count", torch.randint(100, (1,)))
        self.constant = constant

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x)).relu() + self.shift * self.mask
        x = self.frozen(self.body(x)) + self.count
        if self.constant is not None:
            x = x + self.constant
        return self.head(x.mean((2, 3)))


def data(steps: int = 3, samples: int = 4) -> list[Any]:
    draw = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(samples, 3, 8, 8, generator=draw, dtype=torch.float64),
            torch.randint(5, (samples,), generator=draw),
        )
        for _ in range(steps)
    ]


def trainer_on(transport: Transport, model: nn.Module, plan: Plan, **options: Any) -> Trainer:
    sample = torch.empty(1, 3, 8, 8, dtype=torch.float64)
    options = {"loss": F.cross_entropy, "optimizer": sgd} | options
    return Trainer(model.double(), sample=sample, plan=plan, transport=transport, **options)


# --- the same start -------------------------------------------------------------------------------


def held(trainer: Trainer) -> dict[str, Tensor]:
    """What this rank itself has, not what the first holder tells."""
    with trainer.session.weights.unsharded():
        names = trainer.session.weights.held
        buffers = dict(trainer.model.named_buffers())
        found = {
            n: trainer.session.weights.copy(n).detach().clone() for n in names if n not in buffers
        }
        return found | {n: b.clone() for n, b in buffers.items() if n in names}


def own_start(transport: Transport, plan: Plan, model: nn.Module | None = None) -> Any:
    """Every rank draws its own weights; one network is trained all the same."""
    if model is None:
        torch.manual_seed(100 + transport.rank)
    trainer = trainer_on(transport, model or Net(), plan)
    start = trainer.state_dict()
    for batch in data():
        trainer.step(*batch)
    trainer.flush()
    return start, held(trainer), trainer.state_dict()


def assert_one_network(found: list[Any], plan: Plan) -> None:
    for start, mine, _ in found:
        for name, tensor in mine.items():
            for _, theirs, _ in found:
                if name in theirs:
                    assert torch.equal(tensor, theirs[name]), f"replicas of {name} differ"
        for name, tensor in start.items():
            assert torch.equal(tensor, found[0][0][name])
    if plan.schedule != "2bw":
        model = Net().double()
        model.load_state_dict(found[0][0])
        model.mask = found[0][1]["mask"] if "mask" in found[0][1] else found[1][1]["mask"]
        same_state(found[0][2], plainly(model, data(), plan.total).state)


@pytest.mark.parametrize("name", PLANS)
def test_replicas_that_drew_different_weights_start_as_the_first_one(name: str) -> None:
    plan = PLANS[name]
    models = [Net() for _ in range(plan.world)]  # each with numbers of its own

    found = run(plan.world, lambda to: own_start(to, plan, models[to.rank]))
    assert_one_network(found, plan)


def test_processes_that_drew_different_weights_start_as_the_first_one() -> None:
    for name in ("gems", "copies, zero 3"):
        assert_one_network(spawn(2, own_start, PLANS[name]), PLANS[name])


def test_gradients_that_somebody_left_on_the_model_are_no_part_of_the_first_step() -> None:
    torch.manual_seed(0)
    model = Net().double()
    expected = plainly(model, data(), 2)

    def work(transport: Transport) -> Any:
        mine = copy.deepcopy(model)
        mine(data()[0][0]).sum().backward()
        mine.load_state_dict(model.state_dict())  # the statistics that this changed
        trainer = trainer_on(transport, mine, PIPELINE)
        for batch in data():
            trainer.step(*batch)
        return trainer.state_dict()

    for state in run(2, work):
        same_state(state, expected.state)


# --- the same call, batch and settings ------------------------------------------------------------


def outcomes(plan: Plan, differ: Any) -> list[str]:
    """What each rank raised; `differ(rank)` gives a rank's own options and its own step."""
    torch.manual_seed(0)
    model, said = Net(), [""] * plan.world

    def work(transport: Transport) -> None:
        own, act = differ(transport.rank)
        try:
            act(trainer_on(transport, copy.deepcopy(model), plan, **own))
        except GemsError as error:
            said[transport.rank] = f"{type(error).__name__}: {error}"

    run(plan.world, work)
    return said


def steps(trainer: Trainer, batches: Any = None) -> None:
    for batch in batches or data():
        trainer.step(*batch)


def changed(x: Tensor, at: int) -> Tensor:
    x = x.clone()
    x.view(-1)[at] += 1
    return x


THREE = Plan(stages=3, micro_batches=4)


@pytest.mark.parametrize("what", ["one pixel", "one label", "order", "dtype"])
@pytest.mark.parametrize("step", [0, 2])
@pytest.mark.parametrize("plan", [THREE, PLANS["copies"], PLANS["tiles"]], ids=str)
def test_another_batch_on_one_rank_is_noticed(what: str, step: int, plan: Plan) -> None:
    def differ(rank: int) -> Any:
        batches = data()
        if rank == 1:
            x, y = batches[step]
            batches[step] = {
                "one pixel": (changed(x, 1), y),
                "one label": (x, changed(y, 0) % 5),
                "order": (x.flip(0), y.flip(0)),
                "dtype": (x, y.to(torch.int32)),
            }[what]
        return {}, partial(steps, batches=batches)

    said = outcomes(plan, differ)
    for text in said:
        assert "ranks were given different batches" in text, said
        assert text.startswith("ShapeError")
        if plan.world > 2:
            assert "rank 1 differs from the others" in text


def clipped(trainer: Trainer) -> None:
    steps(trainer, data()[:1])
    trainer.clip = 1.0 if trainer.rank == 1 else 2.0
    steps(trainer)


def slowed(trainer: Trainer) -> None:
    steps(trainer, data()[:1])
    assert trainer.optimizer is not None
    for group in trainer.optimizer.param_groups:
        group["lr"] *= 0.1 if trainer.rank == 1 else 0.5
    steps(trainer)


def halved(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def tenth(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)


def weighted(weight: float) -> Any:
    return lambda output, target: weight * F.cross_entropy(output, target)


SETTINGS: dict[str, tuple[Any, Any, Any, str]] = {
    "seed": ({"seed": 0}, {"seed": 1}, steps, r"seed \(.*rank 1: 1"),
    "clip": ({"clip": 1.0}, {"clip": 2.0}, steps, r"clip \(.*rank 1: 2.0"),
    "accumulate": ({"accumulate": 1}, {"accumulate": 2}, steps, r"accumulate \(.*rank 1: 2"),
    "loss": ({}, {"loss": F.multi_margin_loss}, steps, r"loss \(.*rank 1: multi_margin_loss"),
    "label smoothing": (
        {"loss": partial(F.cross_entropy, label_smoothing=0.1)},
        {"loss": partial(F.cross_entropy, label_smoothing=0.2)},
        steps,
        r"loss \(",
    ),
    "a loss module": (
        {"loss": nn.CrossEntropyLoss()},
        {"loss": nn.CrossEntropyLoss(torch.arange(5.0).double())},
        steps,
        r"loss \(",
    ),
    "a closure": ({"loss": weighted(1.0)}, {"loss": weighted(2.0)}, steps, r"loss \("),
    "optimizer": ({}, {"optimizer": torch.optim.Adam}, steps, r"optimizers.*rank 1: Adam"),
    "learning rate": (
        {"optimizer": lambda p: torch.optim.SGD(p, 0.1)},
        {"optimizer": lambda p: torch.optim.SGD(p, 0.2)},
        steps,
        r"lr \(.*rank 1: 0.2|different hyper-parameters",
    ),
    "learning rate, later": ({}, {}, slowed, r"lr \(.*rank 1: 0.005"),
    "clip, later": ({}, {}, clipped, r"clip \(.*rank 1: 1.0"),
    "scheduler": ({"scheduler": halved}, {}, steps, "different optimizers or schedulers"),
    "its factor": ({"scheduler": halved}, {"scheduler": tenth}, steps, r"lr \(.*rank 1: 0.005"),
}


@pytest.mark.parametrize("what", SETTINGS)
@pytest.mark.parametrize("plan", [THREE, PLANS["copies"]], ids=str)
def test_another_setting_on_one_rank_is_noticed(what: str, plan: Plan) -> None:
    most, odd, act, expected = SETTINGS[what]
    said = outcomes(plan, lambda rank: (odd if rank == 1 else most, act))
    for text in said:
        assert re.search(expected, text), said
        assert text.startswith("PeerError")


def test_a_learning_rate_by_layer_may_differ_between_ranks() -> None:
    """Each rank has its own layers, so its groups need not be those of another."""

    def by_layer(parameters: Any) -> torch.optim.Optimizer:
        groups = [{"params": [p], "lr": 0.1 / (1 + p.numel())} for p in parameters]
        return torch.optim.SGD(groups, 0.1)

    assert outcomes(THREE, lambda rank: ({"optimizer": by_layer}, steps)) == [""] * 3


def test_another_model_on_one_rank_is_noticed() -> None:
    torch.manual_seed(0)
    drawn = Net()

    def work(transport: Transport) -> None:
        model = copy.deepcopy(drawn)
        if transport.rank == 1:
            model.norm.momentum = 0.3
        trainer_on(transport, model, PLANS["copies"])

    with pytest.raises(PeerError, match="rank 1 differs from the others in layers"):
        run(2, work)


def test_a_constant_that_differs_between_replicas_is_noticed() -> None:
    """It is no buffer, so nobody makes it the same."""
    constants = [torch.full((1, 1), float(rank)).double() for rank in range(2)]

    def work(transport: Transport) -> None:
        trainer_on(transport, Net(constants[transport.rank]), PLANS["copies"])

    with pytest.raises(PeerError, match="constant tensors"):
        run(2, work)


def early_end(trainer: Trainer) -> None:
    steps(trainer, data()[: 2 if trainer.rank == 1 else 3])
    trainer.state_dict()


def first_rank_saves(trainer: Trainer) -> None:
    steps(trainer)
    if trainer.rank == 0:
        trainer.state_dict()
    trainer.step(*data()[0])


def one_predicts(trainer: Trainer) -> None:
    if trainer.rank == 0:
        trainer.predict(data()[0][0])
    steps(trainer)


CALLS = {
    "runs out of batches": (early_end, "rank 1: state_dict"),
    "only rank 0 saves": (first_rank_saves, "rank 0: state_dict"),
    "only rank 0 predicts": (one_predicts, "rank 0: predict"),
}


@pytest.mark.parametrize("what", CALLS)
@pytest.mark.parametrize("plan", [PIPELINE, PLANS["copies, zero 3"]], ids=str)
def test_ranks_in_different_calls_are_told_who_is_where(what: str, plan: Plan) -> None:
    act, expected = CALLS[what]
    for text in outcomes(plan, lambda rank: ({}, act)):
        assert text.startswith("PeerError: ranks are in different calls")
        assert expected in text


def test_a_rank_that_cannot_take_its_batch_tells_the_others() -> None:
    def differ(rank: int) -> Any:
        batches = data()
        if rank == 1:
            batches[1] = (batches[1][0][:, :2], batches[1][1])
        return {}, partial(steps, batches=batches)

    said = outcomes(THREE, differ)
    assert said[1].startswith("ShapeError: the model does not take inputs float64[1, 2, 8, 8]")
    for text in (said[0], said[2]):
        assert text.startswith("PeerError: rank 1 failed: ShapeError: the model does not take")


def test_training_goes_on_after_a_difference_was_told() -> None:
    """Nothing had begun: the batch that all agree on gives the plain model's numbers."""
    torch.manual_seed(0)
    model = Net().double()
    expected = plainly(model, data(), 4)

    def work(transport: Transport) -> Any:
        trainer = trainer_on(transport, copy.deepcopy(model), THREE)
        for x, y in data():
            with pytest.raises(ShapeError, match="different batches"):
                trainer.step(x + transport.rank, y)
            trainer.step(x, y)
        return trainer.state_dict()

    for state in run(3, work):
        same_state(state, expected.state)


def unequal(transport: Transport) -> str:
    torch.manual_seed(0)
    trainer = trainer_on(transport, Net(), PIPELINE)
    try:
        steps(trainer, [(torch.randn(4, 3, 8, 8).double() + transport.rank, data()[0][1])])
    except ShapeError as error:
        return str(error)
    return ""


def test_processes_with_different_batches_are_told() -> None:
    for text in spawn(2, unequal):
        assert "ranks were given different batches" in text


# --- fingerprints ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_fingerprint_sees_values_shape_and_type(dtype: torch.dtype) -> None:
    x = (torch.arange(24).view(2, 3, 4) % 2).to(dtype)
    same = fingerprint.of_tensor(x)
    assert same == fingerprint.of_tensor(x.clone())
    assert same == fingerprint.of_tensor(x.transpose(0, 1).contiguous().transpose(0, 1))
    other = x.clone()
    other[1, 2, 3] = 0
    assert same != fingerprint.of_tensor(other)
    assert same != fingerprint.of_tensor(x.view(3, 2, 4))
    assert same != fingerprint.of_tensor(x.to(torch.float64))


def test_a_large_tensor_is_sampled_all_over() -> None:
    x = torch.zeros(1, 3, 700, 700)
    assert fingerprint.of_tensor(x) != fingerprint.of_tensor(changed(x, 5))
    sampled = fingerprint.of_tensor(x, whole=1)
    assert sampled == fingerprint.of_tensor(x.clone(), whole=1)
    noise = x + torch.rand(x.shape).mul_(1e-3)
    assert sampled != fingerprint.of_tensor(noise, whole=1)
    assert sampled != fingerprint.of_tensor(changed(x, x.numel() - 1), whole=1)


def test_an_array_may_tell_its_own_checksum() -> None:
    class Slide:
        shape, dtype = (2, 3, 8, 8), torch.float32

        def __init__(self, checksum: int) -> None:
            self.checksum, self.reads = checksum, 0

        def __getitem__(self, key: Any) -> Any:
            self.reads += 1
            return torch.zeros(1, 1, 1, 1)

    one, two = Slide(1), Slide(2)
    of = [fingerprint.of_batch(split(s, None, 1).inputs, thorough=True) for s in (one, two)]
    assert of[0] != of[1]
    assert one.reads == 0


def test_the_words_of_a_difference_name_the_odd_ranks() -> None:
    claims = [Claim("step", batch=1, given="this").contents() for _ in range(5)]
    claims[3] = Claim("step", batch=2, given="that").contents()
    assert "(rank 3 differs from the others); rank 3 has that" in str(difference(claims, 3))
    claims[1] = Claim("save").contents()
    said = str(difference(claims, 0))
    assert "ranks 0, 2, 3, 4: step; rank 1: save" in said
    claims[2] = Claim("step", failure="OSError: disk full").contents()
    assert str(difference(claims, 0)) == "rank 2 failed: OSError: disk full"
