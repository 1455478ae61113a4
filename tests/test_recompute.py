"""Activation checkpointing: results stay exact, and bytes and seconds are as predicted."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from gems.cli.main import main
from gems.draw.svg import svg
from gems.draw.text import text
from gems.errors import PlanError, ScheduleError
from gems.files import from_json, to_json
from gems.hardware import Link, machine
from gems.model.costs import Cost, Costs, Edge, unit
from gems.model.graph import Block, Graph, Value
from gems.planner.compile import CompiledPlan, compile_plan
from gems.planner.explain import explain
from gems.planner.recompute_selection import fitted
from gems.planner.request import Request
from gems.planner.search import search
from gems.plans.plan import Plan
from gems.plans.recompute import parse_recompute
from gems.plans.residency import ADAM
from gems.predict.recompute_cost import (
    Footprint,
    footprint,
    names_of,
    recompute_seconds,
    recomputed_blocks,
    runs,
)
from gems.predict.simulate import simulate
from gems.schedule import greedy
from gems.schedule.action import Kind, Schedule, parse
from gems.schedule.build import build, lowered
from gems.schedule.validate import check
from gems.torch.runtime.begin_step import begin_step
from gems.torch.runtime.microbatch import split
from gems.torch.tensors.storage import storage_of
from gems.torch.tracing.trace import trace
from gems.torch.trainer import Trainer
from gems.transport.protocol import Transport
from gems.transport.threads import Local, run
from tests.exact import Outcome, alone, assert_equal, batches, join, plainly, planned, sgd, trained
from tests.test_generated import LAYERS, RANDOM, Generated, loss, networks, plans, sizes, some_data
from tests.test_spatial_plans import PLANS, all_but, classifier, labelled
from tests.worlds import spawn

Tensor = torch.Tensor

# --- the plan -------------------------------------------------------------------------------------


def test_recompute_is_for_all_stages_or_for_each() -> None:
    assert Plan(stages=2).recompute_by_stage == ("never", "never")
    assert Plan(stages=2, recompute=[]) == Plan(stages=2, recompute="never") == Plan(stages=2)
    named = Plan(stages=2, recompute=["layer1", "head"])
    assert named.recompute_by_stage == (("layer1", "head"),) * 2
    each = Plan(stages=3, recompute=["always", ["layer2"], "never"])
    assert each.recompute_by_stage == ("always", ("layer2",), "never")
    assert [each.recomputes(s, 0) for s in range(3)] == [True, False, False]
    assert from_json(Plan, to_json(each)) == each


def test_all_but_the_last_micro_batch_of_each_copy() -> None:
    plan = Plan(stages=2, micro_batches=3, data=2, recompute="except_last")
    again = [plan.recomputes(0, i) for i in range(plan.total)]
    assert again == [True, True, False, True, True, False]
    assert not Plan(recompute="except_last").recomputes(0, 0), "the only one is the last"


@pytest.mark.parametrize(
    ("recompute", "fault"),
    [
        (
            "some",
            "recompute 'some' is unknown; choose one of never, always, except_last, auto",
        ),
        (("always", "never", "never"), "recompute has 3 entries for 2 stages; give one each"),
        (("always", "layer2"), "stage 1 is 'layer2'; choose one of never, .* put module names"),
    ],
)
def test_an_unknown_recompute_is_rejected(recompute: Any, fault: str) -> None:
    with pytest.raises(PlanError, match=fault):
        Plan(stages=2, recompute=recompute)


@pytest.mark.parametrize(
    ("written", "recompute"),
    [
        ("always", "always"),
        ("never", "never"),
        ("always,never", ("always", "never")),
        ("a.b,c", ("a.b", "c")),
        ("always/a,c/never", ("always", ("a", "c"), "never")),
        ("/never", (("",), "never")),
    ],
)
def test_on_the_command_line(written: str, recompute: Any) -> None:
    assert parse_recompute(written) == recompute


def test_the_command_line_draws_it_and_explains_what_cannot_be(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["simulate", "--stages", "2", "--parts", "2", "--recompute", "always"]) == 0
    assert "F0 F1 R0 .. .. B0--- R1 .. B1---" in capsys.readouterr().out
    assert main(["check", "--stages", "2", "--parts", "2", "--recompute", "except_last"]) == 0
    assert "no deadlock" in capsys.readouterr().out
    named = ["--model", "resnet-v1", "--num-layers", "8", "--recompute", "stem,blok1_1"]
    assert main(["check", "--stages", "2", *named]) == 1
    told = capsys.readouterr().err
    assert "recompute: no block of the model is called 'blok1_1'; did you mean block1_1" in told
    assert main(["check", "--recompute", "auto"]) == 1
    assert "written out first, which takes a model and a memory budget" in capsys.readouterr().err


# --- the schedule ---------------------------------------------------------------------------------


def test_1f1b_of_three_stages_and_four_micro_batches_recomputes_right_before_backward() -> None:
    plan = Plan(stages=3, micro_batches=4, recompute="always")
    assert build(plan) == parse(
        """
        0: 0F0 0F1 0F2 0R0 0B0 0F3 0R1 0B1 0R2 0B2 0R3 0B3
        1: 1F0 1F1 1R0 1B0 1F2 1R1 1B1 1F3 1R2 1B2 1R3 1B3
        2: 2F0 2R0 2B0 2F1 2R1 2B1 2F2 2R2 2B2 2F3 2R3 2B3
        """
    )
    assert parse(str(lowered(plan))) == lowered(plan)


def test_gpipe_except_the_last_and_both_ways() -> None:
    gpipe = Plan(stages=2, micro_batches=3, schedule="gpipe", recompute=("except_last", "never"))
    assert build(gpipe) == parse("0: 0F0 0F1 0F2 0B2 0R1 0B1 0R0 0B0\n1: 1F0 1F1 1F2 1B2 1B1 1B0\n")
    gems = Plan(stages=2, schedule="gems", replications=1, recompute=("always", "never"))
    assert build(gems) == parse("0: 0F0 0R0 0B0 1F1@1 1B1@1\n1: 1F0 1B0 0F1@1 0R1@1 0B1@1\n")


def changed(plan: Plan, old: str, new: str) -> Schedule:
    written = str(build(plan))
    assert old in written
    return parse(written.replace(old, new))


def test_a_schedule_that_recomputes_wrongly_is_explained() -> None:
    plan = Plan(stages=2, micro_batches=2, recompute=("always", "never"))
    assert check(build(plan), plan) == []
    assert check(changed(plan, "0R0 ", ""), plan) == [
        "the activations of stage 0, micro-batch 0 are computed 0 times"
    ]
    assert check(changed(plan, "0R0", "0R0 0R0"), plan) == [
        "the activations of stage 0, micro-batch 0 are computed 2 times"
    ]
    assert check(changed(plan, "1B0", "1R0 1B0"), plan) == [
        "1R0 has nothing to do: by the plan, stage 1 keeps it all"
    ]
    late = check(changed(plan, "0R0 0B0", "0B0 0R0"), plan)
    assert late == ["rank 0, step 2: 0B0 waits forever for 0R0"]
    early = check(changed(plan, "0F0 0F1 0R0", "0R0 0F0 0F1"), plan)
    assert early[0] == "rank 0, step 0: 0R0 waits forever for 0F0"


@settings(max_examples=settings().max_examples // 2)
@given(st.data(), plans())
def test_any_order_that_recomputes_is_proven_and_no_shorter_than_the_bound(
    data: Any, plan: Plan
) -> None:
    words = st.sampled_from(("always", "except_last", "never"))
    recompute = tuple(data.draw(words) for _ in range(plan.depth))
    plan = replace(plan, recompute=recompute, data=1)
    seconds = st.integers(1, 5)
    items = [
        Cost(*(data.draw(seconds) for _ in range(3)), activations=9) for _ in range(plan.depth)
    ]
    costs = Costs(tuple(items), tuple(Edge(s, s + 1, 2, 2) for s in range(plan.depth - 1)))
    schedule = build(plan, costs)
    assert check(schedule, plan) == []
    again = Counter(a.stage for _, a in schedule if a.kind is Kind.RECOMPUTE)
    for stage in range(plan.depth):
        wanted = {"always": plan.micro_batches, "except_last": plan.micro_batches - 1, "never": 0}
        assert again[stage] == wanted[recompute[stage]]
    if len(set(plan.places[0])) == plan.depth:
        found = simulate(schedule, plan, costs).seconds
        assert found >= greedy.least(plan, costs) * (1 - 1e-9)


def test_a_sample_that_keeps_all_on_a_rank_does_not_hold_up_those_that_recompute_there() -> None:
    options: dict[str, Any] = {
        "stages": 2,
        "micro_batches": 4,
        "schedule": "auto",
        "max_in_flight": 1,
    }
    plan = Plan(**options, bidirectional=True, recompute=("never", "always"))
    assert check(build(plan), plan) == []


@given(plans(), st.integers(1, 3), st.sampled_from(("always", "except_last")))
def test_greedy_orders_stay_under_their_cap_and_end(plan: Plan, room: int, recompute: str) -> None:
    # Of stages, a sample waits with 2 bytes each and takes 9 from recomputation on.
    plan = replace(
        plan, schedule="auto", data=1, recompute=recompute, max_in_flight=0, replications=0
    )
    edges = tuple(Edge(s, s + 1, 2, 2) for s in range(plan.depth - 1))
    costs = Costs((Cost(activations=9),) * plan.depth, edges)
    most = max(Counter(plan.places[0]).values()) * 9 * (2 if plan.bidirectional else 1)
    cap = most * (1 + room)
    schedule = greedy.order(plan, costs, memory=cap)
    assert check(schedule, plan) == []
    timeline = simulate(schedule, plan, costs)
    assert max(m.activations for row in timeline.memory for _, m in row) <= cap


# --- its price ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("p", "m"), [(2, 2), (3, 4), (4, 8), (8, 8)])
def test_recomputation_hides_where_a_rank_waits_for_a_gradient(p: int, m: int) -> None:
    """Published: (m + p - 1)(2f + b), with R on the critical path. It needs no gradient, so on all
    stages but the last the first runs while the rank waits: (m + p - 1)(f + b) + m f."""
    for schedule in ("gpipe", "1f1b"):
        plan = Plan(stages=p, micro_batches=m, schedule=schedule, recompute="always")
        timeline = simulate(lowered(plan), plan, unit(p))
        assert timeline.seconds == (m + p - 1) * 3 + m
        assert timeline.max_in_flight == (1,) * p
    spared = Plan(stages=p, micro_batches=m, schedule="gpipe", recompute="except_last")
    assert simulate(lowered(spared), spared, unit(p)).seconds == (m + p - 1) * 3 + m - 1


def test_1f1b_keeps_one_stash_and_the_inputs_of_the_micro_batches_under_way() -> None:
    p, m, activations, sent = 4, 8, 1000, 10
    edges = tuple(Edge(s, s + 1, sent, sent) for s in range(p - 1))
    costs = Costs((Cost(activations=activations, weights=1),) * p, edges)
    plan = Plan(stages=p, micro_batches=m, recompute="always")
    timeline = simulate(lowered(plan), plan, costs)
    for rank, row in enumerate(timeline.memory):
        waiting = (p - rank - 1) * sent if rank else 0  # the first stage reads the batch again
        assert max(memory.activations for _, memory in row) == activations + waiting
    kept = simulate(
        lowered(replace(plan, recompute="never")), replace(plan, recompute="never"), costs
    )
    assert max(memory.activations for _, memory in kept.memory[0]) == p * activations


def test_a_drawing_has_a_letter_and_a_colour_of_its_own_for_it() -> None:
    plan = Plan(stages=2, micro_batches=2, recompute="always")
    timeline = simulate(lowered(plan), plan, unit(2))
    assert text(timeline).splitlines()[1] == "rank 0  F0 F1 R0 .. .. B0--- R1 .. B1---"
    drawn = svg(timeline)
    assert (
        ">recompute<" in drawn and "0R1 on rank 0" in drawn and ">all-reduce of gradients<" in drawn
    )


# --- blocks by name -------------------------------------------------------------------------------


def chain(n: int, size: int = 16) -> tuple[Graph, Costs]:
    """Blocks that each save what they read."""
    values = [Value(f"v{i}", (size // 4,), (1,), "float32", True, i) for i in range(n + 1)]
    blocks = tuple(
        Block(f"b{i}", f"b{i}", (f"v{i}",), (f"v{i + 1}",), saves=((i, size),)) for i in range(n)
    )
    graph = Graph(blocks, tuple(values), ("v0",), (f"v{n}",), (), ())
    return graph, Costs((Cost(activations=size),) * n)


def test_a_run_keeps_its_input_and_is_live_in_its_turn() -> None:
    graph, _ = chain(6)
    blocks = list(range(6))
    assert runs(blocks, {1, 2, 4, 5}) == [[1, 2], [4, 5]]
    # v0 and v3 are saved by b0 and b3, v1 and v4 are inputs of runs; v5 or v2 are recomputed.
    assert footprint(graph, blocks, {1, 2, 4, 5}) == Footprint(4 * 16, 16)
    assert footprint(graph, blocks, ()) == Footprint(96, 0)
    assert footprint(graph, blocks, blocks) == Footprint(16, 80)


def test_names_cover_modules_their_calls_and_the_model() -> None:
    graph, _ = chain(5)
    names = ("stem", "a.relu", "a.add", "a.relu:2", "head")
    pairs = zip(graph.blocks, names, strict=True)
    graph = replace(graph, blocks=tuple(replace(b, name=name) for b, name in pairs))
    covered = {
        ("a",): {1, 2, 3}, ("a.relu",): {1, 3}, ("a.relu:1",): {1}, ("a.relu:2", "head"): {3, 4},
        ("",): set(range(5)), ("b",): set(),
    }  # fmt: skip
    for listed, blocks in covered.items():
        assert recomputed_blocks(listed, graph, range(5)) == blocks
    assert recomputed_blocks("always", graph, range(5)) is None
    for chosen in ({1}, {3}, {1, 3}, {0, 1, 2}, set(range(5)), set()):
        assert recomputed_blocks(names_of(graph, chosen, range(5)), graph, range(5)) == chosen


@pytest.mark.parametrize("n", [16, 64, 144])
def test_a_long_chain_fits_in_about_twice_the_root_of_its_length(n: int) -> None:
    graph, costs = chain(n)
    leanest = fitted(Plan(recompute="auto"), graph, costs, [0] * n, 0.0, ADAM)
    (names,) = leanest.recompute_by_stage
    found = footprint(graph, list(range(n)), {graph.index[name] for name in names})
    # Every break saves its own input and is followed by one: 2 per break, and a run between.
    assert (found.activations + found.temporary) / 16 <= 3.2 * n**0.5


def test_auto_recomputes_no_more_than_it_must_and_the_cheapest_per_byte_first() -> None:
    graph, costs = chain(8)
    dear = replace(costs, items=tuple(Cost(f=9 if i % 2 else 1, activations=16) for i in range(8)))
    boundary = 2 * 16
    plan = Plan(recompute="auto")
    assert fitted(plan, graph, dear, [0] * 8, 8 * 16 + boundary, ADAM).recompute_by_stage == (
        "never",
    )
    (names,) = fitted(plan, graph, dear, [0] * 8, 7 * 16 + boundary, ADAM).recompute_by_stage
    # A block by itself saves nothing, for its run saves what it reads; two do.
    chosen = [graph.index[n] for n in names]
    assert len(names) == 2 and recompute_seconds(dear, range(8), chosen) == 10


def test_auto_counts_the_micro_batches_of_a_batch_that_gems_pipelines() -> None:
    graph, costs = chain(16)
    alone = Plan(stages=2, schedule="gems", replications=2, recompute="auto")
    batch, stage_of, memory = replace(alone, max_in_flight=2), [0] * 8 + [1] * 8, 16 * 16
    for plan, some in ((alone, False), (batch, True)):
        found = fitted(plan, graph, costs, stage_of, memory, ADAM).recompute_by_stage
        assert [names != "never" for names in found] == [some, some]


def compiled(plan: Plan, graph: Graph, costs: Costs) -> CompiledPlan:
    return compile_plan(plan, graph, costs, machine("cpu"), Request.of(plan))


def test_a_name_that_keeps_nothing_is_explained() -> None:
    graph, costs = chain(4)
    with pytest.raises(PlanError, match="no block of the model is called 'b9'; did you mean b"):
        compiled(Plan(stages=2, recompute=["b1", "b9"]), graph, costs)


def test_a_stage_that_recomputes_blocks_pays_for_them_in_backward() -> None:
    graph, costs = chain(6)
    plan = Plan(stages=2, recompute=(("b1", "b2"), "never"))
    first, second = compiled(plan, graph, costs).costs.items
    assert (first.f, first.i, first.w) == (3, 3 + 2, 3)
    assert (first.activations, first.temporary) == (2 * 16, 16)
    assert (second.i, second.activations, second.temporary) == (3, 3 * 16, 0)


# --- the planner ----------------------------------------------------------------------------------


@cache
def study() -> tuple[Graph, Costs]:
    from gems.model.estimate import estimate
    from gems.models import build as network

    with torch.device("meta"):
        model = network("resnet_v1", depth=20).train()
    graph = trace(model, torch.empty(1, 3, 64, 64, device="meta")).graph
    return graph, estimate(graph, machine("v100"))


def test_the_planner_recomputes_where_nothing_else_fits_and_says_what_it_bought() -> None:
    graph, costs = study()
    slow = Link(1e6, 1e-3)  # the way to the host, so that nothing is put away
    on = replace(machine("v100"), host_link=slow)
    roomy = search(graph, costs, on, Request(2, 1e9, 4))
    assert roomy.best.plan.recompute == "never"
    lean = search(graph, costs, on, Request(2, 1e9, 4, "memory"), prune=False).fitting
    leanest = min(c.bytes for c in lean if not c.plan.offload)
    kept = [c for c in (*roomy.fitting, *roomy.rest) if c.plan.recompute == "never"]
    assert leanest < 0.7 * min(c.bytes for c in kept)
    tight = search(graph, costs, on, Request(2, 1.1 * leanest, 4))
    assert tight.fitting and tight.best.plan.recompute != "never"
    assert "recomputing: " in explain(tight) and "where saving all takes" in explain(tight)
    assert "recomputes " in explain(tight)


# --- exact ----------------------------------------------------------------------------------------

MODULES = ["", "stem", "lost", "head", *(f"layers.{i}" for i in range(7))]


@st.composite
def keeping(draw: Any) -> Plan:
    """A plan with something for each stage: a word, or names, some of them of no block here."""
    plan = draw(plans())
    names = st.lists(st.sampled_from(MODULES), max_size=8, unique=True)
    word = st.sampled_from(("always", "always", "except_last", "never"))
    return replace(plan, recompute=tuple(draw(st.one_of(word, names)) for _ in range(plan.depth)))


def known(plan: Plan, model: nn.Module) -> Plan:
    """Without the names of layers that the model has under another name: it may share some."""
    names = dict(model.named_modules())
    listed = plan.recompute_by_stage
    entries = (k if isinstance(k, str) else tuple(n for n in k if n in names) for k in listed)
    return replace(plan, recompute=tuple(entries))


@settings(max_examples=settings().max_examples // 4, report_multiple_bugs=False)
@given(networks(list(LAYERS)), keeping(), sizes, st.booleans())
def test_a_generated_model_that_keeps_less_trains_like_the_plain_one(
    model: Generated, plan: Plan, samples: list[int], extra: bool
) -> None:
    data, plan = some_data(samples, extra), known(plan, model)
    assert_equal(planned(model, data, plan, loss), plainly(model, data, plan.total, loss))


@settings(max_examples=settings().max_examples // 8, report_multiple_bugs=False)
@given(networks([*RANDOM, *RANDOM, *LAYERS]), keeping(), sizes)
def test_what_runs_again_draws_the_same_random_numbers(
    model: Generated, plan: Plan, samples: list[int]
) -> None:
    data, plan = some_data(samples, False), known(plan, model)
    assert_equal(planned(model, data, plan, loss), alone(model, data, plan.total, loss))


CUT = {
    "1f1b, 4 tiles to 2 to whole": ("always", all_but("4"), "except_last"),
    "zero-bubble": (all_but("1", "3"), "always", ("",)),
    "gems-zb, 3 stages": ("always", all_but("5", "7"), "always"),
    "slices both ways": (all_but("2"), "always"),
    "data 2, slices": ("always", all_but("8", "11")),
    "d2, all fused": (all_but("1", "4"), "never"),
    "all stages on the same ranks": ("always", "always", "always"),
    "auto, both ways": ("always", all_but("6"), "never"),
}


@pytest.mark.parametrize("name", CUT)
def test_a_cut_image_is_recomputed_by_all_of_its_team(name: str) -> None:
    plan, model, data = replace(PLANS[name], recompute=CUT[name]), classifier(), labelled(8, 1)
    assert_equal(planned(model, data, plan), plainly(model, data, plan.total))


class Rough(nn.Module):
    """What is easily done twice: norms, a checkpoint, a spectral norm, a count, a tied layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.region = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Tanh())
        self.norm = nn.BatchNorm2d(4, momentum=None)
        self.twice = nn.Conv2d(4, 4, 3, padding=1)
        self.tight = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        self.register_buffer("count", torch.ones(()))
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.twice(self.stem(x)), inplace=True)
        x = checkpoint(self.region, x, use_reentrant=False)
        x = self.twice(self.norm(x))
        self.count.mul_(1.25)
        x = self.tight(x.mean((2, 3)) * self.count)
        return self.head(x.relu())


