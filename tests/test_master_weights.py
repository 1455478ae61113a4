"""Weights and gradients in half, fp32 masters in the optimizer: the numbers of a plain loop that
does the same, bit for bit, in the papers' bytes.

Sums in half depend on their order, so the plain loop has that of the plan: a copy of the pipeline
adds the gradients of its micro-batches one by one, and copies are added in the end. With two copies
that is one sum, the same from either side; with tiles, or three ranks and more, the order is the
transport's, and there the tests have tolerances.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import gems
from gems.cli.main import main
from gems.errors import PlanError
from gems.hardware import machine
from gems.planner.request import Request
from gems.plans.plan import Plan
from gems.torch.planning import Study
from gems.torch.state import master_weights
from gems.torch.state.loss_scale import LossScale
from gems.torch.trainer import Trainer
from gems.transport.protocol import Transport
from gems.transport.threads import run
from tests.exact import Recordings, batches, drawing
from tests.worlds import spawn

Tensor = torch.Tensor
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
MASTER = master_weights.MASTER


class Net(nn.Module):
    """What is stored in half, what is not, and a layer that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.b, self.group = nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.fixed = nn.Conv2d(8, 8, 1).requires_grad_(False)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.a(x)).relu()
        x = self.group(self.fixed(self.b(x))).relu()
        return self.head(x.mean((2, 3)))


def network(seed: int = 0) -> nn.Module:
    with drawing(seed):
        return Net()


def data(steps: int = 3, samples: int = 8) -> list[Any]:
    return batches((samples, 3, 8, 8), 4, steps, torch.float32)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 0.02)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9, weight_decay=1e-3)


def adagrad(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, 0.05)  # which has state before the first step


# --- the plain loop -------------------------------------------------------------------------------


class Plain:
    """A model in half on one device, with masters in fp32. `groups` are the micro-batches that each
    copy of the pipeline runs, in the order of their backwards."""

    def __init__(
        self,
        model: nn.Module,
        make: Callable[[Any], Any],
        precision: str,
        groups: Sequence[Sequence[int]],
        clip: float | None = None,
    ) -> None:
        self.model, self.groups, self.clip, self.dtype = model, groups, clip, TYPES[precision]
        norms = (nn.BatchNorm2d, nn.GroupNorm)
        for layer in [m for m in model.modules() if not isinstance(m, norms)]:
            for p in layer.parameters(recurse=False):
                p.data = p.data.to(self.dtype)
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.masters = [nn.Parameter(p.detach().clone().float()) for p in self.trained]
        self.optimizer = make(self.masters)
        self.scale = LossScale() if precision == "fp16" else None

    def step(self, x: Tensor, y: Tensor) -> tuple[float, bool]:
        count, total = sum(map(len, self.groups)), 0.0
        scale = self.scale.value if self.scale else 1.0
        sums: list[Any] = [None for _ in self.groups]
        for i, (images, labels) in enumerate(zip(x.chunk(count), y.chunk(count), strict=True)):
            with torch.autocast("cpu", self.dtype):
                loss = cross_entropy(self.model(images), labels)
            own = torch.autograd.grad(loss * (scale / count), self.trained)
            (at,) = (n for n, group in enumerate(self.groups) if i in group)
            sums[at] = [a + b for a, b in zip(sums[at], own, strict=True)] if sums[at] else own
            total += loss.item() / count
        gradients: list[Any] = [sum(parts[1:], parts[0]) for parts in zip(*sums, strict=True)]
        norm = torch.stack([g.double().norm() for g in gradients]).norm().item() / scale
        updated = self.scale is None or self.scale.accepts(norm)
        factor = 1 / scale
        if self.clip is not None and norm > self.clip:
            factor *= self.clip / (norm + 1e-6)
        if updated:
            for p, g in zip(self.masters, gradients, strict=True):
                p.grad = g.float() * factor
            self.optimizer.step()
            with torch.no_grad():
                for p, master in zip(self.trained, self.masters, strict=True):
                    p.copy_(master)
        return total, updated

    def result(self, data: list[Any]) -> tuple[list[Any], dict[str, Tensor]]:
        return [self.step(*batch) for batch in data], self.model.state_dict()


