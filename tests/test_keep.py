"""What a stage does not keep is computed again: nothing comes out differently, bytes are saved as
predicted, and it costs the time that it should."""

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
from gems.planner.assign import assign
from gems.planner.explain import explain
from gems.planner.recompute_selection import fitted
from gems.planner.search import Wish, search
from gems.plans.plan import Plan
from gems.plans.recompute import spelled
from gems.predict.recompute_cost import Footprint, again, footprint, runs
from gems.predict.simulate import simulate
from gems.predict.stage_costs import price
from gems.schedule import greedy
from gems.schedule.action import Kind, Schedule, parse
from gems.schedule.build import build, lowered
from gems.schedule.validate import check
from gems.torch.runtime.begin_step import begin_step
from gems.torch.runtime.microbatch import split
from gems.torch.tracing.op_meter import storage_of
from gems.torch.tracing.trace import trace
from gems.torch.trainer import Trainer
from gems.transport.protocol import Transport
from gems.transport.threads import Local, run
from tests.exact import Outcome, alone, assert_equal, batches, join, plainly, planned, sgd, trained
from tests.test_generated import LAYERS, RANDOM, Generated, loss, networks, plans, sizes, some_data
from tests.test_spatial_plans import PLANS, classifier, labelled
from tests.worlds import spawn

Tensor = torch.Tensor

# --- the plan -------------------------------------------------------------------------------------


def test_a_plan_says_what_stages_keep_for_all_or_for_each() -> None:
    assert Plan(stages=2).keeps == ("all", "all")
    assert Plan(stages=2, keep="always") == Plan(stages=2, keep="inputs")
    assert Plan(stages=2, keep="never") == Plan(stages=2)
    assert Plan(stages=2, keep=["layer1", "head"]).keeps == (("layer1", "head"),) * 2
    each = Plan(stages=3, keep=["inputs", ["layer2"], "never"])
    assert each.keeps == ("inputs", ("layer2",), "all")
    assert [each.recomputes(s, 0) for s in range(3)] == [True, False, False]
    assert from_json(Plan, to_json(each)) == each


def test_all_but_the_last_micro_batch_of_each_copy() -> None:
    plan = Plan(stages=2, micro_batches=3, data=2, keep="except-last")
    again = [plan.recomputes(0, i) for i in range(plan.total)]
    assert again == [True, True, False, True, True, False]
    assert not Plan(keep="except-last").recomputes(0, 0), "the only one is the last"


@pytest.mark.parametrize(
    ("keep", "fault"),
    [
        (
            "some",
            "keep 'some' is unknown; choose one of all, inputs, except-last, auto, always",
        ),
        (("inputs", "all", "all"), "keep has 3 entries for 2 stages; give one each"),
        (("inputs", "layer2"), "keep of stage 1 is 'layer2'; choose one of all, .* put module nam"),
    ],
)
def test_a_plan_that_keeps_something_unknown_is_refused(keep: Any, fault: str) -> None:
    with pytest.raises(PlanError, match=fault):
        Plan(stages=2, keep=keep)


@pytest.mark.parametrize(
    ("written", "keep"),
    [
        ("inputs", "inputs"),
        ("never", "all"),
        ("inputs,all", ("inputs", "all")),
        ("a.b,c", ("a.b", "c")),
        ("always/a,c/all", ("inputs", ("a", "c"), "all")),
        ("/all", ((), "all")),
    ],
)
def test_on_the_command_line(written: str, keep: Any) -> None:
    assert spelled(written) == keep


