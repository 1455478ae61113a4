"""Runs of `gems train` and `gems eval` in this process, and what they leave. Not a test itself."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gems.cli import eval as judging
from gems.cli import train as training
from gems.cli.main import main

# 9 samples to train on and 3 held out: three steps of a network that has 200 weights.
NOISE = ["--app", "synthetic", "--samples", "12", "--num-classes", "2", "--image-size", "8"]
TINY = ["--model", "tests.tiny:net", *NOISE, "--batch-size", "3"]
PIXELS = ["--model", "tests.tiny:pixels", *NOISE, "--batch-size", "3", "--task", "segment"]


@dataclass(frozen=True)
class Run:
    """A folder of a run."""

    folder: Path

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(x) for x in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def of(self, name: str, kind: str = "train") -> list[Any]:
        return [row[name] for row in self.rows if row["kind"] == kind and name in row]

    @property
    def losses(self) -> list[float]:
        return self.of("loss")

    @property
    def rates(self) -> list[float]:
        return self.of("learning_rate")

    @property
    def plan(self) -> dict[str, Any]:
        return json.loads((self.folder / "plan.json").read_text())

    @property
    def checkpoints(self) -> list[str]:
        folder = self.folder / "checkpoints"
        return sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []

    @property
    def files(self) -> set[str]:
        return {p.name for p in self.folder.iterdir()}


def trained(folder: Path, *options: object, base: Sequence[str] = TINY) -> Run:
    """`gems train` to its end; it saves no checkpoints unless `--save` is among the options."""
    words = ["train", *base, "--no-save", *map(str, options), "--out", str(folder)]
    assert main(words) == 0
    return Run(folder)


def judged(folder: Path, *options: object, base: Sequence[str] = TINY) -> dict[str, Any]:
    """`gems eval`: its metrics."""
    assert main(["eval", *base, *map(str, options), "--out", str(folder)]) == 0
    file = folder / "metrics.json"
    return json.loads(file.read_text()) if file.exists() else {}


def parser_of(command: str) -> argparse.ArgumentParser:
    commands = argparse.ArgumentParser().add_subparsers()
    {"train": training, "eval": judging}[command].add(commands)
    return commands.choices[command]


def parsed(*options: object, command: str = "train") -> argparse.Namespace:
    return parser_of(command).parse_args([*map(str, options)])
