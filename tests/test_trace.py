"""Recording a model: what is a block, what stays the user's, and what is refused."""

from __future__ import annotations

import copy
import logging
import random
import threading
from collections import OrderedDict, namedtuple
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import checkpoint

from gems.errors import PlanError, TraceError
from gems.model.graph import crossings
from gems.plans.plan import Plan
from gems.schedule.action import parse
from gems.schedule.lower.passes import lower
from gems.torch.runtime.codegen import write
from gems.torch.tensors.rng import Draws
from gems.torch.tracing.trace import trace
from gems.torch.trainer import Trainer
from gems.transport.threads import run
from tests import networks
from tests.exact import assert_equal, batches, plainly, planned, same_state, sgd

Tensor = torch.Tensor
IMAGE = torch.empty(2, 3, 8, 8, dtype=torch.float64)


def data(steps: int = 2, samples: int = 4) -> list[Any]:
    return batches((samples, 3, 8, 8), 5, steps, torch.float64)


class Net(nn.Module):
    """Anything between a first convolution and a last linear layer."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.middle = middle
        self.last = nn.Linear(4, 5)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)).mean((2, 3)))


TWO = Plan(stages=2, micro_batches=2, schedule="gpipe")
TWO_WAYS = Plan(stages=2, replications=1, schedule="gems")
SPLIT = Plan(stages=2, micro_batches=2, schedule="zero-bubble")


def assert_exact(model: nn.Module, plan: Plan, **options: Any) -> None:
    assert_equal(planned(model, data(), plan, **options), plainly(model, data(), plan.total))


# --- the graph --------------------------------------------------------------------------------


def draws() -> Draws:
    return Draws(0, torch.device("cpu"))


def test_blocks_are_named_as_the_model_names_them_and_the_model_stays_as_it_was() -> None:
    model = Net(nn.Sequential(nn.BatchNorm2d(4), nn.ReLU()))
    before = {name: (id(t), t.clone()) for name, t in model.state_dict(keep_vars=True).items()}
    graph = trace(model, IMAGE).graph
    assert [b.name for b in graph.blocks] == ["first", "middle.0", "middle.1", "mean", "last"]
    assert [b.parameters for b in graph.blocks] == [
        ("first.weight", "first.bias"),
        ("middle.0.weight", "middle.0.bias"),
        (),
        (),
        ("last.weight", "last.bias"),
    ]
    assert graph.blocks[1].buffers == (
        "middle.0.running_mean",
        "middle.0.running_var",
        "middle.0.num_batches_tracked",
    )
    assert [w.name for w in (*graph.parameters, *graph.buffers)] == [
        *(name for name, _ in model.named_parameters()),
        *(name for name, _ in model.named_buffers()),
    ]
    assert graph.value["first"].shape == (2, 4, 8, 8)
    after = model.state_dict(keep_vars=True)
    assert list(after) == list(before)
    for name, tensor in after.items():
        assert id(tensor) == before[name][0] and torch.equal(tensor, before[name][1]), name


def test_a_module_used_twice_has_two_blocks_and_one_weight() -> None:
    shared = nn.Conv2d(4, 4, 3, padding=1)
    graph = trace(Net(nn.Sequential(shared, nn.ReLU(), shared)), IMAGE).graph
    names = [b.name for b in graph.blocks]
    assert names == ["first", "middle.0", "middle.1", "middle.0:2", "mean", "last"]
    assert [w.name for w in graph.parameters if "middle" in w.name] == [
        "middle.0.weight",
        "middle.0.bias",
    ]


def test_what_only_looks_at_shapes_is_not_a_value() -> None:
    class Shapes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            n, c = x.shape[:2]
            if x.size(2) > 4 and x.dtype.is_floating_point:
                x = x + x.new_ones(n, c, 1, 1)
            return x

    graph = trace(Net(Shapes()), IMAGE).graph
    block = graph.blocks[graph.index["middle.new_ones"]]
    assert graph.value["middle.new_ones"].grad is False
    assert [b.name for b in graph.blocks][1:3] == ["middle.new_ones", "middle.add"]
    assert block.writes == ("middle.new_ones",)


def run_stages(model: nn.Module, x: Tensor, parts: int) -> Any:
    """The model as recorded stages, run one after the other."""
    traced = trace(model, x)
    n = len(traced.graph.blocks)
    stage_of = [min(parts - 1, i * parts // n) for i in range(n)]
    crossing = crossings(traced.graph, stage_of)
    known = dict(zip(traced.graph.inputs, [x], strict=True))
    for stage in range(parts):
        calls = [c for i in range(n) if stage_of[i] == stage for c in traced.calls(i)]
        sent = [m for (a, _), names in crossing.items() if a == stage for m in names]
        sent += traced.graph.outputs if stage == parts - 1 else ()
        draws = Draws(0, torch.device("cpu"))
        program = write(traced.record, model, calls, tuple(dict.fromkeys(sent)), draws)
        results = program.run(*(known[name] for name in program.inputs))
        known |= dict(zip(program.outputs, results, strict=True))
    return known[traced.graph.outputs[0]]


@pytest.mark.parametrize("shape", [(1, 3, 16, 16), (3, 3, 16, 16), (2, 3, 21, 13)])
@pytest.mark.parametrize("training", [True, False])
def test_another_batch_another_image_size_and_eval_are_recorded_anew(
    shape: tuple[int, ...], training: bool
) -> None:
    torch.manual_seed(0)
    model = networks.build("unet", width=2, levels=3).double().train(training)
    plain = copy.deepcopy(model)
    x = torch.randn(shape, dtype=torch.float64)
    assert torch.equal(run_stages(model, x, 3), plain(x))
    same_state(model.state_dict(), plain.state_dict(), 0.0)


# --- inputs and outputs of any form -----------------------------------------------------------


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 4), nn.Linear(2, 4)
        self.ends = nn.ModuleDict({"a": nn.Linear(4, 5), "b": nn.Linear(4, 1)})
        self.temperature = nn.Parameter(torch.tensor([2.0]))

    def forward(self, left: Tensor, right: Tensor, scale: float = 1.0) -> dict[str, Any]:
        x = self.left(left) * scale + self.right(right)
        found = {name: end(x) for name, end in self.ends.items()}
        return {"found": found, "temperature": self.temperature, "kind": "both"}


def structured_loss(output: Any, target: Any) -> Tensor:
    assert output["kind"] == "both"
    first = F.cross_entropy(output["found"]["a"] / output["temperature"], target["class"])
    return first + output["found"]["b"].squeeze(1).sub(target["value"]).square().mean()


@pytest.mark.parametrize("plan", [TWO, TWO_WAYS, SPLIT], ids=["gpipe", "gems", "zero-bubble"])
def test_dicts_in_and_out_targets_that_are_dicts_and_a_parameter_returned(plan: Plan) -> None:
    torch.manual_seed(0)
    model = Structured().double()
    made = [
        (
            {
                "left": torch.randn(5, 3, dtype=torch.float64),
                "right": torch.randn(5, 2, dtype=torch.float64),
            },
            {"class": torch.randint(5, (5,)), "value": torch.randn(5, dtype=torch.float64)},
        )
        for _ in range(2)
    ]
    assert_equal(
        planned(model, made, plan, structured_loss),
        plainly(model, made, plan.total, structured_loss),
    )


Pair = namedtuple("Pair", "x y")


class Containers(nn.Module):
    """Values travel in containers, and weights are in lists."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([torch.ones(1), torch.full((1,), 2.0)])
        self.offsets = nn.ParameterDict({"up": torch.zeros(1)})
        self.add = Added()

    def forward(self, x: Tensor) -> Tensor:
        largest = torch.max(x, dim=1, keepdim=True)
        pair = Pair(x * self.scales[0], largest.values * self.scales[1])
        return self.add(OrderedDict(pair=pair, more=[self.offsets["up"]]))


