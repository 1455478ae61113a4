"""A run that is stopped at any moment and gone on with gives the bits of one that never was.

Ranks are real processes of `gems train`. The network has dropout, statistics and momentum, samples
are augmented, and metrics are taken after each epoch: all of it must be found again.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gems.cli.main import main
from gems.torch.checkpoint.weight_files import read_weights
from tests.runs import TINY, Ranks, Run, on_ranks, trained

NET = ["--model", "tests.tiny:net", "--model-option", "drop=0.3", "--model-option", "width=6"]
DATA = ["--app", "synthetic", "--samples", "48", "--num-classes", "2", "--image-size", "8"]
JOB = [*NET, *DATA, "--augment", "--num-epochs", "5", "--save-every", "4", "--clip", "1"]
JOB += ["--learning-rate-decay", "0.8"]
PAIR = ["--split-size", "2", "--times", "1", "--batch-size", "2"]  # 9 steps of 4 samples an epoch


def job(folder: Path, *options: str) -> list[str]:
    files = ["--out", str(folder), "--export", str(folder / "net.safetensors")]
    return ["train", *JOB, *PAIR, *options, *files]


def wait_for(folder: Path, row: int, alive: Callable[[], bool]) -> None:
    """Until so many rows have been noted."""
    file = folder / "metrics.jsonl"
    while not file.exists() or file.read_bytes().count(b"\n") < row:
        assert alive(), f"it ended before row {row}"
        time.sleep(0.002)


def story(run: Run) -> list[dict[str, Any]]:
    """All that was noted, but for how fast it went."""
    return [{k: v for k, v in row.items() if k != "images_per_second"} for row in run.rows]


def assert_same_bits(run: Run, whole: Run) -> None:
    assert story(run) == story(whole)
    mine, theirs = (read_weights(r.folder / "net.safetensors") for r in (run, whole))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run that nobody interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    assert on_ranks(2, *job(folder)) == [0, 0]
    run = Run(folder)
    assert len(run.losses) == 45 and len(run.of("accuracy", "eval")) == 5
    return run


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was told to stop, by a signal to `gems train` as a batch system sends it."""
    folder = tmp_path_factory.mktemp("stopped")
    command = [sys.executable, "-m", "gems", *job(folder)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_for(folder, 13, lambda: process.poll() is None)
            process.terminate()
            _, said = process.communicate(timeout=100)
        finally:
            process.kill()
    assert process.returncode == 128 + signal.SIGTERM, said
    assert "continue with --resume" in said
    done = len(Run(folder).losses)
    assert 12 <= done < 45 and f"step-{done:06d}" in Run(folder).checkpoints
    assert "report.html" not in Run(folder).files
    return folder


def test_a_run_that_was_told_to_stop_goes_on_bit_for_bit(
    stopped: Path, whole: Run, tmp_path: Path
) -> None:
    shutil.copytree(stopped, folder := tmp_path / "run")
    assert on_ranks(2, *job(folder, "--resume")) == [0, 0]
    assert_same_bits(Run(folder), whole)
    assert "report.html" in Run(folder).files


def test_one_rank_that_is_told_to_stop_stops_all_after_the_same_step(
    whole: Run, tmp_path: Path
) -> None:
    """In the last step of an epoch, say, before its verdict."""
    with Ranks(2, job(tmp_path)) as ranks:
        wait_for(tmp_path, 20, lambda: ranks.alive)
        ranks.tell(1, signal.SIGUSR1)
        assert ranks.codes() == [128 + signal.SIGTERM, 128 + signal.SIGUSR1]
    assert on_ranks(2, *job(tmp_path, "--resume")) == [0, 0]
    assert_same_bits(Run(tmp_path), whole)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_run_with_a_rank_that_was_killed_goes_on_bit_for_bit(
    seed: int, whole: Run, tmp_path: Path
) -> None:
    draw = np.random.default_rng(seed)
    row, pause, rank = int(draw.integers(6, 40)), draw.uniform(0, 0.03), int(draw.integers(2))
    with Ranks(2, job(tmp_path)) as ranks:
        wait_for(tmp_path, row, lambda: ranks.alive)
        time.sleep(pause)
        ranks.tell(rank, signal.SIGKILL)
        codes = ranks.codes()
        assert codes[rank] == -signal.SIGKILL and codes[1 - rank] == 1, "the other one notices"
    assert on_ranks(2, *job(tmp_path, "--resume")) == [0, 0]
    assert_same_bits(Run(tmp_path), whole)


def test_a_run_goes_on_under_another_plan_with_the_same_samples_per_step(
    stopped: Path, whole: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(stopped, folder := tmp_path / "run")
    done = len(Run(folder).losses)
    words = ["train", *JOB, "--resume", "--out", str(folder)]
    assert main([*words, "--batch-size", "5"]) == (1 if done * 4 % 36 % 5 else 0)
    if done * 4 % 36 % 5:
        assert "choose --batch-size so that a step takes as many" in capsys.readouterr().err
    assert main([*words, "--batch-size", "4", "--parts", "2"]) == 0
    alone = Run(folder)
    assert alone.losses[:done] == whole.losses[:done]
    assert alone.losses == pytest.approx(whole.losses, rel=1e-3)
    assert alone.plan["schedule"] == "1f1b"


# --- in one process -------------------------------------------------------------------------------


def test_a_damaged_newest_checkpoint_is_passed_over_or_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--save", "--no-enable-evaluation", "--save-every", 1, "--num-epochs", 2]
    whole = trained(tmp_path, *options)
    newest = tmp_path / "checkpoints" / "step-000006"
    data = next(newest.glob("*.distcp"))
    good = data.read_bytes()
    data.write_bytes(good[: len(good) // 2])  # a truncated file shows at once
    again = trained(tmp_path, *options, "--resume")
    assert story(again) == story(whole)
    data = next(newest.glob("*.distcp"))
    data.write_bytes(bytes([good[0] ^ 1]) + good[1:])  # a flipped bit, when it is read
    assert main(["train", *TINY, *map(str, options), "--resume", "--out", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "is damaged" in said and "another checksum" in said and "take another" in said


@pytest.mark.parametrize("end", [["--num-epochs", 1], ["--num-epochs", 2, "--steps", 3]])
def test_a_run_killed_between_its_last_checkpoint_and_the_verdict_gets_one(
    end: list[Any], tmp_path: Path
) -> None:
    """There was no step left to draw, which was an error; or nobody judged."""
    whole = trained(tmp_path / "whole", *end)
    begun = ["--save", "--save-every", 3, "--keep-checkpoints", 0]
    trained(tmp_path, *begun, "--num-epochs", 2)
    for name in Run(tmp_path).checkpoints:
        if name != "step-000003":  # written after the last step of an epoch, before its verdict
            shutil.rmtree(tmp_path / "checkpoints" / name)
    assert story(trained(tmp_path, *begun, *end, "--resume")) == story(whole)


def test_a_finished_run_can_be_resumed_and_stays_as_it_is(tmp_path: Path) -> None:
    whole = trained(tmp_path, "--save", "--save-every", 3)
    told = story(whole)
    assert story(trained(tmp_path, "--save", "--save-every", 3, "--resume")) == told
    assert story(trained(tmp_path, "--save", "--steps", 3, "--resume")) == told


def test_the_verdict_of_an_epoch_is_noted_once(tmp_path: Path) -> None:
    """The checkpoint before a verdict was gone on from, with the verdict still in the journal."""
    options = ["--save", "--save-every", 3, "--num-epochs", 2, "--keep-checkpoints", 0]
    whole = story(trained(tmp_path, *options))
    for gone in ("best-000003", "best-000006", "step-000006"):
        shutil.rmtree(tmp_path / "checkpoints" / gone, ignore_errors=True)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')  # the line that was being written
    assert story(trained(tmp_path, *options, "--resume")) == whole


def test_options_of_the_command_line_hold_after_a_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The checkpoint's learning rate was taken whatever was said."""
    trained(tmp_path, "--save")
    longer = ["--save", "--num-epochs", 2, "--resume"]
    run = trained(tmp_path, *longer, "--learning-rate", 0.01, "--weight-decay", 0.1)
    assert run.rates == [0.05] * 3 + [0.01] * 3
    for other, words in (("--seed 1", "seed: 0, now 1"), ("--held-out 0.5", "on: 9, now 6")):
        assert main(["train", *TINY, "--resume", "--out", str(tmp_path), *other.split()]) == 1
        assert words in capsys.readouterr().err
