"""Prediction with weights in half or in int8: fewer bytes, the same outputs or near ones, under any
plan."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import gems
from gems.cli.main import main
from gems.errors import PlanError
from gems.plans.plan import Plan
from gems.torch.state.int8_weights import Dequantize, store_in_int8
from gems.torch.trainer import Trainer
from gems.transport.protocol import Transport
from gems.transport.threads import run
from tests.exact import Recordings, drawing
from tests.worlds import spawn

Tensor = torch.Tensor
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Net(nn.Module):
    """Layers that are stored in few bytes, and others; tiles need no gathering but for the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.b = nn.Conv2d(16, 16, 3, padding=1, groups=4)
        self.up = nn.ConvTranspose2d(16, 16, 2, stride=2)
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.a(x)).relu()
        x = self.up(self.b(x)).relu()
        return self.head(x.mean((2, 3)) * self.scale)


def network(seed: int = 0) -> nn.Module:
    with drawing(seed):
        model = Net()
        model.norm.running_mean = torch.randn(16)
        model.norm.running_var = torch.rand(16) + 0.5
    return model.eval()


def images(samples: int = 4) -> Tensor:
    return torch.randn(samples, 3, 16, 16, generator=torch.Generator().manual_seed(1))


PLANS = {
    "one device": Plan(stages=1, micro_batches=2, schedule="sequential"),
    "both directions": Plan(stages=2, schedule="gems", replications=1),
    "tiles": Plan(stages=2, micro_batches=2, spatial=[(2, 2)]),
    "patches": Plan(
        stages=(("a", "norm", "relu", "b", "up", "relu:2"), ("mean", "mul", "head")),
        ranks=1, micro_batches=2, schedule="sequential", stream=(2, 2),
    ),
    "zero=3": Plan(stages=2, ranks=1, micro_batches=1, schedule="sequential", data=2, zero=3),
    "offloaded": Plan(
        stages=2, ranks=1, micro_batches=2, schedule="sequential", offload=("weights",)
    ),
}  # fmt: skip


def predicted(plan: Plan, precision: str, work: Any = None) -> list[Any]:
    """Of each rank, the output and the most bytes of weights."""

    def body(transport: Transport) -> Any:
        sample = images(1)
        with Trainer(
            network(), sample=sample, plan=plan, precision=precision, transport=transport
        ) as trainer:
            if work is not None:
                return work(trainer)
            output = trainer.predict(images())
            assert trainer.session.measured is not None
            return output, max(m.weights for _, m in trainer.session.measured.memory[0])

    with mock.patch("gems.torch.tracing.trace.record", Recordings()):
        return run(plan.world, body)


# --- half -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", TYPES)
@pytest.mark.parametrize("name", PLANS)
def test_weights_in_half_predict_as_autocast_does(name: str, precision: str) -> None:
    """Bit for bit: autocast casts fp32 weights to the same numbers. On tiles and patches sums
    have other orders, so that some numbers round the other way."""
    plain = network()
    with torch.no_grad(), torch.autocast("cpu", TYPES[precision]):
        expected = torch.cat([plain(x) for x in images().split(1 if "dir" in name else 2)])
    for output, _ in predicted(PLANS[name], precision):
        if name in ("tiles", "zero=3", "patches"):
            assert torch.allclose(output.float(), expected.float(), rtol=0.02, atol=0.005)
        else:
            assert torch.equal(output, expected)


def test_weights_take_half_of_the_memory() -> None:
    """By the engine's counters: but for the norm's, which stay."""
    model = network()
    kept = sum(x.nbytes for x in (*model.get_submodule("norm").parameters(), *model.buffers()))
    layers = [model.get_submodule(name) for name in ("a", "b", "up", "head")]
    full = sum(p.nbytes for p in model.parameters()) - 2 * 4 * 16
    for name in ("one device", "patches"):
        (_, fp32), (_, half), (_, int8) = (
            predicted(PLANS[name], precision)[0] for precision in ("fp32", "bf16", "int8")
        )
        assert fp32 == full + kept
        assert half == full // 2 + kept
        numbers = sum(layer.get_parameter("weight").numel() for layer in layers)
        scales = 4 * (16 + 16 + 16 + 4)
        biases = 4 * (16 + 16 + 16 + 4 + 1)
        assert int8 == numbers + scales + biases + kept


# --- int8 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLANS)
def test_int8_is_the_same_under_any_plan_and_near_full_precision(name: str) -> None:
    rounded = network()
    report = store_in_int8(rounded)
    assert report.converted == ("a", "b", "up", "head")
    assert report.others == ("Net", "BatchNorm2d")
    assert "not converted: 1 Net, 1 BatchNorm2d" in str(report)
    with torch.no_grad():
        expected, full = rounded(images()), network()(images())
    assert 0 < (expected - full).abs().max() < 0.02 * full.abs().max()
    for output, _ in predicted(PLANS[name], "int8"):
        assert torch.allclose(output, expected, rtol=1e-5, atol=1e-6)


def test_a_rounded_weight_is_off_by_half_a_scale() -> None:
    weight = torch.randn(6, 5, 3, 3) * torch.logspace(-3, 3, 6).view(-1, 1, 1, 1)
    for dim in (0, 1):
        rounding = Dequantize(dim)
        numbers, scale = rounding.right_inverse(weight)
        assert numbers.dtype == torch.int8 and scale.numel() == weight.shape[dim]
        assert ((rounding(numbers, scale) - weight).abs() <= 0.501 * scale).all()