class Added(nn.Module):
    """Looks at values, so it is one block, which takes all of its arguments as they are."""

    def forward(self, given: Any) -> Tensor:
        x, y = given["pair"]
        return x + (y if float(x.detach().sum()) > -1e9 else 0) + given["more"][0]


def test_containers_of_values_reach_a_module_as_they_are() -> None:
    assert_exact(Net(Containers()), TWO)


# --- what cannot be seen through --------------------------------------------------------------


class Choosy(nn.Module):
    """What runs depends on the numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if x.detach().mean() > 0 else self.b(x)


@pytest.mark.parametrize("plan", [TWO, TWO_WAYS, SPLIT], ids=["gpipe", "gems", "zero-bubble"])
def test_a_module_that_looks_at_values_is_one_block_and_trains_exactly(plan: Plan) -> None:
    model = Net(Choosy())
    traced = trace(model, IMAGE)
    assert [b.name for b in traced.graph.blocks] == ["first", "middle", "mean", "last"]
    assert traced.record.leaves == ("middle",)
    assert_exact(model, plan)


def test_a_model_that_looks_at_values_itself_is_one_block(caplog: Any) -> None:
    class Top(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) if x.sum() > 0 else self.layer(-x)

    with caplog.at_level("WARNING"):
        graph = trace(Top(), torch.empty(2, 3)).graph
    assert [b.name for b in graph.blocks] == ["Top"]
    assert "looks at the values" in caplog.text and "nn.Sequential or as a list" in caplog.text
    model, made = Top().double(), batches((4, 3), 5, 2, torch.float64)
    one = Plan(stages=1, micro_batches=2, schedule="sequential")
    assert_equal(planned(model, made, one), plainly(model, made, 2))
    with pytest.raises(PlanError, match=r"2 stages, but Top runs as one block"):
        planned(model, made, TWO)


class TopChoosy(nn.Module):
    """A stage that cannot be recorded inside, with running statistics."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x))
        return x if x.detach().mean() > 10 else x.relu()


