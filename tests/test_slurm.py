"""`gems slurm`: what it writes, and what a real Slurm on this machine does with it."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gems.cli.main import main
from gems.cli.ranks import free_port
from gems.files import to_json
from gems.plans.plan import Plan
from tests.mpi_worlds import each_library, module
from tests.rank_server import SCRIPTS, RankServer, places

ROOT = SCRIPTS.parent.parent
PLAN = json.dumps({"stages": 2, "micro_batches": 4})
STEPS = 14
NEEDED = ("slurmctld", "slurmd", "sbatch", "srun", "munged")


def missing() -> str:
    absent = [name for name in NEEDED if shutil.which(name, path=f"{os.defpath}:/usr/sbin") is None]
    if absent:
        return f"no Slurm: {', '.join(absent)} (apt install slurmctld slurmd slurm-client munge)"
    return "" if os.geteuid() == 0 else "a Slurm of one's own needs root"


# --- the file -------------------------------------------------------------------------------------


def written(tmp_path: Path, *options: str) -> list[str]:
    out = tmp_path / "job.sh"
    assert main(["slurm", "--out", str(out), *options]) == 0
    subprocess.run(["bash", "-n", str(out)], check=True)
    return out.read_text().splitlines()


def test_nodes_tasks_and_gpus_are_those_of_the_plan(tmp_path: Path) -> None:
    train = ["gems", "train", "--split-size", "4", "--data", "2", "--out", "runs/my run"]
    found = written(
        tmp_path, "--ranks-per-node", "2", "--gpus", "--time", "1:00:00", "--cpus-per-task", "3",
        "--setup", "module load gems", "--sbatch=--partition=gpu", "--mpi", "pmi2", "--", *train,
    )  # fmt: skip
    for line in (
        "nodes=4", "ntasks=8", "ntasks-per-node=2", "gpus-per-node=2", "cpus-per-task=3",
        "time=1:00:00", "signal=USR1@120", "requeue", "open-mode=append", "partition=gpu",
    ):  # fmt: skip
        assert f"#SBATCH --{line}" in found
    srun = "srun --kill-on-bad-exit=0 --cpus-per-task=3 --mpi=pmi2 gems train --split-size 4"
    assert f"{srun} --data 2 --out 'runs/my run' --resume" in found
    assert found.index("module load gems") < found.index(
        next(line for line in found if line.startswith("srun"))
    )


def test_a_plan_in_a_file_tells_the_ranks_of_a_script(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(to_json(Plan(stages=2, data=3)))
    found = written(tmp_path, "--plan", str(tmp_path / "plan.json"), "--", "python", "own.py")
    assert "#SBATCH --ntasks=6" in found and "#SBATCH --nodes=1" in found
    assert "srun --kill-on-bad-exit=0 python own.py" in found


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--", "python", "own.py"], "give --ranks or --plan"),
        (["--ranks", "3", "--", "gems", "train", "--split-size", "2"], "3 ranks were asked for"),
        (["--ranks", "6", "--ranks-per-node", "4", "--", "x"], "do not fill nodes of 4"),
        (["--", "gems", "train", "--split-size", "2", "--overwrite"], "leave it out"),
        (["--ranks", "2", "--job-name", "a b", "--", "x"], "'a b' cannot stand in a line"),
    ],
)
def test_what_cannot_be_a_job_is_rejected(
    options: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["slurm", "--out", str(tmp_path / "job.sh"), *options]) == 1
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "job.sh").exists()


# --- a real one -----------------------------------------------------------------------------------

Command = Callable[..., str]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    """Run its commands, in a folder where a Slurm of this machine has its files."""
    if why := missing():
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("slurm")
    with (tmp_path_factory.getbasetemp().parent / "slurm.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one at a time, whatever other workers of pytest do
        yield from started(folder)


def started(folder: Path) -> Iterator[Command]:
    script = str(SCRIPTS / "slurm.sh")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "PMI", "OMPI"))}
    clean |= {"SLURM_CONF": str(folder / "slurm.conf"), "PYTHONPATH": str(ROOT)}
    clean |= {"PATH": f"{clean['PATH']}:/usr/sbin", "OMP_NUM_THREADS": "1"}
    ports = [str(free_port()), str(free_port())]
    start = subprocess.run(
        ["sh", script, "start", str(folder), *ports], capture_output=True, text=True, env=clean
    )
    if start.returncode:
        pytest.skip(f"Slurm does not start here: {start.stderr[-600:]}")

    def run(*command: str, **more: str) -> str:
        done = subprocess.run(
            command, cwd=folder, env=clean | more, capture_output=True, text=True, timeout=150
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    try:
        yield run
    finally:
        subprocess.run(["scancel", "--user=root"], env=clean)
        subprocess.run(["sh", script, "stop", str(folder)], env=clean)


def until(what: Callable[[], Any], told: Callable[[], str], seconds: float = 180) -> None:
    late = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < late, told()
        time.sleep(0.2)


def soon(slurm: Command, number: str) -> None:
    """Slurm keeps a job that is queued again waiting for two minutes, until its old credentials
    have run out for sure. Here they do after 5 seconds (slurm.sh); before that its node rejects it.
    """
    until(lambda: "JobState=PENDING" in slurm("scontrol", "show", "job", number), str)
    slurm("scontrol", "update", f"JobId={number}", "StartTime=now+10seconds")


@pytest.mark.timeout(600)
def test_a_job_that_is_preempted_and_out_of_time_goes_on_bit_for_bit(
    slurm: Command, rank_server: RankServer, tmp_path: Path
) -> None:
    """Twice in the queue again: by Slurm for a job of more weight, and by the batch file, after
    the signal that tells that the time is nearly up."""
    run, log, job = tmp_path / "run", tmp_path / "log", tmp_path / "job.sh"
    written(
        tmp_path, "--ranks", "2", f"--sbatch=--output={log}", "--",
        sys.executable, str(SCRIPTS / "slow_resume.py"), PLAN, str(run), str(STEPS),
    )  # fmt: skip
    high = tmp_path / "high.sh"
    high.write_text("#!/bin/sh\nsleep 1\n")
    number = slurm("sbatch", "--parsable", "--partition=low", str(job))

    def told() -> str:
        return slurm("scontrol", "show", "job", number) + log.read_text()

    def has(field: str) -> bool:
        return field in slurm("scontrol", "show", "job", number)

    until(lambda: (run / "step-3").exists(), told)
    slurm("sbatch", "--partition=high", "--ntasks=2", f"--output={tmp_path / 'high'}", str(high))
    until(lambda: has("Restarts=1"), told)
    soon(slurm, number)
    saved = max(int(path.name[5:]) for path in run.glob("step-*"))
    assert saved < STEPS
    until(lambda: (run / f"step-{saved + 3}").exists(), told)
    slurm("scancel", "--signal=USR1", number)
    until(lambda: has("Restarts=2"), told)
    soon(slurm, number)
    until(lambda: has("JobState=COMPLETED"), told)
    text = log.read_text()
    assert "DUE TO PREEMPTION" in text and "Exited with exit code 143" in text
    assert "Exited with exit code 138" in text
    found = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    assert sorted(found, key=lambda line: line["rank"]) == whole(rank_server, tmp_path)


def whole(rank_server: RankServer, tmp_path: Path) -> list[Any]:
    """The run that nobody interrupts."""
    command = [SCRIPTS / "resume.py", PLAN, tmp_path / "whole", STEPS]
    ends = rank_server.run(command, places(2), tmp_path, 60.0)
    assert [code for code, _ in ends] == [0, 0]
    return [json.loads((tmp_path / f"{rank}.out").read_text()) for rank in range(2)]


# --- ranks of MPI under srun ----------------------------------------------------------------------

KINDS = {"MPICH": "pmi2", "Open MPI": "pmix"}  # of --mpi=, which each library was built for
PMIX = Path("/usr/lib/x86_64-linux-gnu/pmix2/lib/libpmix.so")  # which Debian's Slurm loads


@each_library
@pytest.mark.timeout(600)
def test_ranks_of_srun_talk_over_mpi(library: str, slurm: Command) -> None:
    """With what a cluster's module of that MPI would set. PMI2 of this Slurm cuts a message of
    MPI_Init short now and then on a busy machine, before GEMS has a part in it."""
    if library == "Open MPI" and not PMIX.exists():
        pytest.skip("Slurm has no PMIx (apt install libpmix-dev)")
    start = ("srun", "--ntasks=2", f"--mpi={KINDS[library]}", sys.executable)
    start = (*start, str(SCRIPTS / "without_gloo.py"), PLAN)
    try:
        found = slurm(*start, **module(library))
    except AssertionError as error:
        if "internal_Init" not in str(error):
            raise
        found = slurm(*start, **module(library))
    told = [json.loads(line) for line in found.splitlines() if line.startswith("{")]
    first, second = sorted(told, key=lambda line: line["rank"])
    assert (first["rank"], first["transport"], first["losses"]) == (0, "Mpi", second["losses"])
