"""Command lines of the published scripts (MPI4DL, Infer-HiRes), typed as docs/from-mpi4dl.md says.

Each runs once, in small sizes, as the ranks of one `mpirun_rsh`: without an MVAPICH2, processes
that have its variables. Most lines run a smaller network: theirs take long to record, AmoebaNet-D
above all. GEMS_HYPOTHESIS=thorough runs theirs, on as many ranks as were published.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from gems.cli import like
from gems.cli.config import expanded
from gems.cli.data import source_from
from gems.cli.main import main
from gems.cli.plan_options import plan_from
from gems.cli.reject import reject
from gems.data.folders import Folders
from gems.data.slides import Slides
from gems.errors import GemsError
from gems.plans.plan import Plan
from gems.schedule.build import lowered
from tests import worlds
from tests.runs import TINY, parsed, parser_of

DOC = Path(__file__).parent.parent / "docs" / "from-mpi4dl.md"
MASTER, WITH_SP = "gems_master_model/", "gems_master_with_spatial_parallelism/"
NCCL = "--backend nccl --precision fp_16 --enable-evaluation"
# What stood behind `python benchmarks/`, to the command here and how many ranks it takes.
LINES: dict[str, tuple[str, int]] = {
    "layer_parallelism/benchmark_amoebanet_lp.py --batch-size 1 --image-size 1024 --split-size 4":
        ("train", 4),
    "layer_parallelism/benchmark_resnet_lp.py --batch-size 1 --image-size 1024 --split-size 4":
        ("train", 4),
    "layer_parallelism/benchmark_resnet_lp.py --image-size 1024 --batch-size 4 --split-size 2 "
    "--parts 4": ("train", 2),
    "spatial_parallelism/benchmark_amoebanet_sp.py --image-size 512 --num-spatial-parts 4 "
    "--slice-method vertical --split-size 2 --spatial-size 1": ("train", 5),
    "spatial_parallelism/benchmark_resnet_sp.py --num-spatial-parts 4 --image-size 1024 "
    "--batch-size 2 --slice-method square": ("train", 5),
    "spatial_parallelism/benchmark_resnet_sp.py --halo-D2 --num-spatial-parts 2 --image-size 1024 "
    "--batch-size 1 --slice-method vertical": ("train", 3),
    "spatial_parallelism/benchmark_resnet_sp.py --image-size 512 --num-spatial-parts 4 "
    "--slice-method vertical --split-size 3 --spatial-size 2": ("train", 9),
    f"{MASTER}benchmark_amoebanet_gems_master.py --split-size 4 --image-size 1024 --batch-size 1 "
    "--times 2": ("train", 4),
    f"{MASTER}benchmark_resnet_gems_master.py --split-size 4 --image-size 2048 --batch-size 1 "
    "--times 4": ("train", 4),
    f"{WITH_SP}benchmark_amoebanet_gems_master_with_sp.py --split-size 5 --batch-size 1 "
    "--image-size 1024 --times 2": ("train", 8),
    f"{WITH_SP}benchmark_resnet_gems_master_with_sp.py --split-size 5 --image-size 2048 "
    "--batch-size 1 --times 4": ("train", 8),
    "communication/halo/benchmark_sp_halo_exchange.py --image-size 32 --batch-size 32 "
    "--num-spatial-parts 4 --slice-method vertical": ("train", 4),
    f"{MASTER}benchmark_resnet_gems_master.py --batch-size 1 --split-size 4 --parts 1 --times 2 "
    f"--image-size 1024 {NCCL}": ("eval", 4),
    "spatial_parallelism/benchmark_resnet_sp.py --batch-size 1 --parts 1 --split-size 2 "
    f"--slice-method vertical --num-spatial-parts 4 --image-size 1024 {NCCL}": ("eval", 5),
    "layer_parallelism/benchmark_resnet_lp.py --batch-size 1 --parts 1 --split-size 2 "
    f"--image-size 1024 {NCCL}": ("eval", 2),
    "single_gpu_inference/benchmark_resnet_inference.py --batch-size 4 --image-size 1024 "
    "--precision fp_16 --enable-evaluation": ("eval", 1),
}  # fmt: skip
THOROUGH = os.environ.get("GEMS_HYPOTHESIS") == "thorough"
SMALL = {
    "resnet": "--model resnet-v2 --num-layers 11 --num-filters 2 --image-size 8",
    "amoebanet": "--num-layers 3 --num-filters 8 --image-size 64",
    "sp_halo": "--num-filters 2 --image-size 8 --batch-size 2",
}
TINY_NET = "--model tests.tiny:net --image-size 8"


def words(line: str) -> list[str]:
    """A line as it is typed here, before its sizes are made small."""
    return [LINES[line][0], "--like", *f"benchmarks/{line}".split()]


def small(line: str, out: Path) -> list[str]:
    """A line in small sizes: less noise, fewer layers and, unless it shall be thorough, ranks."""
    sizes = next(found for name, found in SMALL.items() if f"_{name}" in line)
    tiny = not (THOROUGH or "resnet_lp" in line or "_halo" in line)
    found = [*words(line), *(TINY_NET if tiny else sizes).split()]
    found += ["--samples", "4", "--num-classes", "2", "--device", "cpu", "--backend", "gloo"]
    if LINES[line][0] == "train":
        found += ["--steps", "1", "--no-save"]
    if not THOROUGH and planned(line).ranks > 2:
        tiled, split = planned(line).spatial, planned(line).depth > 1
        found += ["--num-spatial-parts", "2", "--spatial-size", "1"] if tiled else []
        found += ["--slice-method", "vertical"] if tiled else []
        found += ["--split-size", "2"] if split else []
    return [*found, "--out", str(out)]


def given(arguments: list[str]) -> Any:
    """The options of a command line, with the defaults of its --like."""
    command, *rest = arguments
    return parsed(*like.expanded(rest, parser_of(command)), command=command)


def planned(line: str) -> Plan:
    return plan_from(given(words(line)))


def _rank(rank: int, world: int, job: int, arguments: list[str]) -> None:
    """One process as mpirun_rsh leaves it on one node."""
    torch.set_num_threads(1)
    sets = {"RANK": rank, "SIZE": world, "LOCAL_RANK": rank, "LOCAL_SIZE": world}
    os.environ.update({f"MV2_COMM_WORLD_{name}": str(value) for name, value in sets.items()})
    os.environ |= {"PMI_ID": str(rank), "MPISPAWN_MPIRUN_ID": str(job), "MV2_USE_CUDA": "1"}
    os._exit(main(arguments))


def mpirun_rsh(world: int, arguments: list[str], job: int) -> list[int | None]:
    """Exit codes of all processes."""
    processes = [
        worlds.fork.Process(target=_rank, args=(rank, world, job, arguments))
        for rank in range(world)
    ]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(worlds.SECONDS)
        return [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()


def rows() -> Iterator[tuple[str, str, int]]:
    """Published line, command and ranks, as the table of the document has them."""
    for line, command, ranks in re.findall(
        r"^\| `(\w+/[^`]+)` \| `gems (\w+)` \| (\d+) \|", DOC.read_text(), re.MULTILINE
    ):
        yield line, command, int(ranks)


def test_the_table_of_the_document_has_the_lines_that_are_typed_here() -> None:
    assert {line: (command, ranks) for line, command, ranks in rows()} == LINES


@pytest.mark.parametrize("line", LINES)
def test_a_published_line_has_the_plan_that_it_had_there(line: str) -> None:
    plan = planned(line)
    assert plan.world == LINES[line][1]
    assert (plan.schedule == "gems") == plan.bidirectional == ("gems_master" in line)
    assert bool(plan.spatial) == ("_sp" in line)
    assert plan.grad_sync == "end", "--enable-master-comm-opt is off there"
    lowered(plan)  # proven


@pytest.mark.parametrize("line", LINES)
def test_a_published_line_runs_as_one_job(line: str, tmp_path: Path) -> None:
    arguments = small(line, tmp_path)
    world = plan_from(given(arguments)).world
    job = os.getpid() * 100 + list(LINES).index(line)
    assert mpirun_rsh(world, arguments, job) == [0] * world
    if LINES[line][0] == "train":
        assert json.loads((tmp_path / "plan.json").read_text())["ranks"] == world
        steps = [json.loads(x) for x in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in steps if row["kind"] == "train"] == [1]
    else:
        assert json.loads((tmp_path / "metrics.json").read_text())["images_per_second"] > 0


def test_ranks_without_a_plan_for_them_do_not_train_by_themselves(tmp_path: Path) -> None:
    """Story: each of them trained the whole network, all in the same folder."""
    alone = ["train", *TINY, "--no-save", "--out", str(tmp_path / "run")]
    assert mpirun_rsh(2, alone, os.getpid()) == [1, 1]
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


# --- defaults -------------------------------------------------------------------------------------


def test_like_sets_the_defaults_that_were_published_and_what_is_typed_wins(tmp_path: Path) -> None:
    found = given(["train", "--like", "mpi4dl"])
    names = ("optimizer", "learning_rate", "weight_decay", "learning_rate_decay", "batch_size")
    assert [getattr(found, name) for name in names] == ["adam", 0.001, 0.0001, 0.85, 32]
    names = ("stages", "app", "enable_master_comm_opt", "enable_evaluation", "samples", "times")
    assert [getattr(found, n) for n in names] == [2, "synthetic", False, False, 320, 0]
    typed = "--optimizer sgd --batch-size=4 --stages 3 --enable-evaluation --app pictures"
    found = given(["train", "--like", "mpi4dl", *typed.split()])
    assert (found.optimizer, found.batch_size, found.stages) == ("sgd", 4, 3)
    assert (found.enable_evaluation, found.app, found.learning_rate) == (True, "pictures", 0.001)
    assert found.samples == 1024, "ten batches are of noise"
    (tmp_path / "run.yaml").write_text("like: mpi4dl\nbatch-size: 8\n")
    parser = parser_of("train")
    both = like.expanded(expanded(["--config", str(tmp_path / "run.yaml")], parser), parser)
    assert parsed(*both).batch_size == 8 and parsed(*both).optimizer == "adam"


def test_evaluation_in_a_training_like_theirs_tells_what_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    like_it = ["--like", "mpi4dl", "--split-size", "1", "--no-save", "--out", str(tmp_path)]
    assert main(["train", *like_it, *TINY, "--enable-evaluation"]) == 0
    assert "inference without training, which is gems eval" in caplog.text


@pytest.mark.parametrize(
    "typed", ["--plan p.json", "--auto 4", "--spatial 1x2", "--schedule 1f1b", "--model unet"]
)
def test_like_gives_way_to_what_contradicts_it(typed: str) -> None:
    like_it = ["train", "--like", "benchmark_amoebanet_gems_master_with_sp", *typed.split()]
    reject(given(like_it))
    if "--plan" not in typed and "--auto" not in typed:
        assert plan_from(given(like_it)).depth == 2


def test_like_a_script_that_is_not_there_names_those_that_are_like_it() -> None:
    with pytest.raises(GemsError, match=r"no such script; did you mean benchmark_resnet_sp\b"):
        given(["train", "--like", "benchmarks/benchmark_resnet_ps.py"])


def test_every_default_of_a_script_is_an_option_of_gems_train() -> None:
    known = parser_of("train")._option_string_actions
    names = {name for defaults in like.SCRIPTS.values() for name in defaults}
    assert {name for name in names if f"--{name}" not in known} == {"batches"}


# --- data and weights -----------------------------------------------------------------------------


def test_class_folders_need_no_other_option_with_app_1(tmp_path: Path) -> None:
    for name, grey in (("normal", 200), ("tumor", 90)):
        (tmp_path / "train" / name).mkdir(parents=True)
        Image.new("RGB", (8, 8), (grey, 20, grey)).save(tmp_path / "train" / name / "1.png")
    app = ["--app", "1", "--datapath", tmp_path / "train", "--image-size", 8]
    pictures = source_from(parsed(*app))
    assert isinstance(pictures, Folders) and pictures.names == ("normal", "tumor")
    tiles = source_from(parsed(*app, "--stride", 4, "--image-size", 4, "--tissue", 0))
    assert isinstance(tiles, Slides) and tiles.names == ("normal", "tumor") and len(tiles) == 8
    patients = source_from(parsed(*app, "--num-classes", 1, "--tissue", 0))
    assert isinstance(patients, Slides) and patients.classes == 0, "folders, but not classes"
    (tmp_path / "train" / "other.png").symlink_to(tmp_path / "train" / "tumor" / "1.png")
    assert source_from(parsed(*app, "--tissue", 0)).classes == 0


def test_weights_are_random_only_if_asked_for_and_the_result_has_the_speed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["eval", *TINY, "--out", str(tmp_path)]
    assert main(line) == 1
    assert "needs --checkpoint" in capsys.readouterr().err
    assert main([*line, "--enable-evaluation"]) == 0
    assert "weights are random" in caplog.text
    assert "images/s" in capsys.readouterr().out
    assert json.loads((tmp_path / "metrics.json").read_text())["images_per_second"] > 0


@pytest.mark.parametrize("command", ["train", "eval"])
def test_an_unknown_model_is_one_line_with_names_like_it(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--model", "resnet110", "--app", "3", "--enable-evaluation"]) == 1
    (told,) = capsys.readouterr().err.splitlines()
    assert "there is no model 'resnet110'; did you mean resnet110_v2" in told