def stages() -> list[nn.Module]:
    torch.manual_seed(0)
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))
    return [TopChoosy(3).double(), TopChoosy(4).double(), head.double()]


@pytest.mark.parametrize("form", [nn.Sequential, list], ids=["nn.Sequential", "list"])
def test_what_cannot_be_recorded_can_be_given_as_stages(form: Any) -> None:
    parts = stages()
    plan = Plan(stages=3, micro_batches=2, schedule="1f1b")
    expected = plainly(nn.Sequential(*parts), data(), 2)
    given = form(*parts) if form is nn.Sequential else form(parts)
    if form is list:
        assert [b.name for b in trace(given, IMAGE).graph.blocks] == ["0", "1", "2"]
    assert_equal(planned(given, data(), plan), expected)


def test_a_list_of_stages_keeps_its_running_statistics_in_both_directions() -> None:
    """They are taken whole but could be recorded, so it is known how often each norm runs."""
    torch.manual_seed(0)

    def one(channels: int) -> nn.Module:
        conv = nn.Conv2d(channels, 4, 3, padding=1)
        return nn.Sequential(conv, nn.BatchNorm2d(4), nn.ReLU())

    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))
    parts = [one(3).double(), one(4).double(), head.double()]
    plan = Plan(stages=3, replications=2, schedule="gems")
    expected = plainly(nn.Sequential(*parts), data(), 4)
    assert_equal(planned(parts, data(), plan), expected)


def test_statistics_inside_of_what_looks_at_values_are_refused_on_two_ranks() -> None:
    plan = Plan(stages=3, replications=1, schedule="gems")
    with pytest.raises(PlanError, match=r"0\.norm\..* is changed by 0 on ranks \(0, 2\)"):
        planned(stages(), data(1), plan)


def test_a_list_of_something_else_is_refused() -> None:
    with pytest.raises(TraceError, match="one per stage; got"):
        trace([nn.Linear(2, 2), "head"], torch.empty(1, 2))


