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
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import gems
from benchmarks.pipeline.livebytes import LiveBytes
from gems.cli.main import main
from gems.errors import PlanError
from gems.files import from_json, to_json
from gems.hardware import machine
from gems.model.estimate import estimate
from gems.plans.plan import Plan
from gems.predict.stage_costs import price
from gems.torch.runtime.stage_programs import StagePrograms
from gems.torch.spatial.halo_costs import with_halos
from gems.torch.spatial.partition import CallNotTileable
from gems.torch.spatial.rules.conv_pool import CONVOLUTIONS
from gems.torch.tracing.trace import trace
from gems.torch.trainer import Trainer
from gems.transport.protocol import Transport
from gems.transport.threads import run
from tests.exact import Outcome, assert_equal, join, plainly, planned, trained
from tests.networks import build
from tests.spatial import Plain, Seen
from tests.test_spatial_generated import GRIDS, Function, some_cut, stack
from tests.worlds import spawn

Tensor = torch.Tensor
CASES = int(os.environ.get("GEMS_STREAMS", "250"))
TILES = [(2,), (3,), (1, 2), (2, 1), (2, 2), (1, 3), (1, 1, 2), (2, 1, 1), (1, 2, 2)]


def an_end(r: Random, dims: int) -> nn.Module:
    """A mean or a sum over the image, or over parts of it, which adds up block by block."""
    kind = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)[dims - 1]
    if r.random() < 0.5:
        return kind(r.randint(1, 3))
    return Function(r.choice((torch.mean, torch.sum)), tuple(range(2, 2 + r.randint(1, dims))))


def network(number: int) -> Plain:
    """Norms are in training mode, most often; there may be squeeze-and-excitation, and a mean over
    the image, in the middle and at the end."""
    r = Random(f"stream {number}")
    torch.manual_seed(number)
    dims = r.choice((1, 2, 2, 2, 2, 3))
    sides = {1: (6, 20), 2: (5, 13), 3: (4, 7)}[dims]
    shape = (r.randint(1, 2), r.randint(2, 4), *(r.randint(*sides) for _ in range(dims)))
    model, _ = stack(r, shape, r.randint(1, 7))
    if r.random() < 0.4:
        model = nn.Sequential(model, an_end(r, dims))
    frozen = r.random() < 0.2
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase):
            module.train(not frozen)
    drops = any(isinstance(m, nn.modules.dropout._DropoutNd) for m in model.modules())
    # Norms of one sample, too: torch's own backward of them may be wrong (norm_gradients.py).
    return Plain(model, torch.randn(shape), keyed=drops or shape[0] == 1)


def amplified(plain: Plain) -> bool:
    """Whether rounding of inputs and parameters is multiplied beyond what is compared: a norm of
    what is constant divides by the root of its eps; a maximum chooses among what is equal; a kink
    is where the result of a norm is zero."""
    draw = torch.Generator().manual_seed(0)

    def seen(rounding: float) -> Seen:
        inputs = (x.detach() for x in plain.inputs)
        noise = (1 + rounding * torch.randn(x.shape, generator=draw).double() for x in plain.inputs)
        nudged = (x * n.to(x.dtype) for x, n in zip(inputs, noise, strict=True))
        model = copy.deepcopy(plain.model)
        for p in model.parameters():
            p.data += rounding * torch.randn(p.shape, generator=draw).to(p.dtype)
        return Plain(model, *nudged, keyed=True).seen

    same, others = seen(0), [seen(4e-16) for _ in range(4)]
    pairs = [(x.outputs, same.outputs) for x in others]
    pairs += [(x.gradients, same.gradients) for x in others]
    return any(
        float((a[n] - x).detach().abs().max()) > 1e-13 * max(1, float(x.detach().abs().max()))
        for a, b in pairs
        for n, x in b.items()
        if x.is_floating_point() and x.numel()
    )


def tried(number: int, run: Any) -> bool:
    """Whether a network could be streamed; if so, it did the same."""
    plain = network(number)
    try:
        run(plain)
        return True
    except CallNotTileable:
        return False  # a maximum over the whole image, or its far end
    except AssertionError as error:
        if amplified(plain):
            return False
        error.add_note(f"try {number}\n{plain.model}")
        raise


