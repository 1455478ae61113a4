"""What Python changes after a model was recorded: followed exactly, or rejected with the remedy."""

from __future__ import annotations

import random
import tempfile
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gems.errors import GemsError, PlanError, TraceError
from gems.plans.plan import Plan
from gems.torch.tracing.recordings import BOUND
from gems.torch.tracing.trace import trace
from gems.torch.trainer import Trainer
from tests.changes import ONE, PLANS, TWO, TWO_WAYS, assert_exact, data, plainly, planned
from tests.exact import same_state, sgd
from tests.worlds import spawn

Tensor = torch.Tensor
every_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
two_plans = pytest.mark.parametrize("plan", [TWO, TWO_WAYS], ids=["two", "gems"])
ALPHA = 1.0
SETTINGS: dict[str, Any] = {"scale": 1.0}
SAMPLE = torch.empty(2, 6, dtype=torch.float64)


class Net(nn.Module):
    """Anything between two layers, with all the state that a forward may look at."""

    factor = 1.0

    def __init__(self, kind: str = "attribute") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 4), nn.Linear(4, 5)
        self.act: nn.Module = nn.Tanh()
        self.kind, self.alpha, self.flag = kind, 1.0, True
        self.scales, self.options = [1.0, 2.0], {"a": {"b": 1.0}}
        self.config = SimpleNamespace(scale=1.0)
        self.function = torch.tanh
        self.scale = lambda x, by=self.config: x * by.scale
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.act(self.first(x))))

    def middle(self, x: Tensor) -> Tensor:
        if self.kind == "attribute":
            return x * self.alpha
        if self.kind == "branch":
            return torch.relu(x) if self.flag else x
        if self.kind == "list":
            return x * self.scales[1]
        if self.kind == "dict":
            return x * self.options["a"]["b"]
        if self.kind == "object":
            return x * self.config.scale
        if self.kind == "class":
            return x * self.factor
        if self.kind == "shadowed":
            return x * type(self).factor * self.factor
        if self.kind == "function":
            return self.function(x)
        if self.kind == "global":
            return x * ALPHA
        if self.kind == "global of a function":
            return scaled(x)
        if self.kind == "dropout":
            return F.dropout(x, self.alpha - 1.0)
        if self.kind == "missing":
            return x * getattr(self, "later", 1.0)
        return x


def scaled(x: Tensor) -> Tensor:
    return x * SETTINGS["scale"]


def set_alpha(model: Any, step: int) -> None:
    model.alpha = [1.0, 0.5, -0.25][step]


def set_global(model: Any, step: int) -> None:
    globals()["ALPHA"] = [1.0, 0.5, -0.25][step]


def set_setting(model: Any, step: int) -> None:
    SETTINGS["scale"] = [1.0, 0.5, -0.25][step]


def set_class(model: Any, step: int) -> None:
    Net.factor = [1.0, 0.5, -0.25][step]


CHANGES: dict[str, Any] = {
    "attribute": set_alpha,
    "branch": lambda m, i: setattr(m, "flag", i != 1),
    "list": lambda m, i: m.scales.__setitem__(1, 1.0 + i),
    "dict": lambda m, i: m.options["a"].update(b=1.0 + i),
    "object": lambda m, i: setattr(m.config, "scale", 1.0 + i),
    "class": set_class,
    "shadowed": lambda m, i: setattr(m, "factor", 1.0 + i) if i else None,
    "function": lambda m, i: setattr(m, "function", [torch.tanh, torch.relu, torch.sin][i]),
    "global": set_global,
    "global of a function": set_setting,
    "missing": lambda m, i: setattr(m, "later", 2.0) if i == 1 else None,
    "submodule": lambda m, i: setattr(m, "act", [nn.Tanh(), nn.ReLU(), nn.Sigmoid()][i]),
    "leaf": lambda m, i: setattr(m.act, "negative_slope", 0.1 * i),
}


SHARED = ("class", "global", "global of a function")  # by ranks that are threads
CASES = [
    pytest.param(kind, plan, id=f"{kind}-{name}")
    for kind in CHANGES
    for name, plan in PLANS.items()
    if name in (("one",) if kind in SHARED else ("two", "gems"))
    or (kind == "attribute" and name in ("one", "data"))
]