class Rolls(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.conv, self.runs = how, nn.Conv2d(4, 4, 1), 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        if self.how == "branch":
            return self.conv(x) if self.runs % 2 else x
        return x * (random.random() if self.how == "number" else self.runs)


@pytest.mark.parametrize("how", ["branch", "number", "memory"])
def test_a_forward_that_rolls_pythons_dice_is_refused(how: str) -> None:
    with pytest.raises(TraceError, match=r"draw with torch instead|register_buffer"):
        trace(Net(Rolls(how)), IMAGE, twice=True)


def test_a_wrong_input_is_blamed_on_the_layer_that_does_not_take_it() -> None:
    with pytest.raises(TraceError, match="first does not take its input"):
        trace(Net(nn.Identity()), torch.empty(1, 7, 8, 8, dtype=torch.float64))


def test_a_generator_of_the_models_own_is_refused() -> None:
    class Noisy(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.rand(3, generator=torch.Generator().manual_seed(1))

    with pytest.raises(TraceError, match=r"rand draws from a torch.Generator of the model's own"):
        trace(Noisy(), torch.empty(2, 3))


def test_an_output_without_tensors_is_refused() -> None:
    class Nothing(nn.Module):
        def forward(self, x: Tensor) -> str:
            return "nothing"

    with pytest.raises(TraceError, match="no tensor was found"):
        trace(Nothing(), torch.empty(1))


# --- regions, functions, modes ----------------------------------------------------------------


class Region(nn.Module):
    def __init__(self, reentrant: bool, norm: bool = False) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()]
        self.inner = nn.Sequential(*layers, nn.BatchNorm2d(4) if norm else nn.Conv2d(4, 4, 1))
        self.reentrant, self.runs, self.used = reentrant, 0, True
        self.inner[0].register_forward_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.runs += 1

    def forward(self, x: Tensor) -> Tensor:
        if not self.used:
            return self.inner(x)
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_region_is_one_block_that_saves_its_input_and_runs_twice(
    reentrant: bool,
) -> None:
    model = Net(Region(reentrant))
    graph = trace(model, IMAGE).graph
    assert [b.name for b in graph.blocks] == ["first", "middle.inner.0", "mean", "last"]
    model.middle.runs = 0
    traced = trace(model, IMAGE)
    program = write(traced.record, model, traced.record.calls, traced.graph.outputs, draws())
    assert "_checkpoint(region0" in program.source
    model.middle.runs = 0
    (y,) = program.run(torch.randn(2, 3, 8, 8, dtype=torch.float64))
    assert model.middle.runs == 1
    y.sum().backward()
    assert model.middle.runs == 2, "once forward, once again in backward"


@pytest.mark.parametrize("plan", [TWO, TWO_WAYS, SPLIT], ids=["gpipe", "gems", "zero-bubble"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_region_trains_exactly(reentrant: bool, plan: Plan) -> None:
    model = Net(nn.Sequential(Region(reentrant), nn.ReLU(), Region(reentrant)))
    assert_exact(model, plan)


def test_weight_gradients_of_a_region_are_not_put_off() -> None:
    """They would keep the very activations that the region was there not to keep."""
    model, asked = Net(Region(False)), []
    traced = trace(model, IMAGE)
    outputs = traced.graph.outputs
    write(traced.record, model, traced.record.calls, outputs, draws(), asked.append)
    assert asked == [model.first, model.last]


@pytest.mark.parametrize(
    "plan",
    [TWO, TWO_WAYS, Plan(stages=2, micro_batches=2)],
    ids=["gpipe", "gems", "1f1b"],
)
def test_recomputing_a_region_does_not_update_running_statistics_again(plan: Plan) -> None:
    """In plain PyTorch it does, in an order that would depend on the plan: so here it does not.
    The reference is therefore the model without the region."""
    model = Net(Region(False, norm=True))
    found = planned(model, data(), plan)
    model.middle.used = False
    assert_equal(found, plainly(model, data(), plan.total))


def test_dropout_in_a_region_is_the_same_when_it_is_recomputed() -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Conv2d(4, 4, 1), nn.Dropout(0.5), nn.Conv2d(4, 4, 1))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False) if self.used else self.inner(x)

        used = True

    model = Net(Dropping())
    found = planned(model, data(), TWO)
    model.middle.used = False
    assert_equal(found, planned(model, data(), TWO))


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return scale * x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 3 * ctx.scale * x**2 * gradient, None


class Cubed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Cube.apply(x, 0.5)


def test_a_custom_autograd_function_is_one_block() -> None:
    model = Net(Cubed())
    graph = trace(model, IMAGE).graph
    assert [b.name for b in graph.blocks][1] == "middle.Cube"
    assert_exact(model, TWO)


def test_an_apply_that_was_taken_hold_of_early_is_noted_as_well() -> None:
    """`f = Twice.apply` at the top of a file is how most people write it."""
    apply = Crooked.apply

    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return apply(self.linear(x))

    torch.manual_seed(0)
    model = nn.Sequential(Held(), nn.Linear(3, 5)).double()
    names = [call.name for call in trace(model, torch.empty(2, 3).double()).record.calls]
    assert names == ["0.linear", "0.Crooked", "1"]
    data = batches((4, 3), 5, 2, torch.float64)
    assert_equal(planned(model, data, Plan(stages=2, micro_batches=2)), plainly(model, data, 2))


class Crooked(torch.autograd.Function):
    """A gradient of its own: three times what it should be."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:  # type: ignore[override]
        return gradients[0] * 6


def test_a_recorded_function_no_longer_leads_to_the_recorder() -> None:
    """What was recorded under the patched `apply` was the patch: stages went on recording, and so
    kept every activation for ever."""
    model = Net(Cubed())
    traced = trace(model, IMAGE)
    calls = len(traced.record.calls)
    program = write(traced.record, model, traced.record.calls, traced.graph.outputs, draws())
    program.run(torch.randn(2, 3, 8, 8, dtype=torch.float64))
    assert len(traced.record.calls) == calls


class Average(nn.Module):
    """An average of what passes, kept in a buffer."""

    def __init__(self, how: str = "whole") -> None:
        super().__init__()
        self.how = how
        self.register_buffer("average", torch.zeros(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if self.how == "whole":
                self.average.mul_(0.9).add_(0.1 * x.mean((0, 2, 3)))
            else:
                self.average[1].lerp_(x.mean((0, 2, 3)), 0.1)
        return x - self.average.clone()[1][:, None, None]


@pytest.mark.parametrize("how", ["whole", "a view"])
def test_a_buffer_changed_in_forward_is_exact_where_one_rank_sees_all_samples(how: str) -> None:
    model = Net(Average(how))
    graph = trace(model, IMAGE).graph
    assert any("middle.average" in b.buffers for b in graph.blocks)
    if how == "a view":  # cut from its buffer it would be a copy
        assert "middle.getitem" in graph.index and "middle.lerp" not in graph.index
    assert_exact(model, Plan(stages=[["first", "middle"], ["mean", "last"]], micro_batches=2))


@pytest.mark.parametrize("how", ["whole", "a view"])
@pytest.mark.parametrize("plan", [TWO_WAYS, Plan(stages=1, micro_batches=1, data=2)])
def test_a_buffer_changed_in_forward_is_refused_where_two_ranks_would_have_it(
    how: str, plan: Plan
) -> None:
    with pytest.raises(PlanError, match=r"middle\.average is changed by"):
        planned(Net(Average(how)), data(), plan)


def test_a_buffer_changed_in_forward_is_refused_where_samples_come_out_of_order() -> None:
    """The middle of an odd number of stages has one rank, which sees both directions in turn, or
    in any order that somebody writes down."""
    stages = [["first"], ["middle"], ["mean", "last"]]
    plan = Plan(stages=stages, micro_batches=2, schedule="auto", bidirectional=True)
    assert_exact(Net(Average()), Plan(stages=stages, replications=1, schedule="gems"))
    model = Net(Average())
    edges = replace(plan, edges=((0, 1), (1, 2)))
    order = parse(
        """0: 0F0 2F1@1 2B1@1 0B0
           1: 1F1@1 1F0 1B1@1 1B0
           2: 0F1@1 2F0 2B0 0B1@1"""
    )
    with pytest.raises(PlanError, match=r"middle\.average is changed by"):
        planned(model, data(1), plan, schedule=lower(order, edges))


class ByHand(nn.Module):
    """Running statistics that no layer of torch.nn keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.mean, self.var, training=self.training)


