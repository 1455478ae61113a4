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
MIB = 1 << 20

# By family: how often the host waits for the GPU in a step; and at most so many launches, of
# kernels and of NCCL (messages and collectives).
FAMILIES = {
    "one rank": (1, 62, 0),
    "bf16": (1, 85, 0),
    "fp16": (1, 110, 0),
    "offloaded activations": (1, 235, 0),
    "offloaded weights (l2l)": (2, 206, 0),
    "offloaded weights, eager steps": (7, 206, 0),
    "offloaded optimizer": (1, 106, 0),
    "data=2, clip": (1, 150, 2),
    "data=2, batches on the GPU": (1, 145, 2),
    "zero=3": (1, 186, 7),
    "gems": (1, 150, 6),
    "1f1b": (0, 136, 32),
    "1f1b, last stage": (1, 112, 16),
    "zero-bubble": (0, 144, 32),
    "2bw": (0, 64, 12),
    "2bw, last stage": (1, 84, 6),
    "tiles 2x2": (1, 584, 18),
    "tiles 4x4": (1, 1188, 18),
    "tiles 4x4, halo d2": (1, 870, 12),
}
# The optimizer runs on the host, and waits for gradients to come there: with eager steps in a
# thread of its own, for the copies of each stage in both directions.
ON_HOST = ("offloaded weights (l2l)", "offloaded weights, eager steps")
pytestmark = pytest.mark.timeout(900)  # the first test waits for all of them
each_family = pytest.mark.parametrize("name", FAMILIES)


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


@each_family
def test_nothing_races_and_all_is_on_the_device_of_the_rank(name: str, simulated: Found) -> None:
    found = simulated[name]
    assert found["error"] is None
    assert not found["races"] and not found["misplaced"]


@each_family
def test_the_host_waits_for_the_gpu_once_per_step(name: str, simulated: Found) -> None:
    """For loss and norm, after the last action before the optimizer step; a rank that has neither
    does not wait at all."""
    found, (most, _, _) = simulated[name], FAMILIES[name]
    count = sum(found["syncs"].values())
    if name in ON_HOST:
        assert 0 < count <= most
    else:
        assert count == most and not found["inside"], found["syncs"]


@each_family
def test_a_step_launches_no_more_than_it_did(name: str, simulated: Found) -> None:
    _, kernels, messages = FAMILIES[name]
    assert 0 < sum(simulated[name]["launches"].values()) <= kernels
    assert sum(simulated[name]["messages"].values()) <= messages


@each_family
def test_the_timeline_is_read_when_it_is_asked_for(name: str, simulated: Found) -> None:
    assert simulated[name]["events"] >= 3 and simulated[name]["ordered"]


@each_family
def test_what_the_allocator_gave_is_about_what_the_trainer_counted(
    name: str, simulated: Found
) -> None:
    """Temporary memory of operators is not counted, and is most of it on small tiles."""
    found = simulated[name]
    if found["counted"] > 150_000:
        assert 0.95 < found["allocated"] / found["counted"] < 1.75


@pytest.mark.parametrize("name", [name for name in FAMILIES if name.startswith("offloaded")])
def test_no_more_is_pinned_than_was_offloaded(name: str, simulated: Found) -> None:
    """Segments of whole MiB, not blocks of powers of two."""
    found = simulated[name]
    assert found["offloaded"] > 1000
    assert found["pinned"] < found["offloaded"] + 1.2 * MIB


def test_a_missing_wait_is_a_race(simulated: Found) -> None:
    for mistake, stream in (("no wait for messages", "irecv"), ("no wait for copies", "copy_")):
        races = simulated[mistake]["races"]
        assert any(f"reads what {stream}" in race for race in races), mistake


def test_memory_that_is_freed_under_a_copy_is_a_race(simulated: Found) -> None:
    races = simulated["no wait for copies"]["races"]
    assert any("freed while copy to host may use it" in race for race in races)


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