def test_the_command_line_draws_it_and_explains_what_cannot_be(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["simulate", "--stages", "2", "--parts", "2", "--keep", "inputs"]) == 0
    assert "F0 F1 R0 .. .. B0--- R1 .. B1---" in capsys.readouterr().out
    assert main(["check", "--stages", "2", "--parts", "2", "--keep", "except-last"]) == 0
    assert "no deadlock" in capsys.readouterr().out
    named = ["--model", "resnet-v1", "--num-layers", "8", "--keep", "stem,blok1_1"]
    assert main(["check", "--stages", "2", *named]) == 1
    told = capsys.readouterr().err
    assert "keep: no block of the model is called 'blok1_1'; did you mean block1_1" in told
    assert main(["check", "--keep", "auto"]) == 1
    assert "written out first, which takes a model and a memory cap" in capsys.readouterr().err


# --- the schedule ---------------------------------------------------------------------------------


def test_1f1b_of_three_stages_and_four_micro_batches_recomputes_right_before_backward() -> None:
    plan = Plan(stages=3, micro_batches=4, keep="inputs")
    assert build(plan) == parse(
        """
        0: 0F0 0F1 0F2 0R0 0B0 0F3 0R1 0B1 0R2 0B2 0R3 0B3
        1: 1F0 1F1 1R0 1B0 1F2 1R1 1B1 1F3 1R2 1B2 1R3 1B3
        2: 2F0 2R0 2B0 2F1 2R1 2B1 2F2 2R2 2B2 2F3 2R3 2B3
        """
    )
    assert parse(str(lowered(plan))) == lowered(plan)


def test_gpipe_except_the_last_and_both_ways() -> None:
    gpipe = Plan(stages=2, micro_batches=3, schedule="gpipe", keep=("except-last", "all"))
    assert build(gpipe) == parse("0: 0F0 0F1 0F2 0B2 0R1 0B1 0R0 0B0\n1: 1F0 1F1 1F2 1B2 1B1 1B0\n")
    gems = Plan(stages=2, schedule="gems", replications=1, keep=("inputs", "all"))
    assert build(gems) == parse("0: 0F0 0R0 0B0 1F1@1 1B1@1\n1: 1F0 1B0 0F1@1 0R1@1 0B1@1\n")


def changed(plan: Plan, old: str, new: str) -> Schedule:
    written = str(build(plan))
    assert old in written
    return parse(written.replace(old, new))


def test_a_schedule_that_recomputes_wrongly_is_explained() -> None:
    plan = Plan(stages=2, micro_batches=2, keep=("inputs", "all"))
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
    words = st.sampled_from(("inputs", "except-last", "all"))
    keep = tuple(data.draw(words) for _ in range(plan.depth))
    plan = replace(plan, keep=keep, data=1)
    seconds = st.integers(1, 5)
    items = [
        Cost(*(data.draw(seconds) for _ in range(3)), activations=9) for _ in range(plan.depth)
    ]
    costs = Costs(tuple(items), tuple(Edge(s, s + 1, 2, 2) for s in range(plan.depth - 1)))
    schedule = build(plan, costs)
    assert check(schedule, plan) == []
    again = Counter(a.stage for _, a in schedule if a.kind is Kind.RECOMPUTE)
    for stage in range(plan.depth):
        wanted = {"inputs": plan.micro_batches, "except-last": plan.micro_batches - 1, "all": 0}
        assert again[stage] == wanted[keep[stage]]
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
    plan = Plan(**options, bidirectional=True, keep=("all", "inputs"))
    assert check(build(plan), plan) == []


@given(plans(), st.integers(1, 3), st.sampled_from(("inputs", "except-last")))
def test_greedy_orders_stay_under_their_cap_and_end(plan: Plan, room: int, keep: str) -> None:
    # Of stages, a sample waits with 2 bytes each and takes 9 from recomputation on.
    plan = replace(plan, schedule="auto", data=1, keep=keep, max_in_flight=0, replications=0)
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
        plan = Plan(stages=p, micro_batches=m, schedule=schedule, keep="inputs")
        timeline = simulate(lowered(plan), plan, unit(p))
        assert timeline.seconds == (m + p - 1) * 3 + m
        assert timeline.max_in_flight == (1,) * p
    spared = Plan(stages=p, micro_batches=m, schedule="gpipe", keep="except-last")
    assert simulate(lowered(spared), spared, unit(p)).seconds == (m + p - 1) * 3 + m - 1