def test_running_statistics_by_hand_are_seen() -> None:
    """The kernel changes them without a sign: two replicas would have drifted apart unseen."""
    assert_exact(Net(ByHand()), TWO)
    with pytest.raises(PlanError, match=r"middle\.mean is changed by"):
        planned(Net(ByHand()), data(1), TWO_WAYS)


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nn.InstanceNorm2d])
def test_statistics_that_two_stages_would_keep_are_refused(norm: Any) -> None:
    shared = norm(4, track_running_stats=True)
    model = Net(nn.Sequential(shared, nn.Conv2d(4, 4, 3, padding=1), shared))
    apart = Plan(stages=[["first", "middle.0"], ["middle.1", "middle.0:2", "mean", "last"]])
    with pytest.raises(PlanError, match=r"middle\.0\..* in stages \(0, 1\)"):
        planned(model, data(1), apart)
    together = [["first"], ["middle", "mean", "last"]]
    for plan in (Plan(stages=together), Plan(stages=together, replications=1, schedule="gems")):
        assert_exact(model, plan)


def test_a_users_own_autocast_region_stays_one() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 5)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                y = self.a(x)
                assert y.dtype == torch.bfloat16
            return self.b(y.float())

    made = batches((4, 6), 5, 2, torch.float32)
    traced = trace(Mixed(), made[0][0])
    assert traced.record.calls[0].autocast == (True, torch.bfloat16)
    assert traced.graph.value["a"].dtype == "bfloat16"
    assert_equal(planned(Mixed(), made, TWO), plainly(Mixed(), made, 2), 1e-6)


