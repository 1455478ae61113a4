"""`gems train` and `gems plan` with a Keras model on the torch backend: an nn.Module like any."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from gems.cli.main import main

MODEL = (
    *("--model", "keras/MobileNet", "--model-option", "alpha=0.25", "--image-size", "32"),
    *("--num-classes", "3"),
)


def test_a_keras_model_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *MODEL, "--split-size", "2"]) == 0
    assert "conv_pw_7" in capsys.readouterr().out


def test_a_keras_model_is_trained_and_evaluated(tmp_path: Path) -> None:
    out, again = tmp_path / "train", tmp_path / "eval"
    data = ["--app", "synthetic", "--samples", "8", "--held-out", "0.5", "--batch-size", "4"]
    given = ["train", *MODEL, *data, "--optimizer", "adam", "--out", str(out)]
    assert main([*given, "--learning-rate", "0.001"]) == 0
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert math.isfinite(rows[0]["loss"])
    order = ["eval", "--config", str(out / "config.yaml"), "--checkpoint", str(out)]
    assert main([*order, "--out", str(again)]) == 0
    found = json.loads((again / "metrics.json").read_text())
    assert found["accuracy"] == rows[-1]["accuracy"]