def test_1f1b_keeps_one_stash_and_the_inputs_of_the_micro_batches_under_way() -> None:
    p, m, activations, sent = 4, 8, 1000, 10
    edges = tuple(Edge(s, s + 1, sent, sent) for s in range(p - 1))
    costs = Costs((Cost(activations=activations, weights=1),) * p, edges)
    plan = Plan(stages=p, micro_batches=m, keep="inputs")
    timeline = simulate(lowered(plan), plan, costs)
    for rank, row in enumerate(timeline.memory):
        waiting = (p - rank - 1) * sent if rank else 0  # the first stage reads the batch again
        assert max(memory.activations for _, memory in row) == activations + waiting
    kept = simulate(lowered(replace(plan, keep="all")), replace(plan, keep="all"), costs)
    assert max(memory.activations for _, memory in kept.memory[0]) == p * activations


def test_a_drawing_has_a_letter_and_a_colour_of_its_own_for_it() -> None:
    plan = Plan(stages=2, micro_batches=2, keep="inputs")
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
    assert runs(blocks, {0, 3}) == [[1, 2], [4, 5]]
    # v0 and v3 are saved by those that keep, v1 and v4 are inputs of runs; v5 or v2 come again.
    assert footprint(graph, blocks, {0, 3}) == Footprint(4 * 16, 16)
    assert footprint(graph, blocks, blocks) == Footprint(96, 0)
    assert footprint(graph, blocks, ()) == Footprint(16, 80)


@pytest.mark.parametrize("n", [16, 64, 144])
def test_a_long_chain_fits_in_about_twice_the_root_of_its_length(n: int) -> None:
    graph, costs = chain(n)
    leanest = fitted(Plan(keep="auto"), graph, costs, [0] * n, 0.0)
    (names,) = leanest.keeps
    found = footprint(graph, list(range(n)), {graph.index[name] for name in names})
    # Every break keeps its own input and is followed by one: 2 per break, and a run between.
    assert (found.activations + found.temporary) / 16 <= 3.2 * n**0.5


def test_auto_recomputes_no_more_than_it_must_and_the_cheapest_per_byte_first() -> None:
    graph, costs = chain(8)
    dear = replace(costs, items=tuple(Cost(f=9 if i % 2 else 1, activations=16) for i in range(8)))
    boundary = 2 * 16
    plan = Plan(keep="auto")
    assert fitted(plan, graph, dear, [0] * 8, 8 * 16 + boundary).keeps == ("all",)
    (names,) = fitted(plan, graph, dear, [0] * 8, 7 * 16 + boundary).keeps
    gone = {f"b{i}" for i in range(8)} - set(names)
    # A block by itself gives nothing back, for its run keeps what it reads; two do.
    assert len(gone) == 2 and again(dear, range(8), [graph.index[n] for n in names]) == 10


def test_a_name_that_keeps_nothing_is_explained() -> None:
    graph, costs = chain(4)
    with pytest.raises(PlanError, match="no block of the model is called 'b9'; did you mean b"):
        assign(Plan(stages=2, keep=["b1", "b9"]), graph, costs)


def test_a_stage_that_recomputes_blocks_pays_for_them_in_backward() -> None:
    graph, costs = chain(6)
    plan = assign(Plan(stages=2, keep=(("b0",), "all")), graph, costs)
    first, second = price(costs, graph, [0, 0, 0, 1, 1, 1], plan, machine("cpu")).items
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
    roomy = search(graph, costs, on, Wish(2, 1e9, 4))
    assert roomy.best.plan.keep == "all"
    lean = search(graph, costs, on, Wish(2, 1e9, 4, "memory"), prune=False).fitting
    leanest = min(c.bytes for c in lean if not c.plan.offload)
    kept = [c for c in (*roomy.fitting, *roomy.rest) if c.plan.keep == "all"]
    assert leanest < 0.7 * min(c.bytes for c in kept)
    tight = search(graph, costs, on, Wish(2, 1.1 * leanest, 4))
    assert tight.fitting and tight.best.plan.keep != "all"
    assert "recomputing: " in explain(tight) and "where keeping all takes" in explain(tight)
    assert "keeps " in explain(tight)


