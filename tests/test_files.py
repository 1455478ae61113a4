"""Files that GEMS writes: permissions by the umask, one run per folder, links left alone."""

from __future__ import annotations

import logging
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gems.cli.lock import locked
from gems.cli.main import main
from gems.data.heatmap import heat_map
from gems.data.sample import sample_slides
from gems.data.slides import Slides
from gems.errors import CheckpointError, GemsError
from gems.files import write
from gems.torch.checkpoint.atomic_folder import remove_unfinished
from gems.torch.checkpoint.manifest import remove_all
from gems.torch.trainer import Trainer
from tests.runs import TINY, Ranks, trained
from tests.saved import ONE, fingerprint, on_ranks, saved

# --- permissions ----------------------------------------------------------------------------------


@pytest.fixture(params=[0o077, 0o027, 0o002, 0o000], ids=oct)
def umask(request: Any) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    """Of everything below a folder and itself."""
    return {str(p.relative_to(folder)): stat.S_IMODE(p.stat().st_mode) for p in folder.rglob("*")}


def assert_as_the_umask_says(folder: Path, umask: int) -> None:
    found = modes(folder)
    assert found
    for name, mode in found.items():
        full = 0o777 if (folder / name).is_dir() else 0o666
        assert mode == full & ~umask, f"{name} is {oct(mode)} under umask {oct(umask)}"


def test_a_run_writes_all_its_files_as_the_umask_says(tmp_path: Path, umask: int) -> None:
    """Checkpoints, plan, options, metrics, pictures, report, both exports, TensorBoard."""
    out = tmp_path / "run"
    trained(out, "--save", "--export", out / "w.pt", "--tensorboard", "--steps", 1)
    assert {"report.html", "config.yaml", "w.pt", "tensorboard"} <= {p.name for p in out.iterdir()}
    assert_as_the_umask_says(out, umask)


def test_single_files_are_written_as_the_umask_says(tmp_path: Path, umask: int) -> None:
    out = tmp_path / "x"
    plan = ["--stages", "2", "--parts", "2"]
    pictures = ["--svg", "a.svg", "--html", "a.html", "--trace", "a.trace"]
    pictures = [word if word.startswith("--") else str(out / word) for word in pictures]
    assert main(["draw", *plan, *pictures]) == 0
    assert main(["simulate", *plan, "--out", str(out / "timeline.json")]) == 0
    assert main(["machine", "--machine", "v100", "--out", str(out / "machine.json")]) == 0
    trainer = on_ranks(ONE, lambda trainer: trainer)[0]
    trainer.export(out / "w.safetensors")
    sample = sample_slides(out / "sample", 128)
    Slides(sample.slide, 128, tissue=0.0).save(out / "coords")
    heat_map(out / "maps", sample.slide, [[0, 0]], 64, np.ones((1, 1)), ["a"])
    assert len(modes(out)) == 18
    assert_as_the_umask_says(out, umask)


# --- one run per folder ---------------------------------------------------------------------------


def test_a_folder_in_use_is_not_touched_and_the_message_names_the_holder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained(tmp_path / "run", "--save")
    assert ".lock" not in run.files
    before = fingerprint(run.folder)
    monkeypatch.setattr("gems.cli.train.start", lambda *_: pytest.fail("ranks were started"))
    resumed = [*TINY, "--resume", "--out", str(run.folder)]
    with locked(run.folder):
        held = fingerprint(run.folder)
        assert main(["train", *resumed, "--num-epochs", "2"]) == 1
        assert main(["train", *resumed, "--split-size", "2"]) == 1
        assert main(["eval", *TINY, "--checkpoint", str(run.folder), "--out", str(run.folder)]) == 1
        assert fingerprint(run.folder) == held
    said = capsys.readouterr().err
    assert (
        said.count(f"in use by another run (process {os.getpid()} on {os.uname().nodename})") == 3
    )
    assert "choose another --out" in said
    assert fingerprint(run.folder) == before
    assert main(["train", *resumed, "--num-epochs", "2"]) == 0