# --- what is kept for backward ----------------------------------------------------------------

STASHED = {
    "unet": ({"width": 2, "levels": 3}, (2, 3, 16, 16)),
    "resnet_v2": ({"depth": 11, "width": 4}, (2, 3, 16, 16)),
    "vit_base": (
        {"image_size": 16, "patch": 4, "width": 8, "depth": 2, "heads": 2},
        (2, 3, 16, 16),
    ),
    "convnext_tiny": ({"depths": (1, 1), "dims": (4, 8)}, (2, 3, 16, 16)),
    "efficientnet_b0": (
        {"groups": ((1, 4, 1, 1, 3), (6, 4, 2, 2, 3)), "stem": 4, "head": 8},
        (2, 3, 16, 16),
    ),
}


@pytest.mark.parametrize("name", STASHED)
@pytest.mark.parametrize("parts", [1, 3])
def test_predicted_stash_bytes_are_those_of_a_real_run(name: str, parts: int) -> None:
    options, shape = STASHED[name]
    model = networks.build(name, **options)
    x = torch.randn(shape)
    traced = trace(model, x)
    n = len(traced.graph.blocks)
    stage_of = [i * parts // n for i in range(n)]
    crossing = crossings(traced.graph, stage_of)
    weights = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    draws = Draws(0, torch.device("cpu"))
    known = {"input": x}
    for stage in range(parts):
        blocks = [i for i in range(n) if stage_of[i] == stage]
        calls = [c for i in blocks for c in traced.calls(i)]
        sent = [m for (a, _), names in crossing.items() if a == stage for m in names]
        sent += traced.graph.outputs if stage == parts - 1 else ()
        program = write(traced.record, model, calls, tuple(dict.fromkeys(sent)), draws)
        kept: dict[int, int] = {}

        def keep(t: Tensor, kept: dict[int, int] = kept) -> Tensor:
            if t.untyped_storage().data_ptr() not in weights:
                kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        arguments = [known[name].detach() for name in program.inputs]
        for name, argument in zip(program.inputs, arguments, strict=True):
            argument.requires_grad_(traced.graph.value[name].grad)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            results = program.run(*arguments)
        known |= dict(zip(program.outputs, results, strict=True))
        assert traced.graph.activations(blocks) == sum(kept.values()), f"stage {stage}"


# --- starting without the whole model ---------------------------------------------------------


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return networks.build("resnet_v2", depth=11, width=2, num_classes=5)


def initialised(plan: Plan) -> dict[str, Tensor]:
    """The state of a model from the meta device under a plan; ranks have only their own stages."""

    def work(transport: Any) -> dict[str, Tensor]:
        model = on_meta()
        trainer = Trainer(
            model, F.cross_entropy, sgd, torch.empty(1, 3, 8, 8), plan, transport=transport, seed=3
        )
        held = trainer.session.owned.on(transport.rank)
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            assert tensor.is_meta == (name not in held), name
        state = trainer.state_dict()
        if plan.ranks > 1:
            assert 0 < len(held) < len(trainer.session.owned.replica_groups), (
                "nobody has the whole model"
            )
        trainer.step(torch.ones(8, 3, 8, 8), torch.zeros(8, dtype=torch.long))
        assert all(t.is_meta == (n not in held) for n, t in model.named_parameters()), (
            "nor after a step"
        )
        return state

    return run(plan.world, work)[0]


def test_a_meta_model_is_initialised_by_whoever_has_it_and_the_same_under_any_plan() -> None:
    plans = (
        Plan(stages=1, micro_batches=4, schedule="sequential"),
        Plan(stages=3, micro_batches=4, schedule="1f1b"),
        Plan(stages=4, micro_batches=4, schedule="auto", placement="fold"),
    )
    first, *others = (initialised(plan) for plan in plans)
    for other in others:
        same_state(other, first, 0.0)
    assert first["stem.conv.weight"].std() > 0.01


def test_a_meta_model_that_does_not_say_how_to_start_is_refused() -> None:
    with torch.device("meta"):
        model = networks.build("vit_base", image_size=8, patch=4, width=8, depth=1, heads=2)
    with pytest.raises(PlanError, match=r"(?s)give initialize=.*the model itself"):
        Trainer(model, sample=torch.empty(1, 3, 8, 8), plan=Plan())


def test_initialize_sets_up_a_meta_model() -> None:
    with torch.device("meta"):
        model = networks.build("vit_base", image_size=8, patch=4, width=8, depth=1, heads=2)

    def ones(module: nn.Module) -> None:
        for p in module.parameters(recurse=False):
            p.fill_(1.0)

    trainer = Trainer(model, sample=torch.empty(1, 3, 8, 8), plan=Plan(), initialize=ones)
    assert all(bool((t == 1).all()) for t in trainer.state_dict().values())


# --- recording leaves no trace ----------------------------------------------------------------


def patched() -> tuple[Any, ...]:
    return (
        nn.Module.__call__,
        torch.autograd.Function.__dict__["apply"],
        torch_checkpoint._checkpoint_without_reentrant_generator,
    )


def test_recording_restores_what_it_patched_even_when_it_fails() -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("broken")

    before, model = patched(), Net(Broken())
    weights = list(model.parameters())
    with pytest.raises(TraceError, match="KeyError"):
        trace(model, IMAGE)
    assert patched() == before
    assert all(a is b for a, b in zip(model.parameters(), weights, strict=True))
    assert type(torch.zeros(1)) is Tensor
    norm = Net(nn.BatchNorm2d(4, momentum=None))
    trace(norm, IMAGE)
    assert norm.middle.momentum is None


def test_recording_in_threads_does_not_disturb_those_who_train() -> None:
    """Some threads record over and over, the others run and must not be seen."""
    before = patched()
    model, x = Net(nn.BatchNorm2d(4)), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    expected = copy.deepcopy(model)(x)
    names, wrong = [], []

    def records() -> None:
        for _ in range(5):
            names.append([b.name for b in trace(Net(nn.BatchNorm2d(4)), IMAGE).graph.blocks])

    def trains() -> None:
        for _ in range(30):
            if not torch.equal(copy.deepcopy(model)(x), expected):
                wrong.append(1)

    threads = [threading.Thread(target=work) for work in (records, records, trains, trains)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and names == [["first", "middle", "mean", "last"]] * 10
    assert patched() == before


class Transposes(nn.Module):
    """Changes a tensor in place by another view of it: no cell by itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        return y.view(x.shape).relu_().add_(y.transpose(2, 3))


def test_a_view_that_is_changed_in_place_stays_cell_by_cell_but_another_view_does_not() -> None:
    model = nn.Sequential(nn.InstanceNorm2d(2), nn.ReLU(inplace=True), Transposes())
    calls = trace(model, torch.randn(1, 2, 4, 4), leaves=("2",)).record.calls
    assert [(call.module, call.pointwise) for call in calls] == [
        ("0", False), ("1", True), ("2", False),
    ]  # fmt: skip


def test_what_is_too_small_for_a_pool_is_an_error_without_torchs_own_log() -> None:
    """Planning asks for smaller images until one fits; each printed a page of tracebacks."""
    seen, logger = [], logging.getLogger("torch._subclasses.fake_tensor")
    handler = logging.Handler()
    handler.emit = seen.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        with pytest.raises(TraceError, match="smaller than kernel size"):
            trace(nn.Sequential(nn.AvgPool3d(3)), torch.empty(1, 1, 2, 2, 2))
    finally:
        logger.removeHandler(handler)
    assert not seen and not logger.disabled
