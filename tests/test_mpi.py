"""Ranks over MPI: real ones, of Open MPI and of MPICH, without any process group of torch."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from gems.errors import GemsError
from gems.torch.device_choice import Asked, decide, usable
from gems.transport.mpi_library import progress
from gems.transport.mpi_memory import gpu_aware
from tests.mpi_worlds import each_library, lines, mpirun

pytestmark = pytest.mark.timeout(300)  # four ranks that load torch, on two cores with other tests
TWO_STAGES = json.dumps({"stages": 2, "micro_batches": 4})


# --- the protocol ---------------------------------------------------------------------------------


@each_library
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_every_call_of_the_protocol(library: str, kind: str) -> None:
    found = lines(mpirun(library, 3, "mpi_calls.py", kind), good=False)  # its last message fails
    assert [line["rank"] for line in found] == [0, 1, 2]
    frameworks = ["torch"] if kind == "torch" else []
    assert all(line["frameworks"] == frameworks for line in found)
    seen = [line["seen"] for line in found]
    assert len({one["same bits"] for one in seen}) == 1
    for rank, one in enumerate(seen):
        _is_right(rank, one)
        if kind == "torch":
            assert one["bfloat16"] == [258.0]
    assert "16 bytes came, and 24 were expected" in seen[1]["shorter"]
    assert "ranks 0, 1: there is no communicator" in seen[2]["no communicator"]
    assert "not bool; convert" in seen[0]["no sums"]
    assert "is not contiguous" in seen[0]["not contiguous"]


def _is_right(rank: int, seen: dict[str, Any]) -> None:
    before, after = (rank - 1) % 3, (rank + 1) % 3
    assert seen["all_reduce"] == [6.0 * i for i in range(6)]
    assert seen.get("of some") == (None if rank == 1 else [2, 2])
    assert seen["reduce_scatter"] == [3 * i + 30 for i in (2 * rank, 2 * rank + 1)]
    assert seen["all_gather"] == [[0, 0, 1, 1, 2, 2], [0, 0, -1, -1, -2, -2]]
    for kind in ("float16", "float32", "complex64", "uint8", "int8"):
        assert seen[kind] == [6, 6]
    assert seen["broadcast"] == [3.5, 4.5]
    assert seen["objects"] == [{"rank": r, "text": "x" * 5 * r} for r in range(3)]
    assert seen["numbers"] == [[r, 1 << 40, -r] for r in range(3)]
    sent = [[100 * before + i] for i in range(6)]
    assert seen["messages"] == [*sent[:2], [], *sent[3:]]
    assert seen["exchange"] == [after]
    assert seen["pieces gathered"] == [r for r in range(3) for _ in range(4)]
    assert seen["pieces summed"] == [6] * 23


# --- training -------------------------------------------------------------------------------------

FAMILIES = 24  # cases of mpi_families.py


@each_library
def test_all_plan_families_train_save_and_load_like_the_plain_loop(
    library: str, tmp_path: Path
) -> None:
    """In one mpirun. No process group can be made there."""
    found = lines(mpirun(library, 4, "mpi_families.py", tmp_path))
    assert [line["rank"] for line in found if line["case"] == "library"] == [0, 1, 2, 3]
    (name,) = {line["name"][:5] for line in found if line["case"] == "library"}
    assert name == library[:5]
    cases = [line for line in found if line["case"] != "library"]
    assert len({line["case"] for line in cases}) == FAMILIES
    assert not [line for line in cases if not line["error"] < 1e-10]


@each_library
def test_the_command_line_trains_over_mpi(library: str, tmp_path: Path) -> None:
    command = ["-m", "gems", "train", "--backend", "mpi", "--split-size", "2"]
    command += ["--model", "resnet_v1", "--image-size", "16"]
    command += ["--app", "3", "--samples", "4", "--batch-size", "2", "--steps", "1"]
    done = mpirun(library, 2, sys.executable, *command, "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "backend: mpi" in (tmp_path / "run" / "config.yaml").read_text()


@each_library
def test_a_torch_without_gloo_trains_over_mpi(library: str) -> None:
    """As Spack builds it. The script is told that there is no gloo; nothing else is asked for."""
    found = lines(mpirun(library, 2, "without_gloo.py", TWO_STAGES))
    assert [line["transport"] for line in found] == ["Mpi", "Mpi"]
    assert found[0]["losses"] == found[1]["losses"]


# --- failure --------------------------------------------------------------------------------------

CAUSES = {
    "loss raises": "rank 0 stops: rank 1 failed: KeyError: 'no such label'",
    "stopped": "rank 1 (process ",
    "runs out": "failed: rank 1 has ended",
    "closes": "failed: rank 1 has closed its trainer, and the others still need it",
    "another batch": "ranks were given different batches (rank 1 differs from the others)",
}


@each_library
@pytest.mark.parametrize("fault", CAUSES)
def test_a_rank_that_fails_ends_all_and_is_named(library: str, fault: str) -> None:
    """mpirun returns at all: MPI would wait for all ranks to end."""
    done = mpirun(library, 2, "broken.py", TWO_STAGES, fault, 1, TEST_BACKEND="mpi")
    assert done.returncode != 0
    assert CAUSES[fault] in done.stderr


@each_library
def test_ranks_that_end_one_after_the_other_end_well(library: str) -> None:
    """Story: a sign of life that came to a rank after it had left was never received. MPICH does
    not end MPI then: now and then mpirun killed the others and returned 9, and srun waited."""
    done = mpirun(library, 3, "mpi_ends.py")
    assert done.returncode == 0 and "Exception" not in done.stderr, done.stderr
    assert done.stdout.split() == ["ended"] * 3


@each_library
def test_a_rank_that_is_killed_ends_all(library: str) -> None:
    done = mpirun(library, 2, "broken.py", TWO_STAGES, "killed", 1, TEST_BACKEND="mpi")
    assert done.returncode != 0
    assert "signal 9" in done.stdout + done.stderr


@each_library
def test_a_rank_that_never_comes_to_mpi_is_not_waited_for_forever(library: str) -> None:
    """MPI_Init waits for all ranks, and no other thread of Python runs meanwhile."""
    done = mpirun(library, 2, "mpi_absent.py")
    assert done.returncode != 0
    assert "no weights on this node" in done.stderr
    if library == "MPICH":  # Open MPI's mpirun ends all by itself
        assert "MPI has waited 2 seconds for all ranks to start" in done.stderr


@each_library
def test_ranks_that_mpi_does_not_know_are_rejected(library: str) -> None:
    """Story: an mpirun of another MPI, and every rank trained alone, in the same folder."""
    wrong = {"RANK": "1", "WORLD_SIZE": "4"}
    done = mpirun(library, 2, "without_gloo.py", TWO_STAGES, **wrong)
    assert done.returncode != 0
    assert "of 2, and to torchrun it is rank 1 of 4" in done.stderr


# --- choices --------------------------------------------------------------------------------------


def test_without_mpi4py_the_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(GemsError, match=r"needs mpi4py.*pip install gems-hires\[mpi\]"):
        usable(None, "mpi")


@pytest.mark.parametrize(
    ("name", "read"), [("GEMS_MPI_PROGRESS", progress), ("GEMS_MPI_GPU_AWARE", gpu_aware)]
)
def test_a_setting_that_means_nothing_is_rejected(
    name: str, read: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "maybe")
    with pytest.raises(GemsError, match=f"{name} is 'maybe'"):
        read()


def test_over_mpi_ranks_get_a_gpu_each_or_share_them_if_told_to() -> None:
    def node(gpus: int, device: str = "auto") -> list[Asked]:
        return [Asked("a", device, "mpi", tuple(f"gpu {i}" for i in range(gpus)))] * 2

    def choice(gpus: int, device: str = "auto") -> tuple[str, tuple[str, ...]]:
        found = decide(node(gpus, device))
        return found.backend, found.devices

    assert choice(0) == ("mpi", ("cpu", "cpu"))
    assert choice(2) == ("mpi", ("cuda:0", "cuda:1"))
    assert choice(1) == ("mpi", ("cpu", "cpu"))
    assert choice(1, "cuda") == ("mpi", ("cuda:0", "cuda:0"))
    assert choice(2, "cpu") == ("mpi", ("cpu", "cpu"))