@pytest.mark.parametrize("number", range(CASES), ids=lambda n: f"case_{n}_")
def test_a_generated_network_does_the_same_block_by_block(number: int) -> None:
    """Every other one carries halos."""

    def streamed(tried: int, plain: Plain) -> None:
        shape = tuple(plain.inputs[0].shape)
        cut = some_cut(Random(f"cut {tried}"), shape, GRIDS[len(shape) - 2])
        plain.stream(cut["grid"], cut["points"], carry=number % 2 == 1)

    numbers = range(number, number + 50 * CASES, CASES)
    assert any(tried(k, lambda plain, k=k: streamed(k, plain)) for k in numbers)


@pytest.mark.parametrize("number", range(CASES), ids=lambda n: f"case_{n}_")
def test_a_generated_network_does_the_same_by_blocks_of_tiles(number: int) -> None:
    """Every other one carries halos from block to block of a tile."""

    def streamed(tried: int, plain: Plain) -> None:
        r = Random(f"tiles {tried}")
        dims = plain.inputs[0].dim() - 2
        tiles = r.choice([t for t in TILES if len(t) == dims])
        plain.stream_tiles(tiles, [r.randint(1, 3) for _ in tiles], carry=number % 2 == 1)

    numbers = range(number, number + 50 * CASES, CASES)
    assert any(tried(k, lambda plain, k=k: streamed(k, plain)) for k in numbers)


class LastFirst(nn.Module):
    """Its gradient comes with channels last, whatever the batch."""

    def forward(self, x: Tensor) -> Tensor:
        dims = range(2, x.dim())
        return x.permute(0, *dims, 1).contiguous().permute(0, x.dim() - 1, *(d - 1 for d in dims))


NORMS = {
    "batch norm": nn.BatchNorm2d,
    "instance norm": partial(nn.InstanceNorm2d, affine=True, track_running_stats=True),
    "group norm": partial(nn.GroupNorm, 2),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("name", NORMS)
def test_gradients_of_any_strides_enter_norms(name: str, samples: int, training: bool) -> None:
    """torch's own backward of norms of one sample is wrong for some (tests/test_strides.py)."""
    norm = NORMS[name](4)
    for x in (*norm.parameters(), *norm.buffers()):
        if x.is_floating_point():
            nn.init.uniform_(x, 0.5, 1.5)
    model = nn.Sequential(norm.train(training), LastFirst())
    plain = Plain(model, torch.randn(samples, 4, 7, 6), keyed=True)
    plain.stream((3, 2))
    plain.stream_tiles((1, 2), (2, 1))
    plain.cut((1, 2))


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


def residual(frozen: bool = True) -> nn.Module:
    """A pre-activation ResNet, with frozen BatchNorms or in training mode."""
    torch.manual_seed(0)
    model = build("resnet_v2", depth=11, width=4, num_classes=3)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0, 0.3)
            if frozen:
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
    "tiles": Plan(stages=1, spatial="1x2", stream="3x2", micro_batches=2, schedule="sequential"),
    "tiles, then fewer": Plan(stages=3, spatial=["2x2", "1x2"], stream=["2x2", "3x2"]),
    "tiles, of which some stream": Plan(stages=3, spatial=["2x1", "2x1"], stream="2x2"),
    "tiles both ways": Plan(stages=2, spatial="1x2", stream=2, schedule="gems", replications=1),
    "tiles, weights apart": Plan(
        stages=3, spatial="vertical:2", stream="2x2", schedule="zero-bubble", micro_batches=3
    ),
    "tiles, copies": Plan(stages=2, spatial="2x1", stream="2x2", data=2, micro_batches=1),
    "tiles, others keep inputs": Plan(
        stages=3, spatial="2x1", stream="2x2", recompute="always", micro_batches=2
    ),
    "tiles, offloaded": Plan(
        stages=2,
        spatial="2x1",
        stream="2x2",
        offload="activations",
        schedule="gpipe",
        micro_batches=4,
    ),
    "others are slices": Plan(stages=2, stream=(2, 2), local_dp=2, schedule="gpipe"),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_residual_network_trains_like_the_plain_one(name: str) -> None:
    """Its BatchNorms are in training mode: running statistics are among what is compared."""
    plan, model = PLANS[name], residual(frozen=False)
    data = noise((4, 3, SIDE, SIDE - 4), 3, (4,))
    assert_equal(planned(model, data, plan), plainly(model, data, plan.total))


def test_frozen_norms_stay_as_they_are() -> None:
    model, data = residual(), noise((4, 3, SIDE, SIDE - 4), 3, (4,))
    plan = PLANS["tiles"]
    assert_equal(planned(model, data, plan), plainly(model, data, plan.total))


