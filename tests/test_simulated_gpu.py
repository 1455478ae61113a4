"""Unmodified trainer steps on a simulated GPU over a simulated NCCL: devices, races, launches and
host synchronisations. tests/simulated_gpu says what is simulated and what is not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.simulated_gpu.build import CannotBuild, build

Found = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What the last step of each family asked of the GPU."""
    try:
        library = build(tmp_path_factory.mktemp("simulated-gpu"))
    except CannotBuild as error:
        pytest.skip(f"the simulated GPU cannot be built: {error}")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.simulated_gpu", str(library)],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_a_missing_wait_is_a_race(simulated: Found) -> None:
    for mistake, stream in (("no wait for messages", "irecv"), ("no wait for copies", "copy_")):
        races = simulated[mistake]["races"]
        assert any(f"reads what {stream}" in race for race in races), mistake


def test_a_read_inside_a_step_is_a_synchronisation(simulated: Found) -> None:
    inside = simulated["item in the loss"]["inside"]
    assert [count for where, count in inside.items() if "_reading_loss" in where] == [1]


def test_one_more_kernel_is_one_more_launch(simulated: Found) -> None:
    more, usual = (simulated[name]["launches"] for name in ("one more launch", "one rank"))
    assert sum(more.values()) == sum(usual.values()) + 1


def test_a_tensor_on_another_device_is_found(simulated: Found) -> None:
    assert any("_astray_loss" in where for where in simulated["another device"]["misplaced"])


def test_a_host_tensor_over_nccl_is_found(simulated: Found) -> None:
    found = simulated["host tensor over NCCL"]
    assert any("over NCCL" in where for where in found["misplaced"])
    assert "NCCL takes tensors on CUDA, not on cpu" in found["error"]
