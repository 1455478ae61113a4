"""Blocks of an image one after the other: the same numbers as all at once, in less memory.

A case of the first test is a network, a grid of blocks and the points where its input is cut; its
number decides all of that. More of them, or one again:

    GEMS_STREAMS=2000 .venv/bin/python -m pytest tests/test_stream.py -q -k generated
"""

from __future__ import annotations

import copy
import os
import re
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import gems
from gems.cli.main import main
from gems.errors import PlanError
from gems.files import from_json, to_json
from gems.hardware import machine
from gems.model.estimate import estimate
from gems.plans.plan import Plan
from gems.predict.stage_costs import price
from gems.torch.spatial.halo_costs import with_halos
from gems.torch.spatial.partition import CallNotTileable
from gems.torch.tracing.trace import trace
from gems.torch.trainer import Trainer
from gems.transport.protocol import Transport
from gems.transport.threads import run
from tests.exact import Outcome, assert_equal, join, plainly, planned, trained
from tests.networks import build
from tests.spatial import Plain
from tests.test_spatial_generated import GRIDS, Function, some_cut, stack
from tests.worlds import spawn

Tensor = torch.Tensor
CASES = int(os.environ.get("GEMS_STREAMS", "32"))
WHOLE = ("excited", "pooled", "stripped")  # they look at all of the image


def an_end(r: Random, dims: int) -> nn.Module:
    """A mean or a sum over the image, or over parts of it, which adds up block by block."""
    kind = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)[dims - 1]
    if r.random() < 0.5:
        return kind(r.randint(1, 3))
    return Function(r.choice((torch.mean, torch.sum)), tuple(range(2, 2 + r.randint(1, dims))))


def network(number: int) -> Plain:
    """One that may be streamed: norms are frozen, or of each pixel."""
    r = Random(f"stream {number}")
    torch.manual_seed(number)
    dims = r.choice((1, 2, 2, 2, 2, 3))
    sides = {1: (6, 20), 2: (5, 13), 3: (4, 7)}[dims]
    shape = (r.randint(1, 2), r.randint(2, 4), *(r.randint(*sides) for _ in range(dims)))
    model, _ = stack(r, shape, r.randint(1, 6), without=WHOLE)
    if r.random() < 0.4:
        model = nn.Sequential(model, an_end(r, dims))
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase):
            module.eval()
    drops = any(isinstance(m, nn.modules.dropout._DropoutNd) for m in model.modules())
    return Plain(model, torch.randn(shape), keyed=drops)


@pytest.mark.parametrize("number", range(CASES), ids=lambda n: f"case_{n}_")
def test_a_generated_network_does_the_same_block_by_block(number: int) -> None:
    for tried in range(number, number + 50 * CASES, CASES):
        plain = network(tried)
        shape = tuple(plain.inputs[0].shape)
        cut = some_cut(Random(f"cut {tried}"), shape, GRIDS[len(shape) - 2])
        try:
            plain.stream(cut["grid"], cut["points"])
            return
        except CallNotTileable:
            continue  # statistics of the whole image, or its far end
        except BaseException as error:
            error.add_note(f"case {number}, try {tried}: {shape} by {cut}\n{plain.model}")
            raise
    raise AssertionError(f"of 50 networks none could be streamed; case {number}")


# --- networks, trained ----------------------------------------------------------------------------


def noise(shape: tuple[int, ...], classes: int, target: tuple[int, ...], steps: int = 2) -> Any:
    draw = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(shape, generator=draw, dtype=torch.float64),
            torch.randint(classes, target, generator=draw),
        )
        for _ in range(steps)
    ]


class Frozen(nn.BatchNorm2d):
    """A BatchNorm that goes by its running statistics, whatever mode the model is in."""

    def train(self, mode: bool = True) -> Frozen:
        return super().train(False)


