"""`gems plan`, `gems train` and the other commands with models of keras.applications."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from gems.cli.main import main
from gems.files import from_json
from gems.keras import checkpoint
from gems.plans.plan import Plan

ROOT = Path(__file__).parent.parent.parent
MODEL = (
    *("--model", "keras/MobileNet", "--model-option", "alpha=0.25"),
    *("--model-option", "dropout=0.5", "--image-size", "32", "--num-classes", "3"),
)
TRAIN = (
    *("train", *MODEL, "--app", "synthetic", "--samples", "12", "--held-out", "0.34"),
    *("--batch-size", "4", "--parts", "2", "--optimizer", "adam", "--learning-rate", "0.001"),
)


@contextmanager
def float32() -> Iterator[None]:
    """Other tests of this process run in float64, before and after."""
    before = keras.config.floatx()
    keras.config.set_floatx("float32")
    try:
        yield
    finally:
        keras.config.set_floatx(before)


@pytest.fixture(autouse=True)
def in_float32() -> Iterator[None]:
    with float32():
        yield


def rows(folder: Path, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in found if row["kind"] == kind]


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in rows(folder, "train")]


# --- models and plans -----------------------------------------------------------------------------


def test_the_planner_chooses_for_a_keras_model_as_for_any(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    assert main(["plan", *MODEL, "--auto", "2", "--memory", "1GiB", "--out", str(out)]) == 0
    told = capsys.readouterr().out
    assert "family" in told and "limited by" in told
    assert "stage  ranks" in told and "conv1" in told
    assert from_json(Plan, out.read_text()).world == 2
    assert main(["check", *MODEL, "--plan", str(out)]) == 0


def test_a_keras_model_is_traced_simulated_drawn_and_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", *MODEL]) == 0
    assert "conv_dw_13" in capsys.readouterr().out
    stages = ["--split-size", "2", "--parts", "2", "--batch-size", "2"]
    assert main(["simulate", *MODEL, *stages, "--machine", "v100"]) == 0
    picture = tmp_path / "stages.svg"
    assert main(["draw", "--partition", *MODEL, *stages, "--svg", str(picture)]) == 0
    assert picture.exists()
    assert main(["check", *MODEL, *stages, "--recompute", "no_layer"]) == 1


def test_an_unknown_model_is_told_with_near_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "keras/Resnet5"]) == 1
    told = capsys.readouterr().err
    assert "keras has no model 'Resnet5'" in told and "ResNet50" in told


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--accumulate", "2"], "--accumulate 2: a step is an update"),
        (["--precision", "fp16"], "--precision fp16"),
        (["--device", "cuda"], "--device cuda"),
        (["--compile"], "--compile:"),
        (["--optimizer", "radam"], "--optimizer radam"),
        (["--class-weights", "1,2,3"], "--class-weights 1,2,3"),
        (["--export", "net.pt"], "the ending must be one of .keras"),
        (["--zero", "1", "--data", "2"], "zero shards state"),
        (["--split-size", "2", "--schedule", "2bw"], "schedule '2bw'"),
        (["--task", "segment"], "--task segment"),
    ],
)
def test_options_that_keras_models_do_not_take_are_rejected_by_name(
    options: list[str], told: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Before any rank is started."""
    assert main([*TRAIN, *options, "--out", str(tmp_path)]) == 1
    assert told in capsys.readouterr().err


def test_verify_names_what_compares_keras_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *MODEL]) == 1
    assert "tests.keras.applications" in capsys.readouterr().err


# --- runs -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two epochs on one rank."""
    folder = tmp_path_factory.mktemp("one")
    given = [*TRAIN, "--num-epochs", "2", "--export", str(folder / "net.keras")]
    with float32():  # it is made before what each test begins with
        assert main([*given, "--out", str(folder)]) == 0
    return folder


def test_one_command_starts_two_ranks_which_train_as_one_does(one: Path, tmp_path: Path) -> None:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("TF_NUM")}
    done = subprocess.run(
        [sys.executable, "-m", "gems", *TRAIN, "--split-size", "2", "--num-epochs", "2",
         "--out", str(tmp_path)],
        cwd=ROOT, env=clean, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "peak memory" in done.stdout
    assert len(from_json(Plan, (tmp_path / "plan.json").read_text()).stages) == 2  # type: ignore
    np.testing.assert_allclose(losses(tmp_path), losses(one), rtol=1e-3)
    assert [row["accuracy"] for row in rows(tmp_path, "eval")] == [
        row["accuracy"] for row in rows(one, "eval")
    ]


def test_a_run_that_is_resumed_is_one_that_was_never_interrupted(one: Path, tmp_path: Path) -> None:
    """Weights, the optimizer's state, the order of the samples and dropout go on."""
    given = [*TRAIN, "--num-epochs", "2", "--out", str(tmp_path)]
    assert main([*given, "--steps", "1"]) == 0
    assert main(given) == 1, "it neither resumes nor overwrites unasked"
    assert main([*given, "--resume"]) == 0
    assert losses(tmp_path) == losses(one)


def test_evaluation_takes_a_run_a_checkpoint_and_keras_files(one: Path, tmp_path: Path) -> None:
    last = checkpoint.latest(one / "checkpoints")
    assert last is not None
    expected = rows(one, "eval")[-1]
    for given in (last, one / "net.keras", last / checkpoint.WEIGHTS):
        out = tmp_path / given.name
        order = ["eval", "--config", str(one / "config.yaml"), "--checkpoint", str(given)]
        assert main([*order, "--out", str(out)]) == 0
        found = json.loads((out / "metrics.json").read_text())
        assert found["accuracy"] == expected["accuracy"] and found["auc"] == expected["auc"]


def test_a_damaged_checkpoint_is_rejected(one: Path, tmp_path: Path) -> None:
    folder = tmp_path / "step-000001"
    folder.mkdir()
    last = checkpoint.latest(one / "checkpoints")
    assert last is not None
    for file in last.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = bytearray((folder / checkpoint.WEIGHTS).read_bytes())
    weights[len(weights) // 2] ^= 1
    (folder / checkpoint.WEIGHTS).write_bytes(weights)
    with pytest.raises(RuntimeError, match="another checksum"):
        checkpoint.read(folder)
    (folder / checkpoint.WEIGHTS).write_bytes(weights[:-1])
    assert checkpoint.latest(tmp_path) is None