def test_weights_that_come_later_are_rounded_too(tmp_path: Path) -> None:
    wanted = network(5)
    with Trainer(network(5), cross_entropy, torch.optim.Adam, images(1), Plan()) as trainer:
        trainer.save(tmp_path / "saved", extra={"at": 3})
    expected = copy.deepcopy(wanted)
    store_in_int8(expected)

    def work(trainer: Trainer) -> Any:
        trainer.load_state_dict(wanted.state_dict())
        first = trainer.predict(images())
        trainer.load_state_dict(network().state_dict())
        assert trainer.load(tmp_path / "saved") == {"at": 3}
        return first, trainer.predict(images())

    for outputs in predicted(PLANS["both directions"], "int8", work):
        for output in outputs:
            assert torch.allclose(output, expected(images()), rtol=1e-5, atol=1e-6)


def test_what_int8_cannot_do_is_rejected() -> None:
    sample = images(1)
    with pytest.raises(PlanError, match="int8' is for prediction"):
        Trainer(network(), cross_entropy, torch.optim.Adam, sample, Plan(), precision="int8")
    with pytest.raises(PlanError, match="has none that it may round, but BatchNorm2d"):
        Trainer(nn.BatchNorm2d(3), sample=sample, plan=Plan(), precision="int8")
    with torch.device("meta"):
        model = Net()
    with pytest.raises(PlanError, match="some are on the meta device"):
        Trainer(model, sample=sample, plan=Plan(), precision="int8")
    with pytest.raises(PlanError, match="precision 'int8' is unknown"):
        gems.plan(network(), sample, ranks=1, machine="cpu", precision="int8")


def test_shared_and_derived_layers_stay() -> None:
    class Own(nn.Linear):
        pass

    tied = nn.Linear(4, 4)
    model = nn.Sequential(nn.Linear(4, 4), tied, nn.Linear(4, 4), Own(4, 4))
    model[2].weight = tied.weight
    report = store_in_int8(model)
    assert report.converted == ("0",) and report.others == ("Linear", "Linear", "Own")


# --- boxes ----------------------------------------------------------------------------------------


class Volume:
    """A volume that exists only where it is read."""

    def __init__(self, side: int) -> None:
        self.shape, self.dtype, self.most = (1, 1, side, side, side), torch.float32, 0

    def __getitem__(self, box: tuple[slice, ...]) -> Tensor:
        places = [torch.arange(part.start, part.stop, dtype=torch.float32) for part in box[2:]]
        z, y, x = torch.meshgrid(places, indexing="ij")
        found = (z * 0.7).sin() + (y * 0.3).cos() * (x * 0.1).sin()
        self.most = max(self.most, found.numel())
        return found[None, None]


@pytest.mark.parametrize("precision", ("bf16", "int8"))
def test_a_volume_is_never_in_memory_as_a_whole(precision: str) -> None:
    with drawing(0):
        model = nn.Sequential(
            nn.Conv3d(1, 4, 3, padding=1), nn.BatchNorm3d(4), nn.ReLU(), nn.MaxPool3d(4),
            nn.Conv3d(4, 2, 1),
        ).eval()  # fmt: skip
    plain, volume = copy.deepcopy(model), Volume(32)
    if precision == "int8":
        store_in_int8(plain)
    half = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")
    with torch.no_grad(), half:
        expected = plain(volume[tuple(slice(0, n) for n in volume.shape)])
    volume.most = 0
    sample = torch.empty(1, 1, 32, 32, 32)
    plan = Plan(stages=1, stream=(4, 4, 4))
    with Trainer(model, sample=sample, plan=plan, precision=precision) as trainer:
        output = trainer.predict(volume)
    assert volume.most <= (8 + 2) ** 3, "a patch and its border"
    near = 0.01 if precision == "bf16" else 1e-6
    assert torch.allclose(output.float(), expected.float(), rtol=near, atol=near)


# --- processes ------------------------------------------------------------------------------------


def over_gloo(transport: Transport, precisions: Sequence[str]) -> list[Tensor]:
    found = []
    for precision in precisions:
        plan = PLANS["both directions"]
        trainer = Trainer(
            network(), sample=images(1), plan=plan, precision=precision, transport=transport
        )
        found.append(trainer.predict(images()))
    return found


def test_gloo_processes_predict_in_few_bytes() -> None:
    precisions = ("bf16", "int8")
    expected = [predicted(PLANS["both directions"], precision)[0][0] for precision in precisions]
    for outputs in spawn(2, over_gloo, precisions):
        for output, wanted in zip(outputs, expected, strict=True):
            assert torch.equal(output, wanted)


# --- the command line -----------------------------------------------------------------------------


def test_gems_eval_reports_what_int8_costs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ["eval", "--app", "synthetic", "--samples", "24", "--image-size", "32", "--part", "all"]
    base += ["--model", "tests.tiny:net", "--batch-size", "4", "--enable-evaluation"]
    assert main([*base, "--precision", "int8", "--out", str(tmp_path)]) == 0
    assert "weights in int8: 3 layers (stem.0, body.0, head); not" in capsys.readouterr().out
    found = json.loads((tmp_path / "metrics.json").read_text())
    assert found["same_class_as_fp32"] >= 0.8 and found["largest_difference_to_fp32"] < 0.02
    assert abs(found["accuracy"] - found["fp32_accuracy"]) <= 0.2
    assert found["images_per_second"] > 0
    assert 0 < found["batch_latency"]["median"] <= found["batch_latency"]["p95"]
    assert main([*base, "--precision", "fp32", "--compare-fp32"]) == 1
    assert "give bf16, fp16 or int8" in capsys.readouterr().err
