"""Ranks under a real mpirun: Open MPI's, and MPICH's of the folder `mpich`. Not a test itself.

Two MPIs cannot be in one environment, as both have an `mpirun`: `make` installs MPICH into
`.venv/mpich`, and mpi4py takes either one.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from time import monotonic, sleep
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


def module(library: str) -> dict[str, str]:
    """What a cluster's module of the library sets, for ranks that its mpirun does not start."""
    if library == "MPICH":
        return SETTINGS[library]
    prefix = {"OPAL_PREFIX": str(BIN.parent), "LD_LIBRARY_PATH": str(BIN.parent / "lib")}
    return SETTINGS[library] | prefix


ALONE = 10.0  # seconds that an mpirun without ranks is waited for


def mpirun(
    library: str, ranks: int, *command: object, seconds: float = 280, **more: str
) -> subprocess.CompletedProcess[str]:
    """A script of tests/scripts, or any command, on so many ranks.

    Story: Open MPI's mpirun once stayed for a minute after a rank had failed before MPI_Init, on a
    busy machine, and nobody knew whether ranks stayed as well. One that stays without them is ended
    here, as its user would do; ranks that stay are named.
    """
    first, *rest = map(str, command)
    script = [sys.executable, str(SCRIPTS / first)] if first.endswith(".py") else [first]
    command = (*COMMANDS[library], "-np", str(ranks), *script, *rest)
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            command, env=environment(library, **more), stdin=subprocess.DEVNULL,
            stdout=out, stderr=err, start_new_session=True,
        )  # fmt: skip
        try:
            _ended(process, seconds)
        finally:
            left = _descendants(process.pid)
            for pid in (process.pid, *left):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
        for file in (out, err):
            file.seek(0)
        said = out.read(), err.read()
    done = subprocess.CompletedProcess(command, process.returncode, *said)
    assert not left, f"after {seconds:g} s processes {left} still ran: {done.stdout}{done.stderr}"
    return done


def _ended(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait for mpirun, or for its ranks to have been gone for some time."""
    end, seen, alone = monotonic() + seconds, False, None
    while process.poll() is None and monotonic() < end:
        if _descendants(process.pid):
            seen, alone = True, None
        elif seen:
            alone = alone or monotonic()
            if monotonic() - alone > ALONE:
                return
        sleep(0.2)


def _descendants(pid: int) -> list[int]:
    """The processes below this one that have not ended."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            parents[int(stat.parent.name)] = (int(parent), state)
    found, look = [], [pid]
    while look:
        above = look.pop()
        below = [child for child, (parent, _) in parents.items() if parent == above]
        look += below
        found += [child for child in below if parents[child][1] != "Z"]
    return found


def lines(done: subprocess.CompletedProcess[str], good: bool = True) -> list[dict[str, Any]]:
    """The JSON that ranks printed, by rank."""
    assert done.returncode == 0 or not good, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return sorted(found, key=lambda line: line["rank"])
