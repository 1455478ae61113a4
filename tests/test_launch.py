"""One script, started in every way people start scripts: the same losses, the same bits."""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gems.distributed.launchers import SIGNS, Place, first_host, place
from gems.errors import GemsError, PeerError
from gems.torch import launch
from gems.torch.launch import connect

SCRIPTS = Path(__file__).parent / "scripts"
TRAIN = [sys.executable, str(SCRIPTS / "train.py")]
TWO_STAGES = json.dumps({"stages": 2, "micro_batches": 4})
MPIRUN = [str(Path(sys.executable).parent / "mpirun"), "--allow-run-as-root", "--oversubscribe"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
TORCHRUN += ["--master-addr", "127.0.0.1"]

# What launchers set. Those of torchrun, Open MPI and MPICH were measured; others are from manuals
# and sources (MVAPICH2's mpispawn.c, flux-core's job shell).
TORCHRUN_SETS = {
    "RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node7", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none",
}  # fmt: skip
OPEN_MPI_SETS = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "prterun-vm-9792@1", "PMIX_RANK": "1",
}  # fmt: skip
MPICH_SETS = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
BATCH_SETS = {
    "SLURM_JOB_ID": "77", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
    "SLURM_JOB_NODELIST": "gpu[03-04]", "SLURM_TASKS_PER_NODE": "2(x2)",
}  # fmt: skip
MVAPICH_SETS = {
    "MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip
MVAPICH_3_SETS = {key.replace("MV2", "MVP"): value for key, value in MVAPICH_SETS.items()}
FLUX_SETS = {
    "FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2", "FLUX_TASK_LOCAL_ID": "1", "FLUX_JOB_NNODES": "1",
    "FLUX_JOB_ID": "f3ETxsR9H", "PMI_RANK": "1", "PMI_SIZE": "2",
}  # fmt: skip
PALS_SETS = {
    "PALS_RANKID": "1", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "2", "PALS_APID": "4b2e",
    "PMI_RANK": "1", "PMI_SIZE": "2", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2",
}  # fmt: skip
PALS_PMIX_SETS = {k: v for k, v in PALS_SETS.items() if "PMI" not in k} | {
    "PMIX_RANK": "1", "PMIX_NAMESPACE": "pals.4b2e",
}  # fmt: skip
CRAY_SETS = {k: v for k, v in PALS_SETS.items() if "PALS" not in k}
JSRUN_SETS = {
    "JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_SIZE": "2", "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "2", "LSB_JOBID": "7", "PMIX_RANK": "1",
}  # fmt: skip
PMIX_SETS = {"PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun-vm-9792@1"}
SRUN_SETS = {
    **BATCH_SETS, "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}  # fmt: skip


# --- really started -------------------------------------------------------------------------------


def run(*commands: Sequence[str], places: Sequence[dict[str, str]] = ({},)) -> list[dict[str, Any]]:
    """The lines that the ranks of these processes printed, by rank."""
    ours = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMI", "SLURM_", "TORCHELASTIC_")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    started = [
        subprocess.Popen(
            command, env=clean | at, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for command, at in zip(commands, places, strict=True)
    ]
    lines = []
    for process in started:
        out, said = process.communicate(timeout=100)
        assert process.returncode == 0, said
        lines += [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    return sorted(lines, key=lambda line: line["rank"])


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    (line,) = run([*TRAIN, json.dumps({"stages": 1, "micro_batches": 4})])
    assert line["rank"] == 0
    assert line["losses"][1] < line["losses"][0]
    return line


def assert_same(lines: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    assert lines == [alone | {"rank": rank} for rank in range(2)]


def test_torchrun_trains_like_one_process(alone: dict[str, Any]) -> None:
    command = [*TORCHRUN, "--master-port", str(free_port()), *TRAIN[1:], TWO_STAGES]
    assert_same(run(command), alone)


def test_two_agents_of_torchrun_train_like_one_process(alone: dict[str, Any]) -> None:
    """Two nodes, as far as the ranks know: each is alone on its own, and they meet over TCP."""
    port = str(free_port())
    agents = [
        [*TORCHRUN[:3], "--nnodes", "2", "--node-rank", node, "--nproc-per-node", "1",
         "--master-addr", "127.0.0.1", "--master-port", port, *TRAIN[1:], TWO_STAGES]
        for node in "01"
    ]  # fmt: skip
    assert_same(run(*agents, places=[{}, {}]), alone)


def test_mpirun_trains_like_one_process(alone: dict[str, Any]) -> None:
    assert_same(run([*MPIRUN, "-np", "2", *TRAIN, TWO_STAGES]), alone)


def test_srun_trains_like_one_process(alone: dict[str, Any]) -> None:
    """Without a Slurm: two processes that have its variables."""
    step = {
        "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "gpu03",
    }  # fmt: skip
    tasks = [step | {"SLURM_PROCID": str(r), "SLURM_LOCALID": str(r)} for r in range(2)]
    assert_same(run(*[[*TRAIN, TWO_STAGES]] * 2, places=tasks), alone)


def test_mpirun_ends_when_a_rank_is_killed() -> None:
    command = [*MPIRUN, "-np", "2", sys.executable, str(SCRIPTS / "broken.py"), TWO_STAGES]
    ended = subprocess.run([*command, "killed", "1"], capture_output=True, text=True, timeout=60)
    assert ended.returncode != 0
    assert "signal 9 (Killed)" in ended.stderr


# --- by the variables -----------------------------------------------------------------------------


def test_a_process_that_nobody_launched_is_alone() -> None:
    assert place({}) is None
    assert place({"HOME": "/root", "MASTER_ADDR": "node7"}) is None


def test_torchrun_says_all() -> None:
    assert place(TORCHRUN_SETS) == Place(3, 8, "node7", 29500, "torchrun")


def test_rank_and_world_size_may_be_set_by_hand() -> None:
    by_hand = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "29511"}
    assert place(by_hand) == Place(1, 2, "127.0.0.1", 29511, "torchrun", one_node=True)


def test_a_world_of_one_is_alone_whatever_surrounds_it() -> None:
    """Like `torchrun --nproc-per-node 1` in a job of many tasks."""
    assert place(SRUN_SETS | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}) is None


ON_ONE_NODE = {
    "mpirun (Open MPI)": OPEN_MPI_SETS,
    "mpirun (MPICH, Intel MPI)": MPICH_SETS,
    "mpirun_rsh (MVAPICH2)": MVAPICH_SETS,
    "mpirun_rsh (MVAPICH 3)": MVAPICH_3_SETS,
    "flux run": FLUX_SETS,
    "mpiexec (PALS)": PALS_SETS,
    "mpiexec (Cray PMI)": CRAY_SETS,
    "jsrun": JSRUN_SETS,
}
NODES_OF = {  # what tells of several nodes
    "mpirun (Open MPI)": {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
    "mpirun (MPICH, Intel MPI)": {"MPI_LOCALNRANKS": "1", "PMI_JOBID": "4"},
    "mpirun_rsh (MVAPICH2)": {"MV2_COMM_WORLD_LOCAL_SIZE": "1", "MASTER_PORT": "29500"},
    "mpirun_rsh (MVAPICH 3)": {"MVP_COMM_WORLD_LOCAL_SIZE": "1", "MPISPAWN_MPIRUN_ID": "4321"},
    "flux run": {"FLUX_JOB_NNODES": "2"},
    "mpiexec (PALS)": {"PALS_LOCAL_SIZE": "1"},
    "mpiexec (Cray PMI)": {"PMI_LOCAL_SIZE": "1", "PMI_JOBID": "4"},
    "jsrun": {"JSM_NAMESPACE_LOCAL_SIZE": "1"},
}


def found(sets: dict[str, str]) -> Place:
    here = place(sets)
    assert here is not None
    return here


@pytest.mark.parametrize("launcher", ON_ONE_NODE)
def test_ranks_on_one_node_meet_on_loopback(launcher: str) -> None:
    here = found(ON_ONE_NODE[launcher])
    assert (here.launcher, here.rank, here.world) == (launcher, 1, 2)
    assert (here.address, here.one_node) == ("127.0.0.1", True)


@pytest.mark.parametrize("launcher", ON_ONE_NODE)
def test_ranks_on_several_nodes_meet_where_they_are_told(launcher: str) -> None:
    sets = ON_ONE_NODE[launcher] | NODES_OF[launcher]
    with pytest.raises(GemsError, match=r"several nodes; set MASTER_ADDR"):
        place(sets)
    here = found(sets | {"MASTER_ADDR": "node1"})
    assert (here.launcher, here.address, here.one_node) == (launcher, "node1", False)


def test_a_launcher_that_names_no_job_needs_a_port_on_several_nodes() -> None:
    with pytest.raises(GemsError, match="set MASTER_PORT"):
        place(MPICH_SETS | {"MPI_LOCALNRANKS": "1", "MASTER_ADDR": "node1"})


BATCH_SYSTEMS = {
    "Slurm": ({"SLURM_JOB_NODELIST": "gpu[03-04]", "SLURM_STEP_NODELIST": "gpu04"}, "gpu03"),
    "PBS": ({"PBS_NODEFILE": "nodes"}, "node5.cluster"),
    "LSF": ({"LSB_HOSTS": "host2 host2 host7"}, "host2"),
}


@pytest.mark.parametrize("system", BATCH_SYSTEMS)
@pytest.mark.parametrize("launcher", [n for n in ON_ONE_NODE if n.startswith("mpi")])
def test_ranks_of_mpirun_in_a_batch_job_meet_on_its_first_node(
    launcher: str, system: str, tmp_path: Path
) -> None:
    """Story: Open MPI wanted MASTER_ADDR though SLURM_JOB_NODELIST was there. Its helper's step
    has other nodes: all but the one that mpirun is on."""
    sets, host = BATCH_SYSTEMS[system]
    (tmp_path / "nodes").write_text("node5.cluster\nnode5.cluster\nnode6.cluster\n")
    sets = {k: str(tmp_path / v) if k == "PBS_NODEFILE" else v for k, v in sets.items()}
    given = ON_ONE_NODE[launcher] | NODES_OF[launcher] | sets
    if launcher == "mpiexec (PALS)" and system != "PBS":  # which PALS needs
        with pytest.raises(GemsError, match="set MASTER_ADDR"):
            place(given)
        return
    assert (found(given).launcher, found(given).address) == (launcher, host)


def test_a_node_file_that_is_gone_is_no_address() -> None:
    with pytest.raises(GemsError, match="set MASTER_ADDR"):
        place(OPEN_MPI_SETS | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "PBS_NODEFILE": "/no/such"})


@pytest.mark.parametrize(
    ("sets", "variable"),
    [
        (PMIX_SETS, "PMIX_RANK"),
        (PALS_PMIX_SETS, "PALS_RANKID"),
        ({"RANK": "1"}, "RANK"),
        ({"PMI_RANK": "1"}, "PMI_RANK"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "PMI_RANK"),
        ({"FLUX_TASK_RANK": "1"}, "FLUX_TASK_RANK"),
    ],
)
def test_a_rank_without_a_size_does_not_train_by_itself(
    sets: dict[str, str], variable: str
) -> None:
    with pytest.raises(GemsError, match=f"{variable} is 1, so this is one of several.*WORLD_SIZE"):
        place(sets)


@pytest.mark.parametrize("sign", SIGNS)
def test_a_process_with_signs_of_a_launcher_does_not_train_by_itself(sign: str) -> None:
    """Story: ranks of a launcher that was not known each trained alone, in the same folder."""
    with pytest.raises(GemsError, match=f"{sign} is 1, so a launcher started.*RANK and WORLD_SIZE"):
        place({sign: "1"})
    assert place({sign: "0", "RANK": "0", "WORLD_SIZE": "1"}) is None


@pytest.mark.parametrize("sets", [PMIX_SETS, PALS_PMIX_SETS], ids=["PMIx", "PALS"])
def test_people_may_tell_the_size_where_the_launcher_does_not(sets: dict[str, str]) -> None:
    here = found(sets | {"WORLD_SIZE": "4", "MASTER_ADDR": "node1"})
    assert (here.rank, here.world, here.address) == (1, 4, "node1")


@pytest.mark.parametrize(
    ("rank", "world", "complaint"),
    [("2", "2", "ranks are 0 to"), ("x", "2", "'x', not a whole number"), ("0", "", "'', not a")],
)
def test_ranks_that_cannot_be_are_rejected(rank: str, world: str, complaint: str) -> None:
    with pytest.raises(GemsError, match=complaint):
        place({"RANK": rank, "WORLD_SIZE": world})


def test_ranks_of_srun_meet_on_the_first_node() -> None:
    here = found(SRUN_SETS)
    assert (here.rank, here.world, here.address) == (3, 4, "gpu03")


def test_a_batch_script_of_slurm_is_alone() -> None:
    """Story: it has SLURM_PROCID and the SLURM_NTASKS of its job, and waited for three others."""
    assert place(BATCH_SETS) is None
    assert place(BATCH_SETS | {"WORLD_SIZE": "4"}) is None


def test_the_variables_of_srun_count_even_if_it_speaks_pmi() -> None:
    for pmi in ({"PMI_RANK": "3", "PMI_SIZE": "4"}, {"PMIX_RANK": "3", "PMIX_NAMESPACE": "77.0"}):
        here = found(SRUN_SETS | pmi)
        assert (here.launcher, here.address) == ("srun", "gpu03")


def test_mpirun_inside_a_job_of_slurm_is_mpirun() -> None:
    """Both kinds start one helper per node by srun, and their ranks inherit its variables."""
    for sets in (OPEN_MPI_SETS, MPICH_SETS, MVAPICH_SETS):
        here = found(SRUN_SETS | sets)
        assert (here.rank, here.world) == (1, 2)
        assert here.launcher.startswith("mpirun")


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu[03-05,09],login1", "gpu03"),
        ("gpu[7,9]", "gpu7"),
        ("node1,node2", "node1"),
        ("a100-4", "a100-4"),
        ("rack2-[1-3]", "rack2-1"),
        ("rack[2-3]-[1-3].cluster,login1", "rack2-1.cluster"),
        ("", ""),
    ],
)
def test_the_first_host_of_a_node_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_ports_are_one_per_job_and_not_for_everybody() -> None:
    def port(**changed: str) -> int:
        return found(SRUN_SETS | changed).port

    assert port(SLURM_PROCID="0") == port(SLURM_PROCID="3")
    jobs = [port(SLURM_JOB_ID=str(job)) for job in range(100)]
    assert len({*jobs}) > 95
    assert all(1024 < port < 32768 for port in jobs)  # Linux gives the later ones to anybody
    assert port(MASTER_PORT="4711") == 4711