def residual() -> nn.Module:
    """A pre-activation ResNet whose BatchNorm is frozen."""
    torch.manual_seed(0)
    model = build("resnet_v2", depth=11, width=4, num_classes=3)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2)
            module.__class__ = Frozen
            module.train()
    return model.double()


SIDE = 29
PLANS = {
    "one rank": Plan(stages=2, ranks=1, stream=(3, 2), schedule="sequential", micro_batches=2),
    "strips": Plan(stages=2, ranks=1, stream="horizontal:4", schedule="sequential"),
    "pipeline": Plan(stages=3, stream="2x3", micro_batches=2),
    "two streamed stages": Plan(stages=3, stream=["3x3", "2x2"], micro_batches=2),
    "both ways": Plan(stages=2, stream=(2, 2), schedule="gems", replications=1),
    "weights apart": Plan(stages=3, stream=(2, 2), schedule="zero-bubble", micro_batches=3),
    "copies": Plan(stages=2, stream=(2, 2), data=2, micro_batches=1),
    "others keep inputs": Plan(stages=3, stream=(2, 2), recompute="always", micro_batches=2),
    "others are slices": Plan(stages=2, stream=(2, 2), local_dp=2, schedule="gpipe"),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_residual_network_with_frozen_norms_trains_like_the_plain_one(name: str) -> None:
    plan, model = PLANS[name], residual()
    data = noise((4, 3, SIDE, SIDE - 4), 3, (4,))
    assert_equal(planned(model, data, plan), plainly(model, data, plan.total))


def one_rank(transport: Transport, plan: Plan) -> Outcome:
    return trained(transport, residual(), noise((4, 3, SIDE, SIDE - 4), 3, (4,), 1), plan)


def test_over_processes() -> None:
    plan = PLANS["others keep inputs"]
    found = join(spawn(plan.world, one_rank, plan))
    data = noise((4, 3, SIDE, SIDE - 4), 3, (4,), 1)
    assert_equal(found, plainly(residual(), data, plan.total))


def test_under_autocast_blocks_are_rounded_like_the_whole_image() -> None:
    """Sums over the image are rounded in another order, so it is as near as bf16 gets."""
    model, data = residual().float(), [(x.float(), y) for x, y in noise((2, 3, 29, 25), 3, (2,), 1)]
    whole = planned(model, data, Plan(micro_batches=2), precision="bf16")
    exact = planned(model, data, Plan(micro_batches=2))
    found = planned(model, data, PLANS["one rank"], precision="bf16")

    def off(mine: Outcome, theirs: Outcome) -> float:
        pairs = [(mine.gradients[0][n], g) for n, g in theirs.gradients[0].items()]
        errors = [float((a - b).norm() / b.norm()) for a, b in pairs if a is not None]
        return sum(errors) / len(errors)

    assert found.losses == pytest.approx(whole.losses, rel=2e-2)
    assert 0 < off(found, exact) < 2 * off(whole, exact)


@pytest.mark.parametrize("zero", [1, 3])
def test_streamed_stages_share_their_state_out(zero: int) -> None:
    plan = Plan(
        stages=2, ranks=1, stream=(2, 2), data=2, micro_batches=1, schedule="sequential", zero=zero
    )
    model, data = residual(), noise((2, 3, SIDE, SIDE), 3, (2,))
    found, expected = planned(model, data, plan), plainly(model, data, plan.total)
    assert found.losses == pytest.approx(expected.losses, rel=1e-10)
    for name, theirs in expected.state.items():
        torch.testing.assert_close(found.state[name], theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("stages", [1, 3])
def test_skips_of_a_u_net_run_inside_the_blocks_and_between_stages(stages: int) -> None:
    torch.manual_seed(0)
    model = build("unet", norm="none", width=2, levels=3).double()
    data = noise((1, 3, 27, 22), 2, (1, 27, 22))
    plan = Plan(stages=stages, stream=["3x2"] * stages)
    assert_equal(
        planned(model, data, plan, F.cross_entropy), plainly(model, data, 1, F.cross_entropy)
    )


def test_norms_of_each_pixel_stream() -> None:
    torch.manual_seed(0)
    model = build("convnext_tiny", depths=(1, 1), dims=(4, 6), num_classes=3, scale=0.5).double()
    data = noise((1, 3, 40, 33), 3, (1,))
    plan = Plan(stages=2, ranks=1, stream=(2, 3), schedule="sequential")
    assert_equal(planned(model, data, plan), plainly(model, data, 1))


def test_dropout_drops_what_it_drops_when_the_image_is_whole() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.Dropout(0.4), nn.Conv2d(4, 4, 5, padding=2), nn.Tanh(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
    ).double()  # fmt: skip
    data = noise((2, 3, 17, 19), 3, (2,))
    whole = Plan(stages=1, micro_batches=2, schedule="sequential")
    plan = Plan(stages=2, ranks=1, stream="3x3", schedule="sequential", micro_batches=2)
    assert_equal(planned(model, data, plan), planned(model, data, whole))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]


def test_what_the_model_itself_recomputes_runs_on_its_block_again() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), Checkpointed(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(4, 3),
    ).double()  # fmt: skip
    data = noise((1, 3, 13, 11), 3, (1,))
    plan = Plan(stages=2, ranks=1, stream="3x2", schedule="sequential")
    assert_equal(planned(model, data, plan), plainly(model, data, 1))


class ChangesInPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2).tanh_()


def test_what_a_block_changes_in_place_is_its_own() -> None:
    """Boxes overlap, and are read again in backward: no change in one may be seen by another."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), ChangesInPlace(), nn.Conv2d(4, 4, 3, padding=1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
    ).double()  # fmt: skip
    data = noise((1, 3, 13, 11), 3, (1,))
    plan = Plan(stages=[["0"], ["1", "2"], ["3", "4", "5"]], stream=["2x2", "2x2"])
    assert_equal(planned(model, data, plan), plainly(model, data, 1))


# --- what is refused ------------------------------------------------------------------------------

REFUSED = {
    "BatchNorm2d": nn.BatchNorm2d(4),
    "GroupNorm": nn.GroupNorm(2, 4),
    "AdaptiveAvgPool2d": nn.AdaptiveAvgPool2d(2),
    "Conv2d": nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"),
}


def make(model: nn.Module, plan: Plan, shape: tuple[int, ...], **options: Any) -> Trainer:
    found = run(plan.world, lambda t: Trainer(model, sample=torch.empty(shape), plan=plan,
                                              transport=t, **options))  # fmt: skip
    return found[0]


@pytest.mark.parametrize("kind", REFUSED)
def test_what_needs_the_whole_image_is_refused_before_anything_runs(kind: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), copy.deepcopy(REFUSED[kind]), nn.Conv2d(4, 4, 1))
    with pytest.raises(PlanError, match=rf"stage 0 streams 2x2.* 1 \({kind}\).*end at 0") as found:
        make(model, Plan(stream=(2, 2)), (1, 3, 16, 16))
    assert ("frozen" in str(found.value)) == (kind == "BatchNorm2d")


def test_a_plan_says_what_cannot_be_streamed() -> None:
    with pytest.raises(PlanError, match=r"stage 0 streams 2x2 .* split over 4 .*leave one"):
        Plan(stages=2, stream="2x2", spatial="2x2")
    with pytest.raises(PlanError, match="recompute is 'except_last'; give it 'always'"):
        Plan(stages=2, stream="2x2", recompute="except_last")
    with pytest.raises(PlanError, match="2 grids for 1 stages"):
        Plan(stream=["2x2", "2x2"])
    with pytest.raises(PlanError, match=r"local_dp=2 .* all 1 stream"):
        Plan(stream="2x2", local_dp=2)
    with pytest.raises(PlanError, match="streams 0x2"):
        Plan(stream=(0, 2))


# --- memory ---------------------------------------------------------------------------------------


class Picture:
    """An array that remembers the largest box that was read of it."""

    dtype = "float32"

    def __init__(self, *shape: int) -> None:
        self.shape, self.largest = shape, 0

    def __getitem__(self, box: tuple[slice, ...]) -> Tensor:
        part = torch.ones([len(range(n)[s]) for n, s in zip(self.shape, box, strict=True)])
        self.largest = max(self.largest, part.numel())
        return part


def peaks(model: nn.Module, plan: Plan, image: Any, target: Tensor) -> tuple[int, int]:
    """Most bytes of a step, measured and predicted."""

    def work(transport: Any) -> tuple[int, int]:
        trainer = Trainer(
            model, F.cross_entropy, lambda p: torch.optim.SGD(p, 0.1), torch.empty(image.shape),
            plan, transport=transport,
        )  # fmt: skip
        trainer.step(image, target)
        return trainer.peak, trainer.forecast().peaks[0].total

    return run(1, work)[0]


def test_less_is_live_the_more_blocks_there_are_and_as_much_as_was_predicted() -> None:
    torch.manual_seed(0)
    model = build("unet", norm="none", width=4, levels=3)
    image, target = torch.randn(1, 3, 192, 192), torch.randint(2, (1, 192, 192))
    found = []
    for blocks in ((1, 1), (2, 2), (3, 3), (4, 4)):
        measured, predicted = peaks(copy.deepcopy(model), Plan(stream=blocks), image, target)
        assert predicted == pytest.approx(measured, rel=0.05)
        found.append(measured)
    assert found == sorted(found, reverse=True)
    whole, _ = peaks(model, Plan(), image, target)
    assert found[0] > whole and found[-1] < whole / 4  # one block is recomputed whole


def test_activations_may_exceed_the_memory_many_times() -> None:
    """And of the image itself, no more than a block is ever read."""
    layers = [nn.Conv2d(3, 16, 3, 2, 1)]
    for _ in range(4):
        layers += [nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1)]
    model = nn.Sequential(*layers, nn.MaxPool2d(8), nn.Conv2d(16, 2, 1),
                          nn.AdaptiveAvgPool2d(1), nn.Flatten())  # fmt: skip
    image, target = Picture(1, 3, 768, 768), torch.zeros(1, dtype=torch.int64)
    plan = Plan(stages=2, ranks=1, stream=(6, 6), schedule="sequential")
    streamed, predicted = peaks(copy.deepcopy(model), plan, image, target)
    assert image.largest < 3 * 768 * 768 / 20
    whole, _ = peaks(model, Plan(), torch.ones(1, 3, 768, 768), target)
    assert whole > 10 * streamed
    assert predicted == pytest.approx(streamed, rel=0.05)


def test_of_a_classifier_nothing_as_large_as_the_image_is_there_whole() -> None:
    """The mean over the image is added up, so what is live hangs on the block and not on the image:
    twice as many blocks along each side, four times the image, and not a byte more."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2),
    )  # fmt: skip
    target, found = torch.zeros(1, dtype=torch.int64), []
    for parts in (3, 6):
        plan = Plan(stages=2, ranks=1, stream=(parts, parts), schedule="sequential")
        image = Picture(1, 3, 32 * parts, 32 * parts)
        measured, predicted = peaks(copy.deepcopy(model), plan, image, target)
        assert predicted == pytest.approx(measured, rel=0.05)
        found.append(measured)
    assert found[0] == found[1]