@pytest.mark.parametrize(("kind", "plan"), CASES)
def test_what_forward_read_is_read_again_when_python_changes_it(kind: str, plan: Plan) -> None:
    model = Net(kind)
    if kind == "leaf":
        model.act = nn.LeakyReLU(0.0)
    try:
        assert_exact(model, plan, CHANGES[kind])
    finally:
        set_class(None, 0)
        set_global(None, 0)
        set_setting(None, 0)


def test_a_probability_on_the_module_is_that_of_the_step() -> None:
    """Random numbers are keyed, so the oracle is a trainer that is made anew."""
    zero = planned(Net("dropout"), data(1), ONE, lambda m, i: setattr(m, "alpha", 2.0))
    assert (
        zero.losses
        == plainly(Net("dropout"), data(1), 2, lambda m, i: setattr(m, "alpha", 2.0)).losses
    )
    expected = planned(
        Net("dropout"), data(2), TWO, lambda m, i: setattr(m, "alpha", [1.0, 1.5][i])
    )
    never = planned(Net("dropout"), data(2), TWO)
    assert expected.losses[0] == never.losses[0] and expected.losses[1] != never.losses[1]


def test_what_is_not_read_does_not_record_again_and_what_was_there_before_is_used_again() -> None:
    def change(model: Any, step: int) -> None:
        model.epoch, model.alpha = step, 1.0 + step % 2

    def look(trainer: Trainer) -> None:
        assert len(trainer.session.runner.programs.recordings) == 2, "one for each alpha"

    planned(Net(), data(6), TWO, change, look)


def test_recordings_are_bounded() -> None:
    def change(model: Any, step: int) -> None:
        model.alpha = 1.0 + step / 100

    def look(trainer: Trainer) -> None:
        assert len(trainer.session.runner.programs.recordings) == BOUND
        cuts = trainer.session.runner.programs.recordings.values()
        assert trainer.session.state.partitions[0] is cuts[-1], "the newest is there"

    planned(Net(), data(BOUND + 4, 2), ONE, change, look)


# --- weights ------------------------------------------------------------------------------------


class Held(nn.Module):
    """Reaches its weights in other ways than by their names."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 4), nn.Linear(4, 5)
        self.a, self.b = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))
        self.register_buffer("c", torch.randn(4))
        self.double()
        self.how = how
        self.ws = [self.a, self.b, self.c]
        self.by_name = {"a": (self.a,), "b": {"b": self.b}}
        object.__setattr__(self, "again", self.b)
        b = self.b
        self.function = lambda x: x * b
        self.tail = Tail(self.last.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        if self.how == "list":
            x = torch.tanh(x * self.ws[0] + self.ws[2]) * self.ws[1]
        elif self.how == "dict":
            x = torch.tanh(x * self.by_name["a"][0]) * self.by_name["b"]["b"]
        elif self.how == "attribute":
            x = torch.tanh(x * self.a) * self.again
        elif self.how == "closure":
            x = torch.tanh(x * self.a) * self.function(x)
        elif self.how == "leaf":
            x = self.tail(torch.tanh(x * self.a))
        elif self.how == "keyword":
            x = torch.addcmul(input=x, tensor1=self.ws[0], tensor2=torch.tanh(x), value=0.5)
            x = torch.stack([x, x * self.b, self.ws[1].expand(x.shape)]).sum(0)
        return self.last(x)


class Tail(nn.Module):
    """Looks at values, so it runs as it is, with a weight of another module."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = [weight]

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight[0][0] if float(x.detach().sum()) > -1e9 else x).sin()


@two_plans
@pytest.mark.parametrize("how", ["list", "dict", "attribute", "closure", "leaf", "keyword"])
def test_a_weight_is_trained_however_forward_reaches_it(how: str, plan: Plan) -> None:
    """`self.ws = [self.a, self.b]`: under two stages b once never moved."""
    assert_exact(_copied(Held(how)), plan, made=data(3))


def _copied(model: Any) -> Any:
    """deepcopy does not copy what a function holds, so ranks get models of their own."""

    class Anew(Held):
        def __deepcopy__(self, memo: Any) -> Any:
            made = Held(self.how)
            made.load_state_dict(self.state_dict())
            return made

    model.__class__ = Anew
    return model


