"""The environment of these tests is the one that constraints-keras.txt pins."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

import keras

ROOT = Path(__file__).parent.parent.parent


def test_the_pinned_versions_are_installed() -> None:
    pins = dict(re.findall(r"^(\S+)==(\S+)$", (ROOT / "constraints-keras.txt").read_text(), re.M))
    assert len(pins) > 15
    assert {name: version(name) for name in pins} == pins


def test_keras_runs_on_tensorflow() -> None:
    assert keras.backend.backend() == "tensorflow"