@pytest.mark.parametrize(
    "recompute",
    [
        "always",
        ("",),
        ("stem", "region", "norm"),
        ("twice",),
        (("norm", "tight"), "always"),
        ("always", ("",)),
    ],
)
def test_what_a_forward_changes_is_changed_once(recompute: Any) -> None:
    torch.manual_seed(0)
    model, data = Rough().double(), batches((4, 3, 6, 6), 5, 2, torch.float64)
    plan = Plan(stages=2, micro_batches=2, schedule="zero-bubble", recompute=recompute)
    assert_equal(planned(model, data, plan), plainly(model, data, 2))


@pytest.mark.parametrize("recompute", ["always", ("",), all_but("0", "3", "7")])
def test_weight_gradients_of_what_is_recomputed_can_be_put_off_too(recompute: Any) -> None:
    def work(transport: Local) -> None:
        trainer = Trainer(
            classifier(), F.cross_entropy, sgd, torch.empty(2, 3, 21, 19, dtype=torch.float64),
            Plan(schedule="zero-bubble", recompute=recompute), transport=transport,
        )  # fmt: skip
        adapter = trainer.session.adapter
        batch = split(*labelled(2, 1)[0], 1)
        trainer.session.batches.state = begin_step(trainer.session.runner, batch, 0, training=True)
        adapter.forward(0, 0, {})
        if recompute == "always":
            adapter.recompute(0, 0)
        weights = [m.weight for m in trainer.model if isinstance(m, (nn.Conv2d, nn.Linear))]
        adapter.backward(0, 0, [], whole=False)
        assert all(w.grad is None for w in weights)
        adapter.weight(0, 0)
        assert all(w.grad is not None for w in weights)

    run(1, work)