def planned(
    plan: Plan, data: list[Any], make: Any = adam, work: Any = None, **options: Any
) -> list[Any]:
    """On each rank: losses, whether steps were made, and all weights; or what `work` gives."""
    options = {"precision": "bf16", "master_weights": True} | options
    model = options.pop("model", network)

    def body(transport: Transport) -> Any:
        sample = torch.empty(2, *data[0][0].shape[1:])
        with Trainer(
            model(), cross_entropy, make, sample, plan, transport=transport, **options
        ) as trainer:
            if work is not None:
                return work(trainer)
            return stepped(trainer, data), trainer.state_dict()

    with mock.patch("gems.torch.tracing.trace.record", Recordings()):
        return run(plan.world, body)


def stepped(trainer: Trainer, data: list[Any]) -> list[tuple[float, bool]]:
    return [(step.loss, step.updated) for step in (trainer.step(*batch) for batch in data)]


def same(found: Any, expected: Any) -> None:
    """Bit for bit, but for running statistics and losses, which are merged from several ranks."""
    (losses, state), (wanted, plain) = found, expected
    assert [updated for _, updated in losses] == [updated for _, updated in wanted]
    assert [loss for loss, _ in losses] == pytest.approx([loss for loss, _ in wanted], rel=1e-6)
    assert state.keys() == plain.keys()
    for name, value in plain.items():
        assert state[name].dtype == value.dtype, name
        near = torch.allclose(state[name], value, rtol=1e-5, atol=1e-6)
        assert near if "running" in name else torch.equal(state[name], value), name


SERIAL = ((0, 1, 2, 3),)
COPIES = ((0, 1), (2, 3))


def serial(**options: Any) -> tuple[Plan, Any]:
    options = {"schedule": "sequential", "stages": 2, "ranks": 1} | options
    return Plan(micro_batches=4, **options), SERIAL


def copies(**options: Any) -> tuple[Plan, Any]:
    options = {"schedule": "sequential", "stages": 2, "ranks": 1} | options
    return Plan(micro_batches=2, data=2, **options), COPIES