@every_plan
def test_a_weight_in_a_list_is_found_again_when_the_model_is_recorded_again(plan: Plan) -> None:
    made = [(x[: 4 - step], y[: 4 - step]) for step, (x, y) in enumerate(data(3))]
    assert_exact(_copied(Held("list")), plan, made=made)
    if plan is TWO:
        assert_exact(_copied(Held("closure")), plan, made=made)


def test_a_tensor_that_wants_a_gradient_and_is_no_parameter_is_refused() -> None:
    model: Any = Net("function")
    loose = torch.randn(4, dtype=torch.float64, requires_grad=True)
    model.function = lambda x: x * loose
    with pytest.raises(TraceError, match=r"not a parameter of the model.*ParameterList"):
        trace(model, SAMPLE)


@every_plan
def test_data_that_is_set_between_steps_counts(plan: Plan) -> None:
    def change(model: Any, step: int) -> None:
        if step == 1 and not model.last.weight.is_meta:
            model.last.weight.data = torch.ones(5, 4, dtype=torch.float64)

    assert_exact(Net(), plan, change)


@pytest.mark.parametrize("what", ["parameter", "module", "added"])
def test_a_weight_that_is_replaced_is_refused(what: str) -> None:
    def change(model: Any, step: int) -> None:
        if step and what == "parameter":
            model.last.weight = nn.Parameter(torch.ones(5, 4, dtype=torch.float64))
        elif step and what == "module":
            model.last = nn.Linear(4, 5).double()
        elif step:
            model.last.extra = nn.Parameter(torch.ones(5))

    with pytest.raises(GemsError, match=r"last.*after the Trainer took the model"):
        planned(Net(), data(), ONE, change)


class Clamps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = self.weight.data.clamp(-0.5, 0.5)
        return F.linear(x, self.weight)


def test_data_set_in_forward_is_set_in_every_forward_or_refused() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), Clamps(), nn.Linear(4, 5)).double()
    assert_exact(model, ONE)
    with pytest.raises(PlanError, match=r"changes the parameter 1\.weight in forward.*in flight"):
        planned(model, data(), TWO)
    with pytest.raises(PlanError, match=r"1\.weight is changed by"):
        planned(model, data(), TWO_WAYS)


# --- buffers ------------------------------------------------------------------------------------


class Average(nn.Module):
    """Assigns its buffer, as tutorials do."""

    def __init__(self, how: str = "assign") -> None:
        super().__init__()
        self.how = how
        self.register_buffer("ema", torch.zeros(4))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.ema.cos()
        if self.training:
            self.ema = 0.9 * self.ema + 0.1 * x.detach().mean(0)
            self.count += 1
            if self.how == "twice":
                self.ema = self.ema * 0.5
            if self.how == "whole" and float(x.detach().sum()) > 1e9:
                return x
        return y + self.ema


@pytest.mark.parametrize("how", ["assign", "twice", "whole"])
@pytest.mark.parametrize("plan", [ONE, TWO], ids=["one", "two"])
@pytest.mark.parametrize("recompute", ["never", "always"])
def test_a_buffer_that_forward_assigns(how: str, plan: Plan, recompute: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), Average(how), nn.Linear(4, 5)).double()
    plan = Plan(stages=plan.depth, micro_batches=2, schedule=plan.schedule, recompute=recompute)
    assert_exact(model, plan)


def test_an_assigned_buffer_is_refused_on_several_replicas() -> None:
    model = nn.Sequential(nn.Linear(6, 4), Average(), nn.Linear(4, 5)).double()
    with pytest.raises(PlanError, match=r"1\.ema is changed by .*assign_ema"):
        planned(model, data(), TWO_WAYS)


def test_a_buffer_assigned_between_steps_is_used() -> None:
    def change(model: Any, step: int) -> None:
        model[1].ema = torch.full((4,), float(step), dtype=torch.float64)

    model = nn.Sequential(nn.Linear(6, 4), Average(), nn.Linear(4, 5)).double()
    assert_exact(model, ONE, change)
    assert_exact(model, TWO, change)


# --- state that forward changes -----------------------------------------------------------------


