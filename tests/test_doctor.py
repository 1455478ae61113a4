"""`gems doctor` and `gems verify`: what they compare, what they find, what they write."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from gems.cli.main import main
from gems.errors import PlanError
from gems.plans.plan import Plan
from gems.torch import doctor, parity
from gems.transport.threads import run
from tests.exact import drawing

SMALL = ["--model", "resnet-v2", "--num-layers", "11", "--num-filters", "4", "--image-size", "16"]


def gems(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gems", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


def compared(model: nn.Module, plan: Plan) -> parity.Parity:
    sample = torch.empty(2, 3, 8, 16)

    def work(transport: Any) -> parity.Parity | None:
        return parity.compare(model, sample, plan, transport=transport, costs="estimate")

    first, *others = run(plan.world, work)
    assert first is not None and others == [None] * (plan.world - 1)
    return first


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_family_of_the_doctor_is_a_plan_for_its_ranks(world: int) -> None:
    assert {plan.world for plan in doctor.plans(world).values()} == {world}
    assert set(doctor.plans(world)) < set(doctor.names(world))


@pytest.mark.parametrize("name", doctor.plans(1))
def test_one_rank_equals_the_plain_loop(name: str) -> None:
    with drawing(0):
        model = doctor.network(1)
    assert compared(model, doctor.plans(1)[name]).error < 1e-10


def test_random_layers_are_compared_with_one_rank() -> None:
    layers = nn.Conv2d(3, 3, 3, padding=1), nn.Dropout(0.5), nn.Conv2d(3, 3, 3)
    found = compared(nn.Sequential(*layers), Plan(stages=2, micro_batches=2, schedule="1f1b"))
    assert found.oracle == parity.ONE_RANK
    assert found.error < 1e-10


@pytest.mark.parametrize("what", ["rate", "momentum"])
def test_a_wrong_update_is_found(what: str) -> None:
    """As large as those that the published code made: gradients of tiles by 0.249."""
    right, wrong = parity._plain, {"rate": (0.0025, 0.9), "momentum": (0.01, 0.0)}[what]

    def plain(*args: Any) -> Any:
        with mock.patch.object(
            parity, "_sgd", lambda p: torch.optim.SGD(p, wrong[0], momentum=wrong[1])
        ):
            return right(*args)

    with mock.patch.object(parity, "_plain", plain):
        assert compared(doctor.network(1), Plan(data=2)).error > 0.1


def test_a_plan_that_does_not_train_as_one_device_does_is_rejected() -> None:
    with pytest.raises(PlanError, match="2bw"):
        compared(doctor.network(1), Plan(stages=2, micro_batches=2, schedule="2bw"))


def test_verify_compares_over_processes(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *SMALL, "--split-size", "2", "--times", "1"]) == 0
    assert "equal: 2 steps on 2 ranks and by the plain loop" in capfd.readouterr().out


def test_verify_ends_with_1_where_numbers_differ(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *SMALL, "--tolerance", "-1"]) == 1
    assert "DIFFERENT" in capfd.readouterr().out


def test_the_doctor_runs_checks_and_goes_on_after_one_that_ends_its_ranks(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    found = gems("doctor", "messages", "lost rank", "GEMS-MASTER", "--out", str(report))
    assert found.returncode == 0, found.stdout + found.stderr
    assert "3 of 3 checks passed" in found.stdout
    written = json.loads(report.read_text())
    assert [check["name"] for check in written["checks"]] == [
        "messages",
        "lost rank",
        "GEMS-MASTER",
    ]
    assert all(check["passed"] for check in written["checks"])
    assert written["environment"]["torch"] == torch.__version__ and written["ranks"] == 2


def test_a_check_that_hangs_fails_with_its_stacks(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    found = gems("doctor", "tiles", "--patience", "0.01", "--out", str(report))
    assert found.returncode == 1
    (check,) = json.loads(report.read_text())["checks"]
    assert not check["passed"] and "Timeout" in check["seen"] and "Thread" in check["seen"]


def test_an_unknown_check_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "lungs"]) == 1
    assert "no check is called 'lungs' on 2 ranks: messages, " in capsys.readouterr().err