PLANS = {
    "one device": serial(stages=1),
    "pipeline": serial(schedule="1f1b", ranks=2),
    "zero bubble": serial(schedule="zero-bubble", ranks=2),
    "bidirectional": (Plan(stages=2, schedule="gems", replications=2), ((0, 2), (1, 3))),
    "copies": copies(),
    "zero=1": copies(zero=1),
    "zero=2": copies(zero=2),
    "zero=3": copies(zero=3),
    "weights on the host": serial(offload="weights"),
    "optimizer on the host": serial(offload="optimizer"),
    "weights on disk": serial(offload="weights:disk"),
    "optimizer on disk": serial(offload="optimizer:disk"),
    "zero=1, weights on disk": copies(zero=1, offload="weights:disk"),
    "zero=3, weights on the host": copies(zero=3, offload="weights"),
    "zero=2, optimizer on disk": copies(zero=2, offload="optimizer:disk"),
    "l2l": serial(stages=3, schedule="l2l"),
    "l2l, all on the host, eager steps": serial(
        stages=3, schedule="l2l", offload="weights", optimizer_step="eager"
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_any_plan_has_the_bits_of_the_plain_loop(name: str) -> None:
    plan, groups = PLANS[name]
    expected = Plain(network(), adam, "bf16", groups).result(data())
    for found in planned(plan, data()):
        same(found, expected)


@pytest.mark.parametrize("make", (momentum, adagrad))
def test_other_optimizers_step_masters_too(make: Any) -> None:
    plan, groups = copies(zero=2)
    expected = Plain(network(), make, "bf16", groups).result(data())
    for found in planned(plan, data(), make):
        same(found, expected)


@pytest.mark.parametrize("name", ("one device", "zero=2", "weights on the host"))
def test_fp16_scales_the_loss_and_skips_what_overflows(name: str) -> None:
    """The first scale is too large for gradients of this loss."""
    plan, groups = PLANS[name]
    with mock.patch.object(LossScale.__init__, "__defaults__", (2.0**20, 2000)):
        expected = Plain(network(), adam, "fp16", groups, clip=0.5).result(data(6))
        assert {updated for _, updated in expected[0]} == {False, True}
        for found in planned(plan, data(6), precision="fp16", clip=0.5):
            same(found, expected)


def test_with_one_micro_batch_it_is_autocast() -> None:
    """Half weights are what autocast casts fp32 weights to, and masters are those weights: with
    nothing to sum, training is that of precision='bf16' bit for bit, if it starts from weights that
    are in half."""
    start = network()
    for p in master_weights.halvable(start):
        p.data = p.data.bfloat16().float()
    plan, found = Plan(stages=1), []
    for options in ({"master_weights": False}, {}):
        model = lambda: copy.deepcopy(start)  # noqa: E731
        ((steps, state),) = planned(plan, data(), model=model, **options)
        found.append((steps, {n: x.bfloat16() for n, x in state.items() if "norm" not in n}))
    assert found[0][0] == found[1][0]
    for name, value in found[0][1].items():
        assert torch.equal(value, found[1][1][name].bfloat16()), name


def test_tiles_are_near_the_plain_loop() -> None:
    """Each tile's gradient is rounded before they are added: bf16 has 8 bits, so sums of four are
    off by 1/256 or so of the largest, and Adam would make steps of such noise; so SGD."""

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, 0.1)

    plan = Plan(stages=2, micro_batches=2, spatial=[(2, 2)])
    wanted, plain = Plain(network(), sgd, "bf16", ((0, 1),)).result(data(2, 4))
    losses, state = planned(plan, data(2, 4), sgd)[0]
    assert [x for x, _ in losses] == pytest.approx([x for x, _ in wanted], rel=0.02)
    for name, value in plain.items():
        assert torch.allclose(state[name].float(), value.float(), rtol=0.02, atol=0.02), name


def test_gradients_in_fp32_fit_a_buffer_of_constant_size() -> None:
    """ZeRO-R's C_B: the step that has no room for two of them gives the same bits."""
    plan, groups = PLANS["copies"]
    expected = Plain(network(), adam, "bf16", groups).result(data())
    seen: list[int] = []
    original = torch.optim.AdamW.step

    def step(self: Any, *args: Any) -> Any:
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        seen.append(sum(g.nbytes for g in grads if g is not None and g.dtype == torch.float32))
        return original(self, *args)

    with (
        mock.patch.object(master_weights, "BUFFER", 2500),
        mock.patch.object(torch.optim.AdamW, "step", step),
    ):
        for found in planned(plan, data()):
            same(found, expected)
    # The largest parameter is 8 x 8 x 3 x 3; norms are stepped with the first few.
    assert max(seen) <= 2500 + 4 * 32 and len(seen) > 2 * 3


# --- asynchronous training ------------------------------------------------------------------------


def test_two_weight_versions_are_in_half() -> None:
    """PipeDream-2BW: W(t+1) = W(t) - gradient at W(t-1), on masters."""
    plain = Plain(network(), momentum, "bf16", ((0, 1),))
    older = [p.detach().clone() for p in plain.trained]
    for x, y in data(4):
        newest = [p.detach().clone() for p in plain.trained]
        with torch.no_grad():
            for p, value in zip(plain.trained, older, strict=True):
                p.copy_(value)
        plain.step(x, y)
        older = newest
    plan = Plan(stages=2, micro_batches=2, schedule="2bw")

    def work(trainer: Trainer) -> Any:
        for x, y in data(4):
            trainer.step(x, y)
        return trainer.state_dict()

    for state in planned(plan, data(), momentum, work):
        for name, p in plain.model.named_parameters():
            assert torch.equal(state[name], p), name


# --- bytes ----------------------------------------------------------------------------------------

CELLS = 16 * 32 + 32 * 4  # without biases: shards of four ranks are whole


def flat_network() -> nn.Module:
    with drawing(0):
        return nn.Sequential(
            nn.Flatten(), nn.Linear(16, 32, bias=False), nn.ReLU(), nn.Linear(32, 4, bias=False)
        )


@pytest.mark.parametrize("ranks", (2, 4))
@pytest.mark.parametrize("zero", (0, 1, 2, 3))
def test_bytes_are_those_of_the_zero_paper(zero: int, ranks: int) -> None:
    """2 + 2 + 12 per parameter: 16, 4 + 12/N, 2 + 14/N and 16/N. Adam counts steps in 4 bytes per
    parameter besides. What is simulated is what is counted."""
    plan = Plan(stages=1, schedule="sequential", data=ranks, zero=zero)
    pairs = [(torch.randn(2 * ranks, 1, 4, 4), torch.zeros(2 * ranks, dtype=torch.long))] * 2

    def work(trainer: Trainer) -> Any:
        session = trainer.session
        trainer.step(*pairs[0])
        session.forward_backward(*pairs[1])
        found = session.weights.resident_memory()
        session.step_optimizers(session.optimizers)
        assert trainer.optimizer is not None
        return found, 4 * len(trainer.optimizer.state)

    found = planned(plan, pairs, torch.optim.Adam, work, model=flat_network)
    per_cell = {0: 16, 1: 4 + 12 / ranks, 2: 2 + 14 / ranks, 3: 16 / ranks}[zero]
    for memory, steps in found:
        assert memory.weights + memory.gradients + memory.optimizer - steps == per_cell * CELLS
    study = Study(
        flat_network(), pairs[0][0][:2], machine("cpu"), "estimate", "bf16", master_weights=True
    )
    request = Request.of(plan, None, study.state())
    for rank, peak in enumerate(study.compiled(plan, request).timeline.peaks):
        memory, steps = found[rank]
        assert peak.optimizer == memory.optimizer - steps == 12 * CELLS / (ranks if zero else 1)


def test_l2l_has_two_layers_in_half_on_the_device_and_all_else_on_the_host() -> None:
    plan = Plan(stages=4, ranks=1, schedule="l2l", micro_batches=2, offload=("weights",))
    side = 32
    pairs = [(torch.randn(4, side), torch.zeros(4, dtype=torch.long))] * 2

    def layers() -> nn.Module:
        with drawing(0):
            return nn.Sequential(*(nn.Linear(side, side, bias=False) for _ in range(4)))

    def work(trainer: Trainer) -> Any:
        for batch in pairs:
            trainer.step(*batch)
        assert trainer.session.measured is not None
        return trainer.session.measured.memory[0], trainer.forecast().peaks[0]

    ((row, forecast),) = planned(plan, pairs, torch.optim.Adam, work, model=layers)
    one = side * side
    assert max(m.weights for _, m in row) == 2 * 2 * one
    assert max(m.gradients for _, m in row) == 2 * one
    assert max(m.optimizer for _, m in row) == 0
    steps = 4 * 4
    assert max(m.offloaded for _, m in row) == (2 + 2 + 12) * 4 * one + steps
    assert forecast.weights == 2 * 2 * one


def test_a_plan_is_found_where_fp32_does_not_fit() -> None:
    model, sample = flat_network(), torch.empty(1, 1, 4, 4)
    before = [p.dtype for p in model.parameters()]
    budget = 17 * CELLS + 4096
    options: Any = {"ranks": 1, "machine": "cpu", "micro_batches": 1, "precision": "bf16"}
    found = gems.plan(model, sample, memory=budget, master_weights=True, **options)
    assert found.world == 1 and [p.dtype for p in model.parameters()] == before
    with pytest.raises(PlanError, match="master_weights is for weights in half"):
        gems.plan(model, sample, ranks=1, machine="cpu", master_weights=True)


# --- checkpoints ----------------------------------------------------------------------------------


def masters(trainer: Trainer) -> dict[str, Tensor]:
    state = trainer.session.optimizers[0].optimizer.state
    stepped = trainer.session.weights.stepped().items()
    return {n: state[p][MASTER].clone() for n, p in stepped if MASTER in state[p]}


PAIRS = (
    ("one device", "weights on the host"),
    ("weights on disk", "l2l"),
    ("zero=1", "zero=3"),
    ("zero=3, weights on the host", "copies"),
    ("copies", "zero=1, weights on disk"),
    ("optimizer on disk", "optimizer on the host"),
    ("zero=2, optimizer on disk", "zero=2, optimizer on disk"),
)


@pytest.mark.parametrize("names", PAIRS)
def test_training_goes_on_from_masters_under_any_plan(
    names: tuple[str, str], tmp_path: Path
) -> None:
    """Bit for bit: both plans of a pair add in one order."""
    (first, groups), (second, _) = (PLANS[name] for name in names)
    expected = Plain(network(), adam, "bf16", groups).result(data(4))

    def save(trainer: Trainer) -> Any:
        found = stepped(trainer, data(4)[:2])
        trainer.save(tmp_path / "saved")
        return found

    def load(trainer: Trainer) -> Any:
        trainer.load(tmp_path / "saved")
        return stepped(trainer, data(4)[2:]), trainer.state_dict()

    begun = planned(first, data(), work=save)[0]
    for steps, state in planned(second, data(), work=load, model=lambda: network(7)):
        same((begun + steps, state), expected)


def test_checkpoints_hold_fp32_whatever_weights_are_stored_in(tmp_path: Path) -> None:
    plain = Plain(network(), adam, "bf16", COPIES)
    plain.result(data())
    names = [n for n, p in plain.model.named_parameters() if p.requires_grad]
    wanted = dict(zip(names, plain.masters, strict=True))

    def save(trainer: Trainer) -> None:
        stepped(trainer, data())
        trainer.save(tmp_path / "half")

    planned(PLANS["zero=2"][0], data(), work=save)
    kinds = {x.dtype for x in gems.read_weights(tmp_path / "half").values()}
    assert kinds == {torch.float32, torch.int64}

    def full(trainer: Trainer) -> dict[str, Tensor]:
        trainer.load(tmp_path / "half")
        trainer.save(tmp_path / "full")
        return trainer.state_dict()

    one, _ = PLANS["one device"]
    (state,) = planned(one, data(), work=full, master_weights=False)
    for name, master in wanted.items():
        assert state[name].dtype == torch.float32 and torch.equal(state[name], master), name

    def back(trainer: Trainer) -> dict[str, Tensor]:
        trainer.load(tmp_path / "full")
        return masters(trainer)

    (found,) = planned(one, data(), work=back)
    assert found.keys() == {"a.weight", "a.bias", "b.weight", "b.bias", "head.weight", "head.bias"}
    for name, master in found.items():
        assert torch.equal(master, wanted[name]), name


@pytest.mark.parametrize("name", ("zero=3", "optimizer on disk"))
def test_a_state_dict_in_fp32_sets_masters(name: str) -> None:
    wanted = network(3).state_dict()

    def work(trainer: Trainer) -> Any:
        stepped(trainer, data(1))
        trainer.load_state_dict(wanted)
        return trainer.state_dict()

    for state in planned(PLANS[name][0], data(), work=work):
        for label, value in wanted.items():
            assert torch.equal(state[label], value.to(state[label].dtype)), label


# --- processes, and what is rejected --------------------------------------------------------------


def over_gloo(transport: Transport, names: Sequence[str]) -> Any:
    found = []
    for name in names:
        sample = torch.empty(2, 3, 8, 8)
        trainer = Trainer(
            network(), cross_entropy, adam, sample, PLANS[name][0], transport=transport,
            precision="bf16", master_weights=True,
        )  # fmt: skip
        found.append((stepped(trainer, data()), trainer.state_dict()))
    return found


def test_gloo_processes_have_the_same_bits() -> None:
    names = ("bidirectional", "zero=3")
    expected = [Plain(network(), adam, "bf16", PLANS[name][1]).result(data()) for name in names]
    for outcomes in spawn(2, over_gloo, names):
        for found, wanted in zip(outcomes, expected, strict=True):
            same(found, wanted)


def test_what_has_nothing_in_half_or_does_not_train_is_rejected() -> None:
    sample = torch.empty(1, 3, 8, 8)
    plan = Plan(stages=1)
    with pytest.raises(PlanError, match="precision='fp32' none of this model's are"):
        Trainer(network(), cross_entropy, adam, sample, plan, master_weights=True)
    with pytest.raises(PlanError, match="master_weights is for training"):
        Trainer(network(), sample=sample, plan=plan, precision="bf16", master_weights=True)


def test_a_model_that_came_in_half_gets_masters_too() -> None:
    with drawing(0):
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).bfloat16()
    plain = copy.deepcopy(model)
    shown = [nn.Parameter(p.detach().float()) for p in plain.parameters()]
    steps, x, y = momentum(shown), torch.randn(4, 4).bfloat16(), torch.randn(4, 2).bfloat16()
    with Trainer(model, mse_loss, momentum, x, Plan(stages=1), master_weights=True) as trainer:
        for _ in range(3):
            trainer.step(x, y)
            mse_loss(plain(x), y).backward()
            for p, master in zip(plain.parameters(), shown, strict=True):
                assert p.grad is not None
                master.grad, p.grad = p.grad.float(), None
            steps.step()
            for p, master in zip(plain.parameters(), shown, strict=True):
                p.data.copy_(master.data)
        for p, own in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(p, own)


def test_the_command_line_plans_with_masters(capsys: pytest.CaptureFixture[str]) -> None:
    some = ["plan", "--image-size", "32", "--model", "resnet-v2", "--num-layers", "11"]
    found = []
    for more in ([], ["--precision", "bf16", "--master-weights"]):
        assert main([*some, *more, "--split-size", "1"]) == 0
        found.append(capsys.readouterr().out.split()[-2:])
    assert found[0] != found[1], "weights of two bytes"
