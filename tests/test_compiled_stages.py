"""Stages that run compiled by torch.compile: the numbers of stages that do not, under all plans."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

from gems.errors import GemsError, PeerError, PlanError
from gems.plans.plan import Plan
from gems.torch.trainer import Trainer
from gems.transport.threads import run
from tests import test_zero
from tests.exact import assert_equal, batches, planned, same_state, sgd

Tensor = torch.Tensor
SAMPLE = torch.empty(2, 6, dtype=torch.float64)


class Net(nn.Module):
    """Calls to fuse before and after dropout, statistics, a change in place."""

    def __init__(self, p: float = 0.3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.act = nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(True)
        self.drop, self.head = nn.Dropout(p), nn.Linear(3, 5)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.act(self.norm(self.conv(x))))
        return self.head(x.mean((2, 3)).tanh() * 1.5)


class Counting:
    """A backend that counts what it compiles. Forward and backward are run as they are."""

    def __init__(self) -> None:
        self.graphs = 0
        backward = lambda graph, _: make_boxed_func(graph.forward)  # noqa: E731
        self.backend = aot_autograd(fw_compiler=self._forward, bw_compiler=backward)

    def _forward(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return make_boxed_func(graph.forward)

    def __call__(self, graph: Any, inputs: Any) -> Any:
        return self.backend(graph, inputs)


def images(steps: int = 2) -> list[Any]:
    return batches((4, 2, 6, 6), 5, steps, torch.float64)


def vectors(steps: int = 2) -> list[Any]:
    return batches((4, 6), 5, steps, torch.float64)


STREAMED = (("conv",), ("norm", "act", "drop", "mean", "tanh", "mul", "head"))
# Of the plan: how many graphs all ranks together compile, for one signature of inputs.
PLANS: dict[str, tuple[Plan, int]] = {
    "one rank": (Plan(stages=1, micro_batches=2), 2),
    "two stages": (Plan(stages=2, micro_batches=2), 2),
    "gems": (Plan(stages=2, schedule="gems", replications=1), 4),
    "copies, zero 3": (Plan(stages=1, micro_batches=1, data=2, zero=3), 4),
    "recomputed": (Plan(stages=2, micro_batches=2, recompute="always"), 4),
    "recomputed runs": (Plan(stages=1, micro_batches=2, recompute=["norm", "act", "drop"]), 3),
    "zero bubble": (Plan(stages=2, micro_batches=2, schedule="zero-bubble"), 2),
    "tiles": (Plan(stages=1, spatial=["1x2"], micro_batches=2), 2),
    "patches": (Plan(stages=STREAMED, stream=[(2, 2)], micro_batches=2), 2),
    "activations on the host": (
        Plan(stages=2, micro_batches=4, schedule="gpipe", offload=("activations:host",)), 1,
    ),
    "weights on the host": (Plan(stages=2, micro_batches=2, offload=("weights:host",)), 2),
    "2bw": (Plan(stages=2, micro_batches=2, schedule="2bw"), 2),
}  # fmt: skip


@pytest.mark.parametrize("plan", PLANS)
def test_compiled_stages_train_as_those_that_are_not(plan: str) -> None:
    """The same masks of dropout, the same running statistics. What is compiled is compiled once:
    a second step, and recomputation in backward but for its gradients, use it again."""
    chosen, graphs = PLANS[plan]
    counting = Counting()
    found = test_zero.planned(Net(), images(), chosen, compile={"backend": counting})
    expected = test_zero.planned(Net(), images(), chosen)
    assert found.losses == pytest.approx(expected.losses, rel=1e-10, nan_ok=True)
    same_state(found.state, expected.state)
    assert counting.graphs == graphs


def test_gradients_are_those_of_stages_that_are_not_compiled_after_a_short_batch() -> None:
    data = images(3)
    data[1] = (data[1][0][:3], data[1][1][:3])  # micro-batches of two samples and of one
    plan = Plan(stages=2, micro_batches=2)
    found = planned(Net(), data, plan, compile="aot_eager")
    assert_equal(found, planned(Net(), data, plan))


def test_predictions_between_steps_are_those_of_stages_that_are_not_compiled() -> None:
    plan, (batch, labels) = Plan(stages=1, micro_batches=1), images(1)[0]
    found = []
    for chosen in ("aot_eager", False):
        with Trainer(Net(), F.cross_entropy, sgd, batch, plan, compile=chosen) as trainer:
            for _ in range(2):
                trainer.step(batch, labels)
                found.append(trainer.predict(batch))
    assert torch.allclose(torch.stack(found[:2]), torch.stack(found[2:]), rtol=1e-10, atol=1e-12)


class Odd(nn.Module):
    """Changes in place through views, a region without gradients, a region that the model itself
    checkpoints, a layer used twice, a layer that looks at values."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.drop = nn.Linear(6, 6), nn.Linear(6, 5), nn.Dropout(0.3)
        self.looks = Looks()
        self.register_buffer("count", torch.zeros(()))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        x = torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)
        x.view(-1).mul_(2.0)
        x.add_(1.0).sigmoid_()
        with torch.no_grad():
            fixed = (x * 2).tanh()
        return self.b(self.looks(self.a(x).sin()) + fixed)

    def inner(self, x: Tensor) -> Tensor:
        return torch.tanh(self.drop(torch.sin(self.a(x)).cos())).exp()


class Looks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if float(x.detach().sum()) > -1e9 else x


