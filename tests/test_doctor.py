"""`gems doctor`: what it compares, what it finds, what it writes."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch

from gems.cli.main import main
from gems.torch import doctor
from gems.torch.parity import verify
from gems.transport.threads import World
from tests.exact import drawing


def gems(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gems", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_family_of_the_doctor_is_a_plan_for_its_ranks(world: int) -> None:
    assert {plan.world for plan in doctor.plans(world).values()} == {world}
    assert set(doctor.plans(world)) < set(doctor.names(world))


@pytest.mark.parametrize("name", doctor.plans(1))
def test_one_rank_equals_the_plain_loop(name: str) -> None:
    with drawing(0):
        found = doctor.parity(1, name, transport=World(1).rank(0))
    assert found.passed, found.seen


def test_the_doctor_names_what_differs() -> None:
    with mock.patch.object(doctor, "verify", partial(verify, tolerance=-1.0)):
        found = doctor.parity(1, "one rank", transport=World(1).rank(0))
    assert not found.passed and "loss: 0.0e+00" in found.seen


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