# --- meeting --------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture
def one_of_two(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """This process as rank 0 of two; the port where they meet."""
    port = free_port()
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(launch, "_run", run := launch.Run())
    yield port
    if run.folder is not None:
        atexit.unregister(run.folder.leave)
        run.folder.leave()
        assert not run.folder.path.exists()


def test_a_rank_that_never_comes_is_named_and_not_waited_for_forever(one_of_two: int) -> None:
    with pytest.raises(PeerError, match=r"rank 1 of 2 has not come within 1 seconds; rank 0 waits"):
        connect("gloo", patience=1)


def test_rank_0_that_never_comes_is_named(one_of_two: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(PeerError, match=r"rank 0 has not come within 0.5 seconds: rank 1 waits"):
        connect("gloo", timeout=0.5)


def test_a_rank_of_another_node_that_never_comes_is_named(
    one_of_two: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises(PeerError, match=r"rank 1 of 2 has not come .* waits at the store at 127"):
        connect("gloo", patience=1)


def test_a_port_that_is_taken_is_named(one_of_two: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", one_of_two))
        taken.listen()
        with pytest.raises(PeerError, match=rf":{one_of_two} .*set MASTER_PORT to a free one"):
            connect("gloo", patience=5)


@pytest.mark.parametrize("timeout", [0, -1, float("nan")])
def test_a_timeout_must_be_positive(timeout: float) -> None:
    with pytest.raises(GemsError, match="timeout is"):
        connect(timeout=timeout)


def test_a_process_group_that_exists_is_used_and_left_to_its_owner() -> None:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        transport, device = connect()
        assert device == torch.device("cpu")
        assert transport.all_gather_object("here") == ["here"]
        transport.close()
        assert dist.is_initialized()
        dist.all_reduce(torch.ones(1))
    finally:
        dist.destroy_process_group()
