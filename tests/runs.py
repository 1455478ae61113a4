"""Runs of `gems train` and `gems eval` in this process, and what they leave. Not a test itself."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gems.cli import eval as judging
from gems.cli import train as training
from gems.cli.main import main
from gems.cli.ranks import free_port
from tests import worlds

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
    """`gems eval`: its metrics, without its speed, which differs from run to run."""
    assert main(["eval", *base, *map(str, options), "--out", str(folder)]) == 0
    found = json.loads((folder / "metrics.json").read_text())
    assert found.pop("images_per_second") > 0
    assert 0 < found["batch_latency"]["median"] <= found.pop("batch_latency")["p95"]
    return found


def parser_of(command: str) -> argparse.ArgumentParser:
    commands = argparse.ArgumentParser().add_subparsers()
    {"train": training, "eval": judging}[command].add(commands)
    return commands.choices[command]


def parsed(*options: object, command: str = "train") -> argparse.Namespace:
    return parser_of(command).parse_args([*map(str, options)])


class Ranks:
    """`gems` as real processes over gloo, forked from a server that has torch loaded already."""

    def __init__(self, world: int, words: Sequence[object]) -> None:
        text, port = [*map(str, words)], free_port()
        self.processes = [
            worlds.fork.Process(target=_rank, args=(rank, world, port, text))
            for rank in range(world)
        ]
        for process in self.processes:
            process.start()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    @property
    def alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def tell(self, rank: int, number: signal.Signals) -> None:
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def codes(self) -> list[int | None]:
        """Exit codes, once all have ended; None of one that does not."""
        for process in self.processes:
            process.join(worlds.SECONDS)
        return [process.exitcode for process in self.processes]


def on_ranks(world: int, *words: object) -> list[int | None]:
    with Ranks(world, words) as ranks:
        return ranks.codes()


def _rank(rank: int, world: int, port: int, words: list[str]) -> None:
    torch.set_num_threads(1)
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    places |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in places.items()})
    sys.stdout.flush()
    os._exit(main(words))
