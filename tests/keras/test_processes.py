"""Ranks as real processes, over gloo under torchrun and over MPI under mpirun."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
BIN = Path(sys.executable).parent
SCRIPT = ROOT / "tests" / "keras" / "scripts" / "ranks.py"
LAUNCHERS = {
    "gloo": [str(BIN / "torchrun"), "--nproc-per-node", "2"],
    "mpi": [str(BIN / "mpirun"), "--allow-run-as-root", "--oversubscribe", "-np", "2"],
}
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMI", "SLURM_", "TORCHELASTIC_")


def launched(backend: str, work: str) -> tuple[int, list[dict[str, Any]], str]:
    """The exit code, the JSON that ranks printed, and all else that they wrote."""
    command = LAUNCHERS[backend]
    run = [sys.executable, str(SCRIPT)] if backend == "mpi" else [str(SCRIPT)]
    clean = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHED)}
    done = subprocess.run(
        [*command, *run, work],
        env=clean | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=170,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return done.returncode, sorted(lines, key=lambda line: line["rank"]), done.stderr


@pytest.mark.parametrize("backend", LAUNCHERS)
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
    clean = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHED)}
    clean |= {"PYTHONPATH": str(ROOT), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), "die"],
            env=clean | {"WORLD_SIZE": "2", "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    told = [process.communicate(timeout=170)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [1, 3]
    assert "rank 1" in json.loads(told[0].splitlines()[-1])["error"]