def test_rank_0_of_a_run_on_two_ranks_holds_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    words = ["train", *TINY, "--split-size", "2", "--num-epochs", "100000", "--out", str(out)]
    with Ranks(2, words) as ranks:
        while not (out / "metrics.jsonl").exists():
            assert ranks.alive
            time.sleep(0.01)
        assert main(["train", *TINY, "--out", str(out), "--overwrite"]) == 1
        assert f"process {ranks.processes[0].pid} on" in capsys.readouterr().err
        for rank in (0, 1):
            ranks.tell(rank, signal.SIGKILL)
        ranks.codes()
        assert (out / ".lock").exists()  # nobody was left to remove it
    trained(out, "--overwrite")


HOLD = """
import sys, time
from pathlib import Path
from gems.cli.lock import locked
with locked(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(100)
"""


def test_a_lock_ends_with_its_process_and_a_stale_file_blocks_nobody(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None and holder.stdout.readline() == "locked\n"
    with pytest.raises(GemsError, match=f"in use by another run .process {holder.pid} on"):
        locked(tmp_path).__enter__()
    holder.kill()
    holder.wait()
    assert (tmp_path / ".lock").exists()
    with locked(tmp_path):
        assert str(os.getpid()) in (tmp_path / ".lock").read_text()
    assert not (tmp_path / ".lock").exists()


def test_a_lock_that_is_a_link_is_not_written_to_and_no_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "mine")
    with pytest.raises(GemsError, match="is a link"):
        locked(tmp_path / "run").__enter__()
    assert (tmp_path / "mine").read_text() == "mine"
    with pytest.raises(GemsError, match="is not a folder; choose another --out"):
        locked(tmp_path / "mine").__enter__()


def test_where_files_cannot_be_locked_there_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", failing)
    with caplog.at_level(logging.WARNING), locked(tmp_path), locked(tmp_path):
        pass
    assert "cannot be locked" in caplog.text