def test_changes_in_place_regions_and_values_that_are_looked_at_are_exact() -> None:
    plan = Plan(stages=1, micro_batches=2)
    found = planned(Odd(), vectors(), plan, compile="aot_eager")
    assert_equal(found, planned(Odd(), vectors(), plan))


def test_low_precision_is_that_of_the_stage() -> None:
    model, data = Net(0.0).float(), [(x.float(), y) for x, y in images()]
    plan = Plan(stages=1, micro_batches=2)
    found = planned(model, data, plan, compile="aot_eager", precision="bf16")
    assert_equal(found, planned(model, data, plan, precision="bf16"), 0.02)


def test_inductor_compiles_a_stage() -> None:
    """Real kernels, forward and backward. They sum in another order."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Softplus()).double()
    plan = Plan(stages=1, micro_batches=1)
    found = planned(model, vectors(), plan, compile=True)
    assert_equal(found, planned(model, vectors(), plan))


# --- what is said ---------------------------------------------------------------------------------


def test_what_is_not_compiled_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "gems"):
        for name in ("tiles", "zero bubble", "patches"):
            test_zero.planned(Net(), images(1) * 2, PLANS[name][0], compile="eager")
        test_zero.planned(
            Net(), [(images(1)[0][0][:1], torch.ones(1).long())], Plan(), compile="eager"
        )
    text = caplog.text
    assert "1 norms of one sample" in text, "torch's own is wrong for odd strides: test_strides.py"
    assert "5 on tiles or patches" in text and "1 defer weight gradients" in text
    assert text.count("stage 0 runs by patches and is not compiled") == 1


def test_a_stage_that_cannot_be_compiled_names_itself_and_the_remedy() -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise ArithmeticError("no such kernel")

    with pytest.raises(
        GemsError, match=r"(?s)stage 0 cannot be compiled.*no such kernel.*compile=F"
    ):
        planned(Net(), images(1), Plan(), compile={"backend": broken})
    late = aot_autograd(fw_compiler=lambda g, _: make_boxed_func(g.forward), bw_compiler=broken)
    with pytest.raises(ArithmeticError) as error:
        planned(Net(), images(1), Plan(), compile={"backend": late})
    assert "in stage 0, which runs compiled" in error.value.__notes__[0]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("inductr", "backend 'inductr'; torch has"),
        (3, "give True, a backend's name, or a dict"),
        ({"kernels": 1}, r"compile has \['kernels'\]"),
        ({"mode": "reduce-overhead"}, "records CUDA graphs"),
        ({"options": {"triton.cudagraphs": True}}, "records CUDA graphs"),
    ],
)
def test_options_that_cannot_be_are_rejected(asked: Any, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        Trainer(Odd(), sample=SAMPLE, plan=Plan(), compile=asked)


def test_ranks_that_compile_differently_are_told() -> None:
    def work(transport: Any) -> None:
        chosen = (False, "aot_eager")[transport.rank]
        plan = Plan(stages=2, micro_batches=2)
        model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 5)).double()
        Trainer(model, sample=SAMPLE, plan=plan, transport=transport, compile=chosen)

    with pytest.raises(PeerError, match=r"compile \(rank 0: off; rank 1: backend=aot_eager\)"):
        run(2, work)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 5), nn.Linear(6, 5)
        self.double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.body(x))
        return self.a(x).sin(), self.b(x).cos()


@pytest.mark.parametrize("plan", [Plan(), Plan(stages=2, micro_batches=2)], ids=["one", "two"])
def test_weights_that_the_loss_does_not_depend_on_get_no_zeros(plan: Plan) -> None:
    """Compiled backwards take zeros for a gradient that is absent; weight decay would act."""
    with pytest.raises(GemsError, match=r"does not depend on .*b\.weight, b\.bias.*compile=False"):
        planned(
            TwoHeads(), vectors(1), plan, lambda y, t: F.cross_entropy(y[0], t), compile="aot_eager"
        )


# --- models that came compiled --------------------------------------------------------------------


@pytest.mark.parametrize("how", ["torch.compile", "module.compile", "inside"])
def test_a_model_that_came_compiled_is_recorded_inside_and_that_is_said(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Story: it was taken as one block, which no plan of two stages could have, or lost its
    compilation without a word."""
    plain: Any = nn.Sequential(nn.Linear(6, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 5))).double()
    given = copy.deepcopy(plain)
    if how == "torch.compile":
        given = torch.compile(given, backend="aot_eager")
    elif how == "inside":
        given[1] = torch.compile(given[1], backend="aot_eager")
    else:
        given.compile(backend="aot_eager")
    plan, (x, y) = Plan(stages=2, ranks=1, micro_batches=2, schedule="sequential"), vectors()[0]
    with Trainer(given, F.cross_entropy, sgd, SAMPLE, plan) as trainer:
        losses = [trainer.step(x, y).loss for _ in range(3)]
        assert len(trainer.session.runner.programs.recordings) == 1
    with Trainer(plain, F.cross_entropy, sgd, SAMPLE, plan) as trainer:
        assert losses == [trainer.step(x, y).loss for _ in range(3)]
    name = {"inside": "1"}.get(how, "the model itself")
    assert caplog.text.count(f"{name} came compiled by torch.compile, which stages do not use") == 1
    assert "Trainer(compile=True)" in caplog.text
    caplog.clear()
    with Trainer(given, F.cross_entropy, sgd, SAMPLE, plan, compile="aot_eager"):
        assert "came compiled" not in caplog.text