# --- the planner ----------------------------------------------------------------------------------


def test_the_planner_streams_where_nothing_else_fits_and_says_so() -> None:
    model = build("unet", norm="none", width=4, levels=3)
    sample = torch.empty(1, 3, 256, 256, device="meta")
    plan = gems.plan(model, sample, ranks=1, memory="8MiB", micro_batches=1, state=0.0)
    assert plan.stream and plan.depth == 1
    assert re.search(r"streaming \d+x\d+.*: .* where the leanest without takes", plan.why)
    roomy = gems.plan(model, sample, ranks=1, memory="8GiB", micro_batches=1)
    assert not roomy.stream
    measured, _ = peaks(
        model, plan, torch.randn(1, 3, 256, 256), torch.zeros(1, 256, 256, dtype=torch.int64)
    )
    assert measured <= 8 * 2**20


def test_the_planner_lets_a_network_stream_as_far_as_it_can() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2),
    )  # fmt: skip
    sample = torch.empty(1, 3, 512, 512, device="meta")
    plan = gems.plan(
        model, sample, ranks=1, memory="2MiB", micro_batches=1, objective="image", state=0.0
    )
    assert plan.stages == (("0", "1", "2", "3", "4"), ("5", "6"))
    side = int(plan.why.split()[2])
    assert side >= 3 * 256, "of which the activations alone would take 24 times as much"
    model[1] = nn.BatchNorm2d(8)
    with pytest.raises(PlanError, match="nothing fits"):
        gems.plan(model, sample, ranks=1, memory="2MiB", micro_batches=1)