# --- links, and what others wrote -----------------------------------------------------------------


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    return on_ranks(ONE, lambda trainer: trainer)[0]


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A checkpoint of somebody else, with a file of their own beside it."""
    saved(tmp_path / "elsewhere" / "step-1", ONE, steps=0)
    (tmp_path / "elsewhere" / "precious").write_text("precious")
    (tmp_path / "run").mkdir()
    return tmp_path / "elsewhere"


def test_a_checkpoint_that_is_a_link_is_replaced_and_what_it_leads_to_stays(
    elsewhere: Path, tmp_path: Path, trainer: Trainer
) -> None:
    before = fingerprint(elsewhere)
    (link := tmp_path / "run" / "step-1").symlink_to(elsewhere / "step-1")
    trainer.save(link, extra="new")
    assert not link.is_symlink() and link.is_dir() and trainer.load(link) == "new"
    (dangling := tmp_path / "run" / "step-2").symlink_to(tmp_path / "nothing")
    trainer.save(dangling)
    assert not dangling.is_symlink() and not (tmp_path / "nothing").exists()
    (foreign := tmp_path / "run" / "step-3").symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match="is not a checkpoint, so it is not replaced"):
        trainer.save(foreign)
    assert foreign.is_symlink() and fingerprint(elsewhere) == before
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["step-1", "step-2", "step-3"]


def test_old_checkpoints_that_are_links_go_without_what_they_lead_to(
    elsewhere: Path, tmp_path: Path, trainer: Trainer
) -> None:
    before, run = fingerprint(elsewhere), tmp_path / "run"
    for number in (1, 2):
        (run / f"step-{number}").symlink_to(elsewhere / "step-1")
    trainer.save(run / "step-3", keep=1)
    assert [p.name for p in run.iterdir()] == ["step-3"]
    (run / "step-1").symlink_to(elsewhere / "step-1")
    remove_all(run)
    assert not list(run.iterdir()) and fingerprint(elsewhere) == before


def test_a_run_in_a_folder_that_is_a_link_writes_where_it_leads(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch" / "precious").write_text("precious")
    (tmp_path / "run").symlink_to(tmp_path / "scratch")
    trained(tmp_path / "run", "--save", "--steps", 1)
    trained(tmp_path / "run", "--save", "--steps", 1, "--overwrite")
    assert (tmp_path / "run").is_symlink()
    assert (tmp_path / "scratch" / "precious").read_text() == "precious"
    assert (tmp_path / "scratch" / "report.html").is_file()


def other_app(path: Path) -> None:
    """A folder with a manifest, as browsers and archives have them."""
    path.mkdir(parents=True)
    (path / "manifest.json").write_text('{"name": "an app"}')
    (path / "photo.jpg").write_bytes(b"photo")


def test_nothing_that_others_wrote_is_deleted(
    elsewhere: Path, tmp_path: Path, trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    """Not by replacing, not by keeping few, not by --overwrite, not by tidying up."""
    run = tmp_path / "run"
    trainer.save(run / "step-1")
    (run / "step-1" / "notes.txt").write_text("the best one")
    other_app(run / "step-2")
    other_app(run / "data.tmp-deadbeef")
    (run / "step-9.tmp-01234567").symlink_to(elsewhere)
    before = fingerprint(tmp_path)
    for name in ("step-1", "step-2"):
        with pytest.raises(CheckpointError, match=r"did not write|is not a checkpoint"):
            trainer.save(run / name)
    with caplog.at_level(logging.WARNING):
        remove_all(run)
        remove_unfinished(run)
    assert "step-1 stays: it holds ['notes.txt'], which GEMS did not write" in caplog.text
    trainer.save(run / "step-3", keep=1)
    after = fingerprint(tmp_path)
    assert {k: v for k, v in after.items() if "step-3" not in k} == before


def test_a_file_that_is_a_link_is_replaced_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "plan.json").symlink_to(tmp_path / "mine")
    write(tmp_path / "plan.json", "new")
    assert not (tmp_path / "plan.json").is_symlink()
    assert (tmp_path / "plan.json").read_text() == "new"
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_link_at_the_temporary_name_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").write_text("mine")
    monkeypatch.setattr("os.urandom", bytes)
    (tmp_path / f".plan.json.{bytes(6).hex()}").symlink_to(tmp_path / "mine")
    with pytest.raises(FileExistsError):
        write(tmp_path / "plan.json", "new")
    assert (tmp_path / "mine").read_text() == "mine"


def test_devices_and_pipes_are_written_to_and_not_replaced(tmp_path: Path) -> None:
    """As root, `gems draw --svg /dev/null` put a file in the place of /dev/null."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write(pipe, "text")
    assert os.read(reader, 100) == b"text" and stat.S_ISFIFO(pipe.stat().st_mode)
    os.close(reader)
    write("/dev/null", "text")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    with pytest.raises(GemsError, match="is a folder; give the name of a file"):
        write(tmp_path, "text")


def test_heat_maps_do_not_replace_slides_or_each_other(tmp_path: Path) -> None:
    from PIL import Image

    Image.fromarray(np.zeros((64, 64, 3), np.uint8)).save(tmp_path / "a.png")
    before = fingerprint(tmp_path)
    with pytest.raises(GemsError, match="would replace the slide"):
        heat_map(tmp_path, tmp_path / "a.png", [[0, 0]], 64, np.ones((1, 1)), ["x"])
    assert fingerprint(tmp_path) == before


def test_heat_maps_of_slides_of_one_name_get_folders_of_their_own(tmp_path: Path) -> None:
    from PIL import Image

    from gems.cli.heat_maps import heat_maps
    from tests.runs import parsed

    for folder in ("left", "right"):
        (tmp_path / "slides" / folder).mkdir(parents=True)
        for name in ("a.png", "a.jpg"):
            grey = np.full((64, 64, 3), 200, np.uint8)
            Image.fromarray(grey).save(tmp_path / "slides" / folder / name)
    slides = Slides(tmp_path / "slides", 64, tissue=0.0, labels="folders")
    given = parsed("--app", "medical", "--out", tmp_path / "out", "--num-classes", 2)
    pictures = heat_maps(given, slides, torch.rand(len(slides), 2))
    assert len(set(pictures)) == 4 and all(p.is_file() for p in pictures)
    assert all(p.is_relative_to(tmp_path / "out") for p in pictures)