def one_rank(transport: Transport, plan: Plan) -> Outcome:
    data = noise((4, 3, SIDE, SIDE - 4), 3, (4,), 1)
    return trained(transport, residual(frozen=False), data, plan)


@pytest.mark.parametrize("name", ["others keep inputs", "tiles, others keep inputs"])
def test_over_processes(name: str) -> None:
    plan = PLANS[name]
    found = join(spawn(plan.world, one_rank, plan))
    data = noise((4, 3, SIDE, SIDE - 4), 3, (4,), 1)
    assert_equal(found, plainly(residual(frozen=False), data, plan.total))


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


@pytest.mark.parametrize("norm", ["none", "batch"])
@pytest.mark.parametrize("tiles", [(), ("1x2",), ("2x2", "1x2", "1x2")])
@pytest.mark.parametrize("stages", [1, 3])
def test_skips_of_a_u_net_run_inside_the_blocks_and_between_stages(
    stages: int, tiles: tuple[str, ...], norm: str
) -> None:
    torch.manual_seed(0)
    model = build("unet", norm=norm, width=2, levels=3).double()
    data = noise((1, 3, 27, 22), 2, (1, 27, 22))
    plan = Plan(stages=stages, stream=["3x2"] * stages, spatial=tiles[:stages])
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
    "AdaptiveMaxPool2d": nn.AdaptiveMaxPool2d(2),
    "Softmax": nn.Softmax(2),
    "Conv2d": nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"),
}


def make(model: nn.Module, plan: Plan, shape: tuple[int, ...], **options: Any) -> Trainer:
    found = run(plan.world, lambda t: Trainer(model, sample=torch.empty(shape), plan=plan,
                                              transport=t, **options))  # fmt: skip
    return found[0]


@pytest.mark.parametrize("kind", REFUSED)
def test_what_needs_the_whole_image_is_refused_before_anything_runs(kind: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), copy.deepcopy(REFUSED[kind]), nn.Conv2d(4, 4, 1))
    with pytest.raises(PlanError, match=rf"stage 0 streams 2x2.* 1 \({kind}\).*end at 0"):
        make(model, Plan(stream=(2, 2)), (1, 3, 16, 16))


def test_a_plan_says_what_cannot_be_streamed() -> None:
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


class Labels(Picture):
    """The same of classes."""

    dtype = "int64"

    def __getitem__(self, box: tuple[slice, ...]) -> Tensor:
        return super().__getitem__(box).long()


