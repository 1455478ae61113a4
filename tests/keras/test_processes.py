"""Ranks as real processes, over gloo under torchrun and over MPI under mpirun."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.mpi_worlds import environment, mpirun

ROOT = Path(__file__).parent.parent.parent
BIN = Path(sys.executable).parent
SCRIPT = ROOT / "tests" / "keras" / "scripts" / "ranks.py"
BACKENDS = ("gloo", "mpi")
pytestmark = pytest.mark.timeout(300)  # ranks load TensorFlow, on two cores with other tests


def launched(backend: str, work: str) -> tuple[int, list[dict[str, Any]], str]:
    """The exit code, the JSON that ranks printed, and all else that they wrote."""
    if backend == "mpi":
        done = mpirun("Open MPI", 2, SCRIPT, work)
    else:
        torchrun = [str(BIN / "torchrun"), "--nproc-per-node", "2", str(SCRIPT), work]
        done = subprocess.run(
            torchrun, env=environment("Open MPI"), capture_output=True, text=True, timeout=280
        )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return done.returncode, sorted(lines, key=lambda line: line["rank"]), done.stderr


@pytest.mark.parametrize("backend", BACKENDS)
def test_processes_give_what_plain_keras_gives(backend):
    code, ranks, said = launched(backend, "exact")
    assert code == 0, said
    assert [line["rank"] for line in ranks] == [0, 1]
    assert all(line["worst"] < 1e-10 and line["backend"] == backend for line in ranks)
    assert all(line["torch"] == (backend == "gloo") for line in ranks)


def test_a_rank_that_dies_ends_the_others_with_its_number():
    """Without a launcher, which would end them all by itself."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    clean = environment("Open MPI", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), "die"],
            env=clean | {"WORLD_SIZE": "2", "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        told = [process.communicate(timeout=280)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [1, 3]
    assert "rank 1" in json.loads(told[0].splitlines()[-1])["error"]