@pytest.mark.parametrize("recompute", ["always", ("",), ("0", "2", "3", "4", "5")])
def test_under_autocast_the_same_bits(recompute: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(),
        nn.Linear(64, 5),
    )  # fmt: skip
    data = batches((4, 3, 8, 8), 5, 2, torch.float32)

    def found(recompute: Any) -> Outcome:
        plan = Plan(stages=2, micro_batches=2, recompute=recompute)
        last = lambda y, t: F.cross_entropy(y.float(), t)  # noqa: E731
        return planned(model, data, plan, last, precision="bf16")

    assert_equal(found(recompute), found("never"), 0.0)


# --- bytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "recompute", ["never", "always", ("",), all_but("2", "5"), all_but("0", "3", "4", "7")]
)
def test_what_autograd_holds_after_forward_is_what_is_counted(recompute: Any) -> None:
    model = classifier()
    seen: dict[int, int] = {}

    def saved(x: Tensor) -> Tensor:
        seen[storage_of(x)] = x.untyped_storage().nbytes()
        return x

    def work(transport: Local) -> int:
        trainer = Trainer(
            model, F.cross_entropy, sgd, torch.empty(2, 3, 21, 19, dtype=torch.float64),
            Plan(recompute=recompute), transport=transport,
        )  # fmt: skip
        adapter = trainer.session.adapter
        batch = split(*labelled(2, 1)[0], 1)
        trainer.session.batches.state = begin_step(trainer.session.runner, batch, 0, training=True)
        trainer.session.runner.loss.function = None  # it is nobody's stash
        with torch.autograd.graph.saved_tensors_hooks(saved, lambda x: x):
            adapter.forward(0, 0, {})
        for storage in trainer.session.weights.storages:
            seen.pop(storage, None)
        return adapter.activation_bytes(0, 0)

    (counted,) = run(1, work)
    assert sum(seen.values()) == counted
    assert (recompute == "always") == (not counted), "the batch is at hand, nothing else is kept"