def peaks(model: nn.Module, plan: Plan, image: Any, target: Any) -> tuple[int, int]:
    """Most bytes of a step, measured and predicted."""

    def work(transport: Any) -> tuple[int, int]:
        trainer = Trainer(
            copy.deepcopy(model), F.cross_entropy, lambda p: torch.optim.SGD(p, 0.1),
            torch.empty(image.shape[0] // plan.total, *image.shape[1:]), plan, transport=transport,
        )  # fmt: skip
        trainer.step(image, target)
        return trainer.peak, trainer.forecast().peaks[0].total

    return run(plan.world, work)[0]


def test_less_is_live_the_more_blocks_there_are_and_as_much_as_was_predicted() -> None:
    torch.manual_seed(0)
    model = build("unet", norm="none", width=4, levels=3)
    image, target = torch.randn(1, 3, 288, 288), torch.randint(2, (1, 288, 288))
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


def test_the_gradient_that_each_patch_makes_of_a_weight_is_counted() -> None:
    """Story: a U-Net of width 64 took 288 MiB where 247 were counted and predicted: the gradient of
    its largest weight is there twice, until that of a patch is added to that of those before."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 128, 3))
    image, target = torch.randn(1, 3, 32, 32), torch.zeros(1, 30, 30, dtype=torch.int64)
    resident = sum(p.nbytes for p in model.parameters())
    trainer = Trainer(
        model, F.cross_entropy, lambda p: torch.optim.SGD(p, 0.1),
        torch.empty(image.shape, device="meta"), Plan(stream=(8, 8)), costs="estimate",
    )  # fmt: skip
    with LiveBytes() as live:
        trainer.step(image, target)
    assert trainer.peak == pytest.approx(live.peak + resident, rel=0.05)
    assert trainer.forecast().peaks[0].total == pytest.approx(trainer.peak, rel=0.05)


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


def test_with_values_in_a_store_bytes_depend_on_the_patch_and_not_on_the_image() -> None:
    """Of a network with BatchNorm in training mode: four times the image, and as many patches."""
    sides = (64, 128)
    data = [(torch.randn(2, 3, n, n), torch.randint(2, (2, n, n)), n // 32) for n in sides]
    for tiles, share in (((), 1), ("1x2", 2)):
        found = []
        for image, target, parts in data:
            torch.manual_seed(0)
            model = build("unet", norm="batch", width=4, levels=3)
            plan = Plan(
                stream=(parts, parts // share), spatial=tiles, offload=("values:host",),
                micro_batches=2, schedule="sequential",
            )  # fmt: skip
            measured, predicted = peaks(model, plan, image, target)
            assert predicted == pytest.approx(measured, rel=0.05)
            found.append(measured)
        assert found[1] <= 1.1 * found[0]


# --- the loss -------------------------------------------------------------------------------------


def dice(scores: Tensor, target: Tensor) -> Tensor:
    p, one = scores.softmax(1), F.one_hot(target, scores.shape[1]).movedim(-1, 1).to(scores.dtype)
    both, each = (p * one).sum((0, 2, 3)), p.sum((0, 2, 3)) + one.sum((0, 2, 3))
    return 1 - (2 * both / (each + 1e-6)).mean()


def focal(scores: Tensor, target: Tensor) -> Tensor:
    entropy = F.cross_entropy(scores, target, reduction="none")
    return ((1 - torch.exp(-entropy)) ** 2 * entropy).mean()


def squares(scores: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(scores.softmax(1)[:, 0], target.to(scores.dtype))


def weighted() -> nn.Module:
    return nn.CrossEntropyLoss(torch.tensor([0.3, 1.7], dtype=torch.float64), ignore_index=1)


LOSSES: dict[str, Any] = {
    "cross-entropy": F.cross_entropy,
    "weighted, and some ignored": weighted(),
    "smoothed": nn.CrossEntropyLoss(label_smoothing=0.1),
    "Dice": dice,
    "focal": focal,
    "squares": squares,
    "a sum": nn.CrossEntropyLoss(reduction="sum"),
}


@pytest.mark.parametrize("tiles", [(), "1x2"])
@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_is_computed_block_by_block(
    name: str, tiles: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_loss, used = StagePrograms.stream_with_loss, []
    monkeypatch.setattr(
        StagePrograms, "stream_with_loss", lambda *a: used.append(1) or with_loss(*a)
    )
    torch.manual_seed(0)
    model = build("unet", norm="batch", width=2, levels=2).double()
    data, plan = noise((2, 3, 19, 22), 2, (2, 19, 22)), Plan(stream="3x2", spatial=tiles)
    loss = LOSSES[name]
    assert_equal(planned(model, data, plan, loss), plainly(model, data, 1, loss))
    assert used


def test_a_loss_that_looks_at_all_cells_at_once_gets_the_whole_output() -> None:
    def hardest(scores: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(scores, target, reduction="none").flatten().topk(40).values.mean()

    torch.manual_seed(0)
    model = build("unet", norm="batch", width=2, levels=2).double()
    data = noise((1, 3, 19, 22), 2, (1, 19, 22))
    found = planned(model, data, Plan(stream="3x2"), hardest)
    assert_equal(found, plainly(model, data, 1, hardest))


def test_of_targets_and_outputs_no_more_than_a_block_is_there() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 8, 1))
    found = []
    for parts in (4, 8):
        image, target = Picture(1, 3, 32 * parts, 32 * parts), Labels(1, 32 * parts, 32 * parts)
        measured, predicted = peaks(
            copy.deepcopy(model), Plan(stream=(parts, parts)), image, target
        )
        assert predicted == pytest.approx(measured, rel=0.05)
        assert target.largest == 32 * 32
        found.append(measured)
    assert found[0] == found[1]


def test_statistics_in_float32_are_as_near_as_the_plain_ones() -> None:
    """Means are far from 0 beside the deviations: E[x^2] - E[x]^2 would lose half of the digits."""
    torch.manual_seed(0)
    first = nn.Conv2d(3, 8, 3, padding=1)
    nn.init.constant_(first.bias, 300.0)
    model = nn.Sequential(first, nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 2, 1))
    data = noise((2, 3, 64, 64), 2, (2, 64, 64), 1)
    exact = plainly(copy.deepcopy(model).double(), data, 1)
    single = [(x.float(), y) for x, y in data]
    plain = plainly(copy.deepcopy(model), single, 1)
    found = planned(model, single, Plan(stream="4x4"))

    def off(mine: Outcome) -> float:
        pairs = [(mine.gradients[0][n], g) for n, g in exact.gradients[0].items()]
        return max(float((a - b).norm() / b.norm()) for a, b in pairs if n_is(a, b))

    def n_is(a: Any, b: Any) -> bool:
        return a is not None and float(b.norm()) > 1e-9  # a bias before a norm has no gradient

    assert off(found) <= 1.1 * off(plain)


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
    model[1] = nn.BatchNorm2d(8)  # streams as well
    assert gems.plan(model, sample, ranks=1, memory="2MiB", micro_batches=1).stream


@pytest.mark.parametrize("known", [0, 10**6])
def test_blocks_may_be_known_from_the_last_time_or_not(
    known: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gems.torch.runtime.stream_code.KNOWN", known)
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
    assert found.f == was.f == 0, "with the loss, patches run in backward only"
    assert found.i - was.i == pytest.approx(3 * 8), "three layers on eight blocks"
    tiles = Plan(spatial=(2, 1))
    (was,), (found,) = (price(blocks, graph, [0] * 3, tiles, m).items for m in (cpu, slow))
    assert found.f - was.f == pytest.approx(3)


@pytest.mark.parametrize("offload", [(), ("values:disk",)])
def test_a_convolution_before_a_norm_is_priced_once_unless_a_store_has_its_output(
    offload: tuple[str, ...],
) -> None:
    """Five layers on four blocks in two sweeps, a norm in both; backward leaves out one."""
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
    )
    plan, cpu = Plan(stream=(2, 2), schedule="sequential", offload=offload), machine("cpu")
    slow = replace(cpu, device=replace(cpu.device, call=cpu.device.call + 1e3))
    graph = with_halos(trace(model, torch.empty(2, 3, 16, 16)), model)
    blocks = estimate(graph, cpu)
    (was,), (found,) = (price(blocks, graph, [0] * 4, plan, m).items for m in (cpu, slow))
    assert found.f - was.f == pytest.approx(5 * 4 * 1e3, rel=1e-4)
    assert found.i - was.i == pytest.approx((5 if offload else 4) * 4 * 1e3, rel=1e-4)


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
    assert main(["check", "--plan", str(file), *network]) == 0, "also its head, which runs once"


# --- what is not computed twice -------------------------------------------------------------------


def counting(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The cells of each convolution that is computed forward, from now on."""
    found: list[int] = []
    run = F.conv2d

    def conv2d(x: Tensor, *args: Any) -> Tensor:
        y = run(x, *args)
        found.append(y[0, 0].numel())
        return y

    monkeypatch.setitem(CONVOLUTIONS, 2, conv2d)
    return found


def test_patches_that_end_at_the_loss_run_in_backward_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their gradients are those of a sum, times what is known of the targets alone."""
    cells = counting(monkeypatch)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Tanh(), nn.Conv2d(4, 2, 1)).double()
    data = noise((2, 3, 12, 12), 2, (2, 12, 12))
    for name, times in (("weighted, and some ignored", 1), ("squares", 1), ("Dice", 2)):
        cells.clear()
        plan, loss = Plan(stream="2x3", micro_batches=2), LOSSES[name]
        found = planned(copy.deepcopy(model), data, plan, loss)
        assert_equal(found, plainly(copy.deepcopy(model), data, 2, loss))
        assert sum(cells) == times * len(data) * 2 * 2 * 144, name


@pytest.mark.parametrize("tiles", [(), "1x2"])
def test_a_convolution_before_a_norm_is_not_run_again(
    tiles: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it made is stored for the norm: backward goes through it from there."""
    cells = counting(monkeypatch)
    model, data = residual(frozen=False), noise((1, 3, 24, 24), 3, (1,), steps=1)
    found = planned(copy.deepcopy(model), data, Plan(stream="3x2", spatial=tiles))
    plain, once = copy.deepcopy(model), []
    for module in plain.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(lambda m, x, y: once.append(y[0, 0].numel()))
    plain(data[0][0])
    assert sum(cells) == sum(once)
    assert_equal(found, plainly(copy.deepcopy(model), data, 1))


def test_patches_that_are_alike_share_one_program() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(4, 2, 3, padding=1),
    )  # fmt: skip
    stream = Plain(model, torch.randn(1, 3, 48, 48)).stream((6, 6))
    programs = [
        {id(run) for runs in s.known.values() for run in runs.values()} for s in stream.swept
    ]
    calls = [len(s.laid.calls) for s in stream.swept]
    assert all(0 < len(p) <= 9 * n for p, n in zip(programs, calls, strict=True))
