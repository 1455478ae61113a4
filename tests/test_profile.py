"""Costs that are measured: what is run, how often, and what is learned from it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from gems.hardware import machine
from gems.model.estimate import estimate
from gems.plans.plan import Plan
from gems.torch.tracing import profile
from gems.torch.tracing.profile import measure
from gems.torch.tracing.trace import trace
from gems.torch.trainer import Trainer

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
    with mock.patch.object(profile, "_time", wraps=profile._time) as timed:
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
        network(), cross_entropy, lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        torch.empty(2, 3, 12, 12), Plan(micro_batches=2), costs=costs,
    )  # fmt: skip
    for _ in range(2):
        trainer.step(torch.randn(4, 3, 12, 12), torch.randint(5, (4,)))
    said, seen = trainer.forecast(), trainer.timeline()
    assert said.clock == "simulated" and said.seconds > 0
    assert said.peaks == seen.peaks and said.max_in_flight == seen.max_in_flight


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