def test_the_memory_that_is_given_decides_what_auto_keeps() -> None:
    """A trainer under a budget saves less, and counts less, than one without."""
    data = labelled(4, 1)

    def peak(memory: int | None) -> tuple[Any, int]:
        def work(transport: Local) -> tuple[Any, int]:
            trainer = Trainer(
                copy.deepcopy(classifier()), F.cross_entropy, sgd,
                torch.empty(1, 3, 21, 19, dtype=torch.float64),
                Plan(micro_batches=4, schedule="gpipe", recompute="auto"), memory=memory,
                transport=transport,
            )  # fmt: skip
            trainer.step(*data[0])
            return trainer.plan.recompute, trainer.timeline().peaks[0].total

        return run(1, work)[0]

    recompute, most = peak(None)
    assert recompute == ("never",)
    recompute, less = peak(round(0.6 * most))
    assert isinstance(recompute[0], tuple) and less <= 0.6 * most


# --- processes ------------------------------------------------------------------------------------


def one_rank(transport: Transport, plan: Plan) -> Outcome:
    return trained(transport, classifier(), labelled(4, 1), plan)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(stages=2, balance=(6, 7), micro_batches=4, recompute=("always", all_but("8"))),
        Plan(
            stages=2,
            balance=(6, 7),
            micro_batches=2,
            spatial="1x2",
            recompute=(all_but("3"), "always"),
        ),
    ],
    ids=["pipeline", "tiles"],
)
def test_over_processes(plan: Plan) -> None:
    found = join(spawn(plan.world, one_rank, plan))
    assert_equal(found, plainly(classifier(), labelled(4, 1), plan.total))


def test_an_order_of_ones_own_gets_its_recomputation() -> None:
    plan = Plan(stages=2, balance=(6, 7), micro_batches=2, recompute=("always", "never"))
    plain = build(replace(plan, recompute="never"))
    data = labelled(4, 1)
    found = planned(classifier(), data, plan, schedule=plain)
    assert_equal(found, plainly(classifier(), data, 2))
    assert {"0R0", "0R1"} <= {event.action for event in found.timeline.events}
    with pytest.raises(ScheduleError, match="1R0 has nothing to do"):
        planned(classifier(), data, plan, schedule=changed(plan, "1B0", "1R0 1B0"))