class Counts(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.calls, self.seen, self.rng = how, 0, [], random.Random(0)
        self.generator = np.random.default_rng(0)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "threshold":
            self.calls += 1
            return x if self.calls > 3 else x * 2
        if self.how == "list":
            self.seen.append(x.detach())
            return x * len(self.seen)
        if self.how == "hidden":
            self.state = x.detach() + getattr(self, "state", 0)
            return x + self.state
        if self.how == "random":
            return x if random.random() < 0.5 else x * 2
        if self.how == "numpy":
            return x if np.random.rand() < 0.5 else x * 2
        if self.how == "own random":
            return x if self.rng.random() < 0.5 else x * 2
        return x if self.generator.random() < 0.5 else x * 2


@pytest.mark.parametrize(
    "how", ["threshold", "list", "hidden", "random", "numpy", "own random", "own numpy"]
)
def test_python_state_that_changes_in_forward_is_refused_and_left_as_it_was(how: str) -> None:
    model = nn.Sequential(nn.Linear(6, 6), Counts(how)).double()
    counts: Any = model[1]
    with pytest.raises(TraceError, match=r"draw with torch|register_buffer|depend on the first"):
        trace(model, SAMPLE)
    assert counts.calls == 0 and counts.seen == [] and not hasattr(counts, "state")


class MakesFiles(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        other = threading.Thread(target=random.random)  # a rank of another test, say
        other.start()
        other.join()
        with tempfile.NamedTemporaryFile():  # its name is drawn, from a generator of tempfile's own
            return x * 2


def test_draws_of_other_threads_and_of_the_library_are_not_taken_for_the_models() -> None:
    assert_exact(nn.Sequential(nn.Linear(6, 4), MakesFiles(), nn.Linear(4, 5)).double(), ONE)


class Looks(nn.Module):
    """Looks at values, so it runs as it is, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = x if float(x.detach().sum()) > 1e9 else x.sin()
        return x * 2 if self.calls > 3 else x


def test_a_module_that_runs_as_it_is_may_count_where_it_sees_all_samples() -> None:
    model = nn.Sequential(nn.Linear(6, 4), Looks(), nn.Linear(4, 5)).double()
    assert_exact(model, ONE)
    assert_exact(model, TWO)
    with pytest.raises(PlanError, match=r"changes Python state.*several ranks"):
        planned(model, data(), TWO_WAYS)
    with pytest.raises(PlanError, match=r"changes Python state.*recomputed"):
        planned(model, data(), Plan(stages=1, schedule="sequential", recompute="always"))


class Leaves(nn.Module):
    """Leaves something on itself for others."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.aux, self.shape = nn.Linear(6, 5), torch.zeros(()), ()

    def forward(self, x: Tensor) -> Tensor:
        self.shape = tuple(x.shape)
        y = self.linear(x)
        self.aux = y.square().mean()
        return y


def test_a_tensor_left_on_the_module_is_not_taken_for_the_steps() -> None:
    model = Leaves().double()
    trainer = Trainer(model, F.cross_entropy, lambda p: torch.optim.SGD(p, 0.1), SAMPLE, ONE)
    x, y = data(1)[0]
    trainer.step(x, y)
    assert model.shape == (2, 6)
    for use in (lambda: 1.0 + model.aux, lambda: x.sum() + model.aux, lambda: model.aux.item()):
        with pytest.raises(TraceError, match=r"Return it from forward"):
            use()

    trainer = Trainer(
        model, lambda a, b: F.cross_entropy(a, b) + model.aux, partial(torch.optim.SGD, lr=0.1),
        SAMPLE, ONE,
    )  # fmt: skip
    with pytest.raises(TraceError, match=r"Leaves\.aux is a tensor"):
        trainer.step(x, y)


# --- hooks --------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


def hooked(kind: str) -> Any:
    torch.manual_seed(0)
    model: Any = nn.Sequential(Block(6), Block(4), nn.Linear(4, 5)).double()
    block = model[1]
    if kind == "pre":
        block.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    elif kind == "forward":
        block.register_forward_hook(lambda m, args, out: out + args[0].mean())
    elif kind == "keywords":
        block.register_forward_hook(lambda m, a, k, out: out * 3, with_kwargs=True)
    elif kind == "always":
        block.register_forward_hook(lambda m, a, out: out * 3, always_call=True)
    elif kind == "backward":
        block.register_full_backward_hook(lambda m, gi, go: tuple(g * 2 for g in gi))
    elif kind == "backward pre":
        block.register_full_backward_pre_hook(lambda m, go: tuple(g * 2 for g in go))
    elif kind == "values":
        block.register_forward_hook(
            lambda m, a, out: out if float(out.detach().sum()) > 9e9 else -out
        )
    elif kind == "parameter":
        block.a.weight.register_hook(lambda g: g * 2)
    elif kind == "leaf":
        block.a.register_forward_hook(lambda m, a, out: out * 2)
    elif kind == "root":
        model.register_forward_hook(lambda m, a, out: out * 2)
    return model


@two_plans
@pytest.mark.parametrize(
    "kind",
    ["pre", "forward", "keywords", "always", "backward", "backward pre", "values", "leaf", "root"],
)
def test_hooks_of_modules(kind: str, plan: Plan) -> None:
    assert_exact(hooked(kind), plan)


def test_backward_hooks_of_the_model_itself_make_it_one_block() -> None:
    model = hooked("none")
    model.register_full_backward_hook(lambda m, gi, go: None)
    assert len(trace(model, SAMPLE).graph.blocks) == 1
    seen: list[Any] = []
    model.register_full_backward_hook(lambda m, gi, go: seen.append(go[0].shape))
    assert_exact(model, ONE)
    with pytest.raises(PlanError, match="stage"):
        planned(model, data(), TWO)


@two_plans
def test_hooks_that_come_and_go_between_steps(plan: Plan) -> None:
    handles: dict[int, Any] = {}

    def change(model: Any, step: int) -> None:
        if step == 1:
            handles[id(model)] = model[1].register_forward_hook(lambda m, a, out: out * 2)
        elif step == 2:
            handles.pop(id(model)).remove()

    assert_exact(hooked("none"), plan, change)


@pytest.mark.parametrize("how", ["list", "dict", "object", "counter"])
def test_a_hook_that_looks_at_features_sees_real_ones_in_every_forward(how: str) -> None:
    seen: list[Any] = []
    box = SimpleNamespace(last=None, all=[])
    count = 0

    def hook(m: Any, a: Any, out: Tensor) -> None:
        nonlocal count
        if how == "list":
            seen.append(out.detach().clone())
        elif how == "dict":
            features["x"] = [*features.get("x", ()), out.detach().clone()]
        elif how == "object":
            box.all.append(out.detach().clone())
        else:
            count += 1

    features: dict[str, Any] = {}
    model = hooked("none")
    model[1].register_forward_hook(hook)
    planned(model, data(2), ONE)
    found = {"list": seen, "dict": features.get("x", []), "object": box.all, "counter": [0] * count}
    assert len(found[how]) == 4, "two micro-batches in two steps"
    if how != "counter":
        other = hooked("none")
        expected: list[Any] = []
        other[1].register_forward_hook(lambda m, a, out: expected.append(out.detach().clone()))
        plainly(other, data(2), 2)
        assert all(
            torch.allclose(x, y, atol=1e-12) for x, y in zip(found[how], expected, strict=True)
        )


class TensorHook(nn.Module):
    def __init__(self, held: bool) -> None:
        super().__init__()
        self.linear, self.held = nn.Linear(4, 4), held

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        by = x.detach().cos()
        x.register_hook((lambda g: g * by) if self.held else (lambda g: g * 2))
        return x


@two_plans
@pytest.mark.parametrize("held", [False, True])
def test_hooks_of_tensors(held: bool, plan: Plan) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), TensorHook(held), nn.Linear(4, 5)).double()
    assert_exact(model, plan)