# --- exact ----------------------------------------------------------------------------------------

MODULES = ["stem", "lost", "head", *(f"layers.{i}" for i in range(7))]


@st.composite
def keeping(draw: Any) -> Plan:
    """A plan with something for each stage: a word, or names, some of them of no block here."""
    plan = draw(plans())
    names = st.lists(st.sampled_from(MODULES[:6]), max_size=4, unique=True)
    word = st.sampled_from(("inputs", "inputs", "except-last", "all"))
    return replace(plan, keep=tuple(draw(st.one_of(word, names)) for _ in range(plan.depth)))


def known(plan: Plan, model: nn.Module) -> Plan:
    """Without the names of layers that the model has under another name: it may share some."""
    names = dict(model.named_modules())
    keeps = (k if isinstance(k, str) else tuple(n for n in k if n in names) for k in plan.keeps)
    return replace(plan, keep=tuple(keeps))


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
    "1f1b, 4 tiles to 2 to whole": ("inputs", ("4",), "except-last"),
    "zero-bubble": (("1", "3"), "inputs", ()),
    "gems-zb, 3 stages": ("inputs", ("5", "7"), "inputs"),
    "slices both ways": (("2",), "inputs"),
    "data 2, slices": ("inputs", ("8", "11")),
    "d2, all fused": (("1", "4"), "all"),
    "all stages on the same ranks": ("inputs", "inputs", "inputs"),
    "auto, both ways": ("inputs", ("6",), "all"),
}


@pytest.mark.parametrize("name", CUT)
def test_a_cut_image_is_recomputed_by_all_of_its_team(name: str) -> None:
    plan, model, data = replace(PLANS[name], keep=CUT[name]), classifier(), labelled(8, 1)
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
    "keep",
    ["inputs", (), ("twice",), ("norm", "tight"), (("stem", "region"), "inputs"), ("inputs", ())],
)
def test_what_a_forward_changes_is_changed_once(keep: Any) -> None:
    torch.manual_seed(0)
    model, data = Rough().double(), batches((4, 3, 6, 6), 5, 2, torch.float64)
    plan = Plan(stages=2, micro_batches=2, schedule="zero-bubble", keep=keep)
    assert_equal(planned(model, data, plan), plainly(model, data, 2))


@pytest.mark.parametrize("keep", ["inputs", (), ("0", "3", "7")])
def test_weight_gradients_of_what_is_recomputed_can_be_put_off_too(keep: Any) -> None:
    def work(transport: Local) -> None:
        trainer = Trainer(
            classifier(), F.cross_entropy, sgd, torch.empty(2, 3, 21, 19, dtype=torch.float64),
            Plan(schedule="zero-bubble", keep=keep), transport=transport,
        )  # fmt: skip
        adapter = trainer.adapter
        batch = split(*labelled(2, 1)[0], 1)
        trainer.batches.state = begin_step(trainer.runner, batch, 0, training=True)
        adapter.forward(0, 0, {})
        if keep == "inputs":
            adapter.recompute(0, 0)
        weights = [m.weight for m in trainer.model if isinstance(m, (nn.Conv2d, nn.Linear))]
        adapter.backward(0, 0, [], whole=False)
        assert all(w.grad is None for w in weights)
        adapter.weight(0, 0)
        assert all(w.grad is not None for w in weights)

    run(1, work)


