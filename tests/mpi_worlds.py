"""Ranks under a real mpirun: Open MPI's, and MPICH's of the folder `mpich`. Not a test itself.

Two MPIs cannot be in one environment, as both have an `mpirun`: `make` installs MPICH into
`.venv/mpich`, and mpi4py takes either one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "tests" / "scripts"
BIN = Path(sys.executable).parent
MPICH = BIN.parent / "mpich"
COMMANDS = {
    "Open MPI": [str(BIN / "mpirun"), "--allow-run-as-root", "--oversubscribe"],
    "MPICH": [str(MPICH / "bin" / "mpirun")],
}
SETTINGS = {
    "Open MPI": {"MPI4PY_MPIABI": "openmpi"},
    "MPICH": {"MPI4PY_MPIABI": "mpich", "LD_LIBRARY_PATH": str(MPICH / "lib")},
}
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMI", "SLURM_", "TORCHELASTIC_")


def _is_missing(library: str) -> bool:
    return find_spec("mpi4py") is None or not Path(COMMANDS[library][0]).exists()


each_library = pytest.mark.parametrize(
    "library",
    [
        pytest.param(
            name,
            marks=pytest.mark.skipif(
                _is_missing(name), reason=f"{name} or mpi4py is not installed"
            ),
        )
        for name in COMMANDS
    ],
)


def environment(library: str, **more: str) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS)}
    paths = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return clean | SETTINGS[library] | paths | more


def mpirun(
    library: str, ranks: int, *command: object, seconds: float = 110, **more: str
) -> subprocess.CompletedProcess[str]:
    """A script of tests/scripts, or any command, on so many ranks."""
    first, *rest = map(str, command)
    script = [sys.executable, str(SCRIPTS / first)] if first.endswith(".py") else [first]
    return subprocess.run(
        [*COMMANDS[library], "-np", str(ranks), *script, *rest],
        env=environment(library, **more),
        capture_output=True,
        text=True,
        timeout=seconds,
    )


def lines(done: subprocess.CompletedProcess[str], good: bool = True) -> list[dict[str, Any]]:
    """The JSON that ranks printed, by rank."""
    assert done.returncode == 0 or not good, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return sorted(found, key=lambda line: line["rank"])