class HookedSkip(nn.Module):
    """A tensor with a hook that two later layers read."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 4), nn.Linear(4, 4), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x).tanh()
        if y.requires_grad:
            y.register_hook(lambda g: g / (1 + g.norm()))
        return self.c(self.b(y).tanh() + y)


@pytest.mark.parametrize("recompute", ["never", "always", [["a", "tanh", "c"]] * 9])
@pytest.mark.parametrize("stages", range(1, 6))
def test_a_hook_sees_all_of_a_gradient_wherever_stages_end(stages: int, recompute: Any) -> None:
    """Story: hook and tensor were on two stages, and what the third one sent back passed it by."""
    torch.manual_seed(0)
    recompute = recompute if isinstance(recompute, str) else recompute[:stages]
    plan = Plan(stages=stages, micro_batches=2, schedule="gpipe", recompute=recompute)
    assert_exact(HookedSkip().double(), plan)


def test_a_gradient_inside_of_forward_runs_as_it_is() -> None:
    class Energy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            (g,) = torch.autograd.grad(self.linear(x).square().sum(), x, create_graph=True)
            return g

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), Energy(), nn.Linear(4, 5)).double()
    assert_exact(model, TWO)


# --- what a recording leaves behind ---------------------------------------------------------------


def test_hooks_that_forward_registers_are_registered_once() -> None:
    """transformers installs hooks in its first forward; a recording once left them behind."""

    class Installs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.installed, self.seen = nn.Linear(6, 5), False, []

        def forward(self, x: Tensor) -> Tensor:
            if not self.installed:
                self.installed = True
                self.linear.register_forward_hook(lambda m, a, out: out * 2)
            return self.linear(x)

    torch.manual_seed(0)
    model = Installs().double()
    x = torch.randn(2, 6, dtype=torch.float64)
    expected = model.linear(x) * 2
    trace(model, SAMPLE)
    assert not model.installed and not model.linear._forward_hooks
    assert torch.equal(model(x), expected)


def test_a_step_that_fails_gives_assigned_buffers_back() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 4), Average(), nn.Linear(4, 5)).double()
    trainer = Trainer(model, F.cross_entropy, partial(torch.optim.SGD, lr=0.1), SAMPLE, ONE)
    x, y = data(1)[0]
    trainer.step(x, y)
    before = {name: t.clone() for name, t in trainer.state_dict().items()}
    with pytest.raises(GemsError, match="nan"):
        trainer.step(x * torch.nan, y)
    after = trainer.state_dict()
    assert all(torch.equal(after[name], t) for name, t in before.items())


@pytest.mark.parametrize(
    "plan",
    [
        Plan(stages=1, data=2, zero=3, schedule="sequential"),
        Plan(stages=1, schedule="sequential", offload="weights:host"),
    ],
    ids=["zero", "offload"],
)
def test_recording_again_what_looks_at_values_while_weights_have_no_memory(plan: Plan) -> None:
    """A segmentation fault once: the module was copied with released storage."""

    class Looking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.linear(x)
            return x.sin() if float(x.detach().sum()) < 1e9 else x

    torch.manual_seed(0)
    model = nn.Sequential(Looking(), nn.Linear(4, 5)).double()
    made = [(x[: 4 - 2 * step], y[: 4 - 2 * step]) for step, (x, y) in enumerate(data(2))]
    assert_exact(model, plan, made=made)


def change_everything(model: Any, step: int) -> None:
    model.alpha = 1.0 + step
    model.act = [nn.Tanh(), nn.ReLU(), nn.Sigmoid()][step]


def of_a_process(transport: Any) -> Any:
    model = Net()
    trainer = Trainer(model, F.cross_entropy, sgd, SAMPLE, TWO, transport=transport)
    found = []
    for step, (x, y) in enumerate(data()):
        change_everything(model, step)
        found.append(trainer.step(x, y).loss)
    return found, trainer.state_dict()


def test_ranks_that_are_processes_follow_changes_too() -> None:
    expected = plainly(Net(), data(), 2, change_everything)
    for losses, state in spawn(2, of_a_process):
        assert torch.allclose(torch.tensor(losses), torch.tensor(expected.losses), atol=1e-10)
        same_state(state, expected.state)


def test_ranks_whose_models_were_changed_differently_are_told() -> None:
    ranks: dict[int, int] = {}

    def change(model: Any, step: int) -> None:
        ranks.setdefault(id(model), len(ranks))
        model.alpha = 1.0 + step * ranks[id(model)]

    with pytest.raises(GemsError, match="different models"):
        planned(Net(), data(), TWO, change)