@pytest.mark.parametrize("keep", ["inputs", (), ("1",)])
def test_under_autocast_the_same_bits(keep: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(),
        nn.Linear(64, 5),
    )  # fmt: skip
    data = batches((4, 3, 8, 8), 5, 2, torch.float32)

    def found(keep: Any) -> Outcome:
        plan = Plan(stages=2, micro_batches=2, keep=keep)
        last = lambda y, t: F.cross_entropy(y.float(), t)  # noqa: E731
        return planned(model, data, plan, last, precision="bf16")

    assert_equal(found(keep), found("all"), 0.0)


# --- bytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", ["all", "inputs", (), ("2", "5"), ("0", "3", "4", "7")])
def test_what_autograd_holds_after_forward_is_what_is_counted(keep: Any) -> None:
    model = classifier()
    seen: dict[int, int] = {}

    def saved(x: Tensor) -> Tensor:
        seen[storage_of(x)] = x.untyped_storage().nbytes()
        return x

    def work(transport: Local) -> int:
        trainer = Trainer(
            model, F.cross_entropy, sgd, torch.empty(2, 3, 21, 19, dtype=torch.float64),
            Plan(keep=keep), transport=transport,
        )  # fmt: skip
        adapter = trainer.adapter
        batch = split(*labelled(2, 1)[0], 1)
        trainer.batches.state = begin_step(trainer.runner, batch, 0, training=True)
        trainer.runner.loss.function = None  # it is nobody's stash
        with torch.autograd.graph.saved_tensors_hooks(saved, lambda x: x):
            adapter.forward(0, 0, {})
        for storage in trainer.weights.storages:
            seen.pop(storage, None)
        return adapter.activation_bytes(0, 0)

    (counted,) = run(1, work)
    assert sum(seen.values()) == counted
    assert (keep == "inputs") == (not counted), "the batch is at hand, nothing else is kept"


def test_the_memory_that_is_given_decides_what_auto_keeps() -> None:
    """A trainer under a cap keeps less, and counts less, than one without."""
    data = labelled(4, 1)

    def peak(memory: int | None) -> tuple[Any, int]:
        def work(transport: Local) -> tuple[Any, int]:
            trainer = Trainer(
                copy.deepcopy(classifier()), F.cross_entropy, sgd,
                torch.empty(1, 3, 21, 19, dtype=torch.float64),
                Plan(micro_batches=4, schedule="gpipe", keep="auto"), memory=memory,
                transport=transport,
            )  # fmt: skip
            trainer.step(*data[0])
            return trainer.plan.keep, trainer.timeline().peaks[0].total

        return run(1, work)[0]

    keep, most = peak(None)
    assert keep == ("all",)
    keep, less = peak(round(0.6 * most))
    assert isinstance(keep[0], tuple) and less <= 0.6 * most


# --- processes ------------------------------------------------------------------------------------


def one_rank(transport: Transport, plan: Plan) -> Outcome:
    return trained(transport, classifier(), labelled(4, 1), plan)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(stages=2, balance=(6, 7), micro_batches=4, keep=("inputs", ("8",))),
        Plan(stages=2, balance=(6, 7), micro_batches=2, spatial="1x2", keep=(("3",), "inputs")),
    ],
    ids=["pipeline", "tiles"],
)
def test_over_processes(plan: Plan) -> None:
    found = join(spawn(plan.world, one_rank, plan))
    assert_equal(found, plainly(classifier(), labelled(4, 1), plan.total))


def test_an_order_of_ones_own_gets_its_recomputation() -> None:
    plan = Plan(stages=2, balance=(6, 7), micro_batches=2, keep=("inputs", "all"))
    plain = build(replace(plan, keep="all"))
    data = labelled(4, 1)
    found = planned(classifier(), data, plan, schedule=plain)
    assert_equal(found, plainly(classifier(), data, 2))
    assert {"0R0", "0R1"} <= {event.action for event in found.timeline.events}
    with pytest.raises(ScheduleError, match="1R0 has nothing to do"):
        planned(classifier(), data, plan, schedule=changed(plan, "1B0", "1R0 1B0"))
