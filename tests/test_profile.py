"""Costs that are measured: what is run, how often, and what is learned from it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from gems.errors import PeerError
from gems.hardware import machine
from gems.model.costs import Costs
from gems.model.estimate import estimate
from gems.plans.plan import Plan
from gems.torch.tracing import profile
from gems.torch.tracing.profile import measure
from gems.torch.tracing.trace import trace
from gems.torch.trainer import Trainer
from gems.transport.threads import run
from tests.exact import sgd

CPU = torch.device("cpu")


def network() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(True)]
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), *blocks, nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(8 * 144, 5),
    )  # fmt: skip


def test_equal_calls_are_measured_once() -> None:
    model = network()
    traced = trace(model, torch.empty(2, 3, 12, 12))
    with mock.patch.object(profile, "_measured", wraps=profile._measured) as timed:
        costs = measure(traced, model, CPU)
    assert len(costs) == len(traced.graph.blocks) == 8
    assert timed.call_count == 7, "the second 8-to-8 convolution is known"
    assert costs[1].seconds == costs[4].seconds


def test_each_gradient_has_its_own_seconds_and_bytes_are_the_estimates() -> None:
    model = network()
    traced = trace(model, torch.empty(2, 3, 12, 12))
    found = measure(traced, model, CPU)
    guess = estimate(traced.graph, machine("cpu"))
    first, conv, _, relu = found.items[:4]
    assert first.f > 0 and first.i == 0 and first.w > 0, "an image has no gradient"
    assert conv.f > 0 and conv.i > 0
    assert relu.f > 0 and relu.w == 0, "changed in place, and without weights"
    for a, b in zip(found.items, guess.items, strict=True):
        assert (a.activations, a.weights, a.gradients) == (b.activations, b.weights, b.gradients)


def test_the_model_is_left_as_it_was() -> None:
    model = network()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    measure(trace(model, torch.empty(2, 3, 12, 12)), model, CPU)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


@pytest.mark.parametrize("costs", ["measure", "estimate"])
def test_a_trainer_foretells_its_step_from_either(costs: str) -> None:
    trainer = Trainer(
        network(), cross_entropy, sgd,
        torch.empty(2, 3, 12, 12), Plan(micro_batches=2), costs=costs,
    )  # fmt: skip
    for _ in range(2):
        trainer.step(torch.randn(4, 3, 12, 12), torch.randint(5, (4,)))
    said, seen = trainer.forecast(), trainer.timeline()
    assert said.clock == "simulated" and said.seconds > 0
    assert said.peaks == seen.peaks and said.max_in_flight == seen.max_in_flight


# --- precision, and images that do not fit --------------------------------------------------------


def images() -> nn.Module:
    """Layers that take any image, and two that want the one they were recorded with."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), Reshaped(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(8 * 64 * 64, 5),
    )  # fmt: skip


class Reshaped(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(2, 8, 16, 8 * 128).view(2, 8, 128, 128)


def seen(model: nn.Module, **options: Any) -> tuple[Costs, dict[str, list[tuple[int, ...]]]]:
    """Costs, and the shapes that each call was run on."""
    traced = trace(model, torch.empty(2, 3, 128, 128))
    shapes: dict[str, list[tuple[int, ...]]] = {}
    plain = profile.Trial.time

    def time(self: profile.Trial) -> Any:
        shapes[self.call.name] = [x.shape for x in self.reads]
        return plain(self)

    with mock.patch.object(profile.Trial, "time", time):
        return measure(traced, model, CPU, **options), shapes


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_costs_are_measured_in_the_precision_of_training(precision: str) -> None:
    """Story: layers behind a convolution in low precision were given weights in float32."""
    options: Any = {"costs": "measure", "precision": precision}
    sample = torch.empty(2, 3, 12, 12)
    trainer = Trainer(network(), cross_entropy, sgd, sample, Plan(stages=1), **options)
    assert all(cost.f > 0 for cost in trainer.costs.items)
    trainer.step(torch.randn(2, 3, 12, 12), torch.randint(5, (2,)))


def test_a_precision_of_the_model_itself_is_that_of_its_costs() -> None:
    class Casts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside, self.after = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                x = self.after(self.inside(x))
            return x

    traced = trace(Casts(), torch.empty(1, 3, 8, 8))
    assert all(cost.f > 0 for cost in measure(traced, Casts(), CPU).items)


def test_what_does_not_fit_the_budget_is_measured_smaller_and_scaled() -> None:
    whole, shapes = seen(images())
    assert shapes["0"] == [(2, 3, 128, 128)]
    budget = 1_000_000  # the whole first convolution takes 3.3 MB, one sample 1.6 MB
    small, shapes = seen(images(), memory=budget)
    assert shapes["0"] == [(1, 3, 64, 128)] and shapes["4"] == [(1, 8, 64, 128)]
    assert "3.view" not in shapes, "it wants the image that it was recorded with: estimated"
    expected = estimate(trace(images(), torch.empty(2, 3, 128, 128)).graph, machine("cpu"))
    assert small[3].seconds == expected[3].seconds != whole[3].seconds
    assert small[0].f == pytest.approx(whole[0].f, rel=30)  # scaled: of the same order


def test_seconds_are_scaled_by_the_cells_that_were_left_out() -> None:
    with mock.patch.object(profile.Trial, "run", lambda *_: (1.0, 1.0)):
        costs, _ = seen(images(), memory=1_000_000)
    assert [costs[0].f, costs[0].b] == [4.0, 4.0] and costs[6].f == 2.0


def test_a_plan_of_tiles_or_patches_measures_as_much_as_a_rank_runs_at_a_time() -> None:
    _, shapes = seen(images(), parts=4)
    assert shapes["0"] == [(1, 3, 64, 128)]
    assert shapes["3.view"] == [(2, 8, 128, 128)], "fits, and wants its own image"
    for plan, parts in ((Plan(spatial=["2x2"]), 4), (Plan(stream=[(2, 3)]), 6), (Plan(), 1)):
        with mock.patch("gems.torch.setup.measure", side_effect=LookupError) as asked:

            def work(transport: Any, plan: Plan = plan) -> None:
                sample = torch.empty(2, 3, 128, 128)
                Trainer(
                    images(), sample=sample, plan=plan, transport=transport, costs="measure",
                    memory="2MiB",
                )  # fmt: skip

            with pytest.raises((LookupError, PeerError)):
                run(plan.world, work)
        assert asked.call_args.kwargs["parts"] == parts
        assert asked.call_args.kwargs["memory"] == 2 << 20


def test_this_computer_is_measured_by_a_command_and_known_as_local(tmp_path: Path) -> None:
    """In a process of its own: the command starts two more, and reads its cache's place once."""
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}

    def gems(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "gems", *arguments]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False)

    early = gems("machine", "--machine", "local")
    assert early.returncode == 1 and "run `gems machine`" in early.stderr
    measured = gems("machine")
    assert measured.returncode == 0, measured.stderr
    assert (tmp_path / "gems" / "local.json").is_file()
    assert "GB/s after" in gems("machine", "--machine", "local").stdout