@pytest.mark.parametrize("known", [0, 10**6])
def test_blocks_may_be_known_from_the_last_time_or_not(
    known: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gems.torch.runtime.streaming.KNOWN", known)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 2, 3, padding=1))
    data = [(torch.randn(4, 3, 9, 8), torch.randint(2, (4, 9, 8))) for _ in range(2)]
    double = [(x.double(), y) for x, y in data]
    plan = Plan(stream=(3, 2), schedule="sequential", micro_batches=2)
    assert_equal(planned(model.double(), double, plan), plainly(model.double(), double, 2))


def test_python_takes_its_time_for_every_layer_of_every_block() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 2, 3, padding=1))
    plan, cpu = Plan(stream=(4, 2), schedule="sequential"), machine("cpu")
    slow = replace(cpu, device=replace(cpu.device, call=cpu.device.call + 1.0))
    graph = with_halos(trace(model, torch.empty(1, 3, 16, 16)), model)
    blocks = estimate(graph, cpu)
    (was,), (found,) = (price(blocks, graph, [0] * 3, plan, m).items for m in (cpu, slow))
    assert found.f - was.f == pytest.approx(3 * 8), "three layers on eight blocks"
    assert found.i - was.i == pytest.approx(3 * 8), "which backward runs again"
    tiles = Plan(spatial=(2, 1))
    (was,), (found,) = (price(blocks, graph, [0] * 3, tiles, m).items for m in (cpu, slow))
    assert found.f - was.f == pytest.approx(3)


def test_prediction_streams_too() -> None:
    torch.manual_seed(0)
    model = build("unet", width=2, levels=2)  # BatchNorm, which prediction freezes
    image = torch.randn(2, 3, 21, 30)
    model.eval()
    with torch.no_grad():
        expected = model(image)
    trainer = make(copy.deepcopy(model), Plan(stream=(2, 3)), tuple(image.shape))
    assert torch.allclose(trainer.predict(image), expected, atol=1e-5)


def test_the_command_line_streams(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    network, file = (
        ["--model", "tests.networks:convnext_tiny", "--image-size", "64"],
        tmp_path / "plan.json",
    )
    streamed = ["--stages", "2", "--stream", "2x2", "--out", str(file)]
    assert main(["plan", *network, *streamed]) == 0
    plan = from_json(Plan, file.read_text())
    assert plan.stream == ((2, 2),) and plan.stages[0][-1] != plan.stages[1][-1]
    assert main(["check", "--plan", str(file), *network]) == 0
    capsys.readouterr()
    file.write_text(to_json(replace(plan, stream=((2, 2), (2, 2)))))
    assert main(["check", "--plan", str(file), *network]) == 1
    assert "stage 1 streams, but" in capsys.readouterr().err
